"""The yardstick of speed. Run with: python -m pytest tests/test_bench.py"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments):
    command = [sys.executable, "studies/bench.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_steps_and_decoding_beside_a_peer(tmp_path):
    sizes = ["--shape", "tiny", "--rounds", 2, "--new_tokens", 8, "--device", "cpu"]
    programs = ["--programs", "learned", "gf2", "llama"]
    ran = bench("step", "decode", *sizes, *programs, "--out", tmp_path / "found.json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].endswith("found.json") and found["date"] and found["machine"]
    rows = {row["program"]: row for row in found["step"]["table"]}
    assert list(rows) == ["learned", "gf2", "llama"]
    for name, turns in found["step"]["turns"].items():
        assert all(len(values) == 2 for values in turns.values())
        if name in rows:
            parts = [sum(turns[part][turn] for part in
                         ("data", "forward", "backward", "clip", "optimizer")) for turn in (0, 1)]
            assert turns["seconds"] == pytest.approx(parts)  # nothing of a step is left out
            assert turns["flops"] == found["step"]["turns"]["learned"]["flops"]
    learned, llama = (found["decode"]["turns"][name] for name in ("learned", "llama"))
    assert learned["ids"] == llama["ids"] and len(learned["ids"][0]) == 8
    assert "| learned | 1.00" in ran.stdout and "## decode" in ran.stdout


def test_unknown_programs_are_refused():
    ran = bench("step", "--shape", "tiny", "--programs", "mamba")
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert "there is no program mamba" in ran.stderr
