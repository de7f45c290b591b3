"""What evaluate.py refuses, and kept records that are torn or changed.

python -m pytest tests/hostile/test_hostile_evaluate.py
"""

import json

import pytest
from evaluation import (
    options,
    results_of,
    write_scored_run,
    write_set,
    write_small_data,
)
from helpers import edit_json, read_json_file, refused_main, refused_script

import evaluate
from nanocodes.files import sha256

# ---------------- Runs and data


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.json", "vocab_size", None),
        ("config.json", "max_seq_len", 0),
        ("config.json", "data", [1]),
        ("state.json", "update", [1]),
    ],
)
def test_damaged_metadata_of_a_run_is_refused(name, key, value, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    edit_json(tmp_path / "config.json", dict(vocab_size=8, max_seq_len=8, data="x"))
    edit_json(tmp_path / "state.json", {})
    edit_json(tmp_path / name, {key: value})
    with pytest.raises(ValueError, match="use another checkpoint"):
        evaluate.open_run(str(tmp_path))


def test_folder_without_a_checkpoint_is_refused(tmp_path):
    assert "holds no checkpoint" in refused_script("evaluate.py", tmp_path)


def test_runs_that_do_not_compare_are_refused(scored, tmp_path, capsys):
    data = write_small_data(tmp_path / "data", seed=1)
    write_scored_run(tmp_path / "elsewhere", data)
    runs = [scored.folder / "learned", tmp_path / "elsewhere"]
    assert "--data" in refused_main(capsys, evaluate.main, *runs)
    (tmp_path / "elsewhere/tokenizer.json").write_text("{}")
    error = refused_main(capsys, evaluate.main, *runs, "--data", scored.folder / "data")
    assert "elsewhere has another tokenizer" in error


def test_data_that_changed_after_the_run_is_refused_unless_it_is_given(tmp_path, capsys):
    data = write_small_data(tmp_path / "data", seed=2)
    write_scored_run(tmp_path / "run", data)
    state = tmp_path / "run/step_00000003/state.json"
    edit_json(state, dict(data_sha256=sha256(data / "meta.json")))
    arguments = [tmp_path / "run", "--out", tmp_path / "out", "--dtype", "float32"]
    arguments = [str(argument) for argument in [*arguments, "--device", "cpu"]]
    evaluate.main(arguments)
    before = results_of(tmp_path / "out")["runs"][0]["held_out"]
    edit_json(data / "meta.json", dict(tokenizer="prepared again, otherwise"))
    error = refused_main(capsys, evaluate.main, *arguments)
    assert f"{data} changed after run was made; give it as --data" in error
    evaluate.main([*arguments, "--data", str(data)])
    assert results_of(tmp_path / "out")["runs"][0]["held_out"] == before


# ---------------- Tasks and their sets


def test_tasks_that_cannot_be_scored_are_refused(scored, tmp_path, offline, capsys):
    def refused(*arguments, hub=scored.folder / "hub"):
        given = [scored.folder / "gf2", "--benchmarks", hub, "--out", tmp_path]
        return refused_main(capsys, evaluate.main, *given, *arguments)

    assert "lm-eval has no task nonsense" in refused("--tasks", "piqa,nonsense")
    for task in ("humaneval", "mbpp", "squadv2", "gsm8k"):
        assert f"{task} needs generated text" in refused("--tasks", f"piqa,{task}")
    assert "--limit 0 " in refused("--tasks", "piqa", "--limit", "0")
    error = refused("--tasks", "truthfulqa_mc1")
    assert "`hf download truthfulqa/truthful_qa --repo-type dataset --local-dir" in error
    write_set(tmp_path / "hub", "baber/piqa", {"default": {"validation": [{"goal": "a"}]}})
    error = refused("--tasks", "piqa", hub=tmp_path / "hub")
    assert "piqa has no 'train'" in error and "even at 0 shots" in error


# ---------------- Kept records


def damaged(text, place):
    """A record's text with a 7 at a place among its keys."""
    saved = json.loads(text)
    at = saved
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = 7
    return json.dumps(saved)


def timeless(record_file):
    """A kept record less what depends on the clock."""
    saved = read_json_file(record_file)
    saved["record"]["seconds"] = 0
    saved["sha256"]["record"] = 0
    return saved


def test_damaged_record_is_made_again(scored, tmp_path, offline):
    arguments = [str(scored.folder / "gf2"), *options(scored.folder, tmp_path)]
    arguments += ["--tasks", "wikitext", "--samples", str(tmp_path / "samples.jsonl")]
    evaluate.main(arguments)
    (record_file,) = (tmp_path / "tasks").glob("*.json")
    (lines_file,) = (tmp_path / "tasks").glob("*.jsonl")
    text = record_file.read_text()
    lines = lines_file.read_text()
    expected = timeless(record_file)
    places = [["record"], ["sha256"], ["sha256", "record"], ["record", "value"]]
    for torn in ("", "{}", "[1]", text[:-9], *(damaged(text, place) for place in places)):
        record_file.write_text(torn)
        evaluate.main(arguments)
        assert timeless(record_file) == expected
    lines_file.write_text(lines[:-9])
    evaluate.main(arguments)
    assert lines_file.read_text() == lines
