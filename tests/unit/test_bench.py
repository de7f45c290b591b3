"""The yardstick of speed. Run with: python -m pytest tests/unit/test_bench.py"""

import pytest
from helpers import read_json_file, refused_main, run_script

from studies import bench
from studies.turns import PARTS

SIZES = ["--shape", "tiny", "--rounds", "2", "--new_tokens", "8", "--device", "cpu"]


def test_steps_and_decoding_beside_a_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the programs' processes
    out = tmp_path / "found.json"
    programs = ["--programs", "learned", "gf2", "llama"]
    arguments = ["step", "decode", *SIZES, *programs, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["studies/bench.py", *arguments])
    bench.main(arguments)
    found = read_json_file(out)
    assert found["command"].endswith("found.json") and found["date"] and found["machine"]
    rows = {row["program"]: row for row in found["step"]["table"]}
    assert list(rows) == ["learned", "gf2", "llama"]
    for name, turns in found["step"]["turns"].items():
        assert all(len(values) == 2 for values in turns.values())
        if name in rows:
            parts = [sum(turns[part][turn] for part in PARTS) for turn in (0, 1)]
            assert turns["seconds"] == pytest.approx(parts)  # nothing of a step is left out
            assert all(seconds > 0 for part in PARTS for seconds in turns[part])
            assert turns["flops"] == found["step"]["turns"]["learned"]["flops"]
    learned, llama = (found["decode"]["turns"][name] for name in ("learned", "llama"))
    assert learned["ids"] == llama["ids"] and len(learned["ids"][0]) == 8
    page = capsys.readouterr().out
    assert "| learned | 1.00" in page and "## decode" in page


def test_unknown_programs_are_refused():
    ran = run_script("studies/bench.py", "step", "--shape", "tiny", "--programs", "mamba")
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert "there is no program mamba; choose from learned, binary16, gf2" in ran.stderr


def test_unknown_shapes_are_refused(capsys):
    arguments = ["step", "--shape", "huge", "--programs", "learned"]
    error = refused_main(capsys, bench.main, *arguments)
    assert "there is no shape huge; give a file or tiny, small-vocab" in error
