"""Training on a full disk, from damaged checkpoints, on wrong data, with non-finite numbers.

python -m pytest tests/hostile/test_hostile_train.py
"""

import contextlib
import dataclasses
import json
import math
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    TINY_RUN,
    as_options,
    assert_same,
    edit_json,
    read_json_file,
    read_state,
    run_ranks,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training import assert_same_run, newest, refused, run, steps_of, stop_during, write_windows

import train
from nanocodes.checkpoint import step_folders
from nanocodes.files import locked, sha256
from train import Config


def train_on_a_full_disk(config, size):
    """No file can grow beyond `size` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train.main([*as_options(config), "--resume"])


@pytest.mark.parametrize("size", [50_000, 200_000], ids=["weights", "optimizer"])
def test_full_disk_leaves_nothing_that_looks_whole(size, stopped, undisturbed, tmp_path):
    step = newest(stopped.out_dir)
    sizes = [(step / name).stat().st_size for name in ("model.safetensors", "training_state.pt")]
    assert 50_000 < sizes[0] < 200_000 < sizes[1]
    ended, _ = run_ranks(1, tmp_path, train_on_a_full_disk, stopped, size)
    assert ended[0] not in (0, None)
    assert steps_of(stopped.out_dir) == [3, 6]
    run(stopped, resume=True)
    assert_same_run(stopped, undisturbed)


def test_leftovers_of_a_kill_do_no_harm(stopped, undisturbed, capsys):
    out = Path(stopped.out_dir)
    for name in ("step_00000003", "step_00000007", "step_00000008"):
        folder = out / (name + ".partial")
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
    (out / "metrics.jsonl.partial").write_bytes(b"{")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"update": 7, "loss": 9.9, "targets": 448}\n{"update": 7, "lo')
    run(stopped, resume=True)
    assert "after step_00000006" in capsys.readouterr().out
    assert_same_run(stopped, undisturbed)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def wrong_update(path):
    path.write_text(path.read_text().replace('"update": 6', '"update": 4'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", shorten),
        ("model.safetensors", flip),
        ("training_state.pt", truncate),
        ("training_state.pt", shorten),
        ("training_state.pt", flip),
        ("training_state.pt", Path.unlink),
        ("config.json", flip),
        ("state.json", truncate),
        ("state.json", wrong_update),
        ("state.json", Path.unlink),
    ],
)
def test_damaged_newest_checkpoint_is_passed_over(name, damage, stopped, undisturbed, capsys):
    damage(newest(stopped.out_dir) / name)
    run(stopped, resume=True)
    said = capsys.readouterr().out
    assert re.search("passing over .*step_00000006", said) and "after step_00000003" in said
    assert_same_run(stopped, undisturbed)
    assert steps_of(stopped.out_dir) == [6, 8]


def test_step_without_weights_is_in_nobodys_way(stopped, undisturbed, capsys):
    (newest(stopped.out_dir) / "model.safetensors").unlink()
    run(stopped, resume=True)
    assert "after step_00000003" in capsys.readouterr().out
    assert_same_run(stopped, undisturbed)
    assert steps_of(stopped.out_dir) == [6, 8]


def test_damaged_checkpoint_crowds_out_no_whole_one(stopped, undisturbed, monkeypatch, capsys):
    flip(newest(stopped.out_dir) / "model.safetensors")
    config = dataclasses.replace(stopped, keep_checkpoints=1)
    with monkeypatch.context() as patch:
        stop_during(patch, 3)
        run(config, resume=True)
    capsys.readouterr()
    run(config, resume=True)
    assert "after step_00000004" in capsys.readouterr().out
    assert_same_run(config, undisturbed)


def test_all_checkpoints_damaged_begins_anew(stopped, undisturbed, capsys):
    for step in step_folders(stopped.out_dir):
        flip(step / "training_state.pt")
    run(stopped, resume=True)
    said = capsys.readouterr().out
    assert said.count("passing over") == 2 and "from the start" in said
    assert_same_run(stopped, undisturbed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


states = st.dictionaries(st.sampled_from(["sha256", "update"]), json_values) | json_values


@settings(max_examples=50, deadline=None)
@example(b'{"update": 8, "sha256": {}}')
@example(b'{"update": 8, "sha256": []}')
@given(st.binary() | states.map(lambda value: json.dumps(value).encode()))
def test_no_state_from_elsewhere_is_taken_for_whole(undisturbed, tmp_path_factory, state):
    out = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(undisturbed.out_dir, out)
    (newest(out) / "state.json").write_bytes(state)
    config = dataclasses.replace(undisturbed, out_dir=str(out))
    with contextlib.redirect_stdout(None):
        assert train.newest_step(config).name == "step_00000006"


def test_a_step_of_another_run_is_set_aside(stopped, undisturbed, tmp_path, capsys):
    other = dataclasses.replace(stopped, lr=0.5, max_updates=7, out_dir=str(tmp_path / "other"))
    run(other)
    newest(other.out_dir).rename(Path(stopped.out_dir) / "step_00000007")
    run(stopped, resume=True)
    assert "passing over" in capsys.readouterr().out
    assert_same_run(stopped, undisturbed)


def test_a_step_without_its_weights_is_named(stopped, undisturbed, capsys):
    (newest(stopped.out_dir) / "model.safetensors").unlink()
    run(stopped, resume=True)
    assert "step_00000006: its files are not as they were saved" in capsys.readouterr().out
    assert_same_run(stopped, undisturbed)


def test_metrics_that_are_damaged_do_not_end_a_run(stopped, undisturbed):
    with open(Path(stopped.out_dir) / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\x00\n[1]\n{"update": "3"}\n\n{"loss": 3}\n')
    run(stopped, resume=True)
    assert_same_run(stopped, undisturbed)


def test_run_is_not_overwritten(undisturbed, capsys):
    error = refused(capsys, *as_options(undisturbed))
    assert undisturbed.out_dir in error and "--resume" in error


def test_a_run_without_its_config_is_not_overwritten(stopped, capsys):
    (Path(stopped.out_dir) / "config.json").unlink()
    before = steps_of(stopped.out_dir)
    assert "holds a run" in refused(capsys, *as_options(dataclasses.replace(stopped, lr=0.5)))
    assert steps_of(stopped.out_dir) == before


def test_two_at_once_in_one_folder_are_refused(undisturbed, tmp_path, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    with locked(tmp_path / "run"):
        with pytest.raises(SystemExit) as ended:
            train.main(as_options(config))
    assert ended.value.code == 2
    assert "another run is at work" in capsys.readouterr().err
    run(config)  # the lock went with the file, and with the run that was refused


@pytest.mark.parametrize(
    "changes",
    [
        dict(lr=2e-2),
        dict(seed=1, max_updates=9),
        dict(input_layer="gf2"),
        dict(dtype="bfloat16"),
        dict(targets_per_update=128, init_seed=1, eval_windows=3),
    ],
    ids=str,
)
def test_changed_config_is_refused_by_name(changes, stopped, capsys):
    config = dataclasses.replace(stopped, **changes)
    error = refused(capsys, *as_options(config), "--resume")
    assert stopped.out_dir in error
    named = set(re.findall(r"\w+", error.replace(stopped.out_dir, "")))
    assert named & {field.name for field in dataclasses.fields(Config)} == changes.keys()


@pytest.mark.parametrize(
    "changes", [dict(input_layer="gf2", code_matrix="12"), dict(code_offset=1)]
)
def test_what_cannot_be_built_leaves_no_run_folder(changes, data, tmp_path, capsys):
    changes = dict(input_layer="binary16") | changes | dict(data=data)
    config = Config(**TINY_RUN | changes | dict(out_dir=str(tmp_path / "run")))
    refused(capsys, *as_options(config))
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused(stopped, tmp_path, capsys):
    other = write_windows(tmp_path / "other", 12)
    assert "is other data than" in refused(
        capsys, *as_options(dataclasses.replace(stopped, data=str(other))), "--resume"
    )


def test_another_tokenizer_is_refused(stopped, tmp_path, capsys):
    other = write_windows(tmp_path / "other", 10, tokenizer='{"another": 1}')
    config = dataclasses.replace(stopped, data=str(other))
    assert "tokenizer" in refused(capsys, *as_options(config), "--resume")


@pytest.mark.parametrize("name", ["learned", "binary16", "gf2"])
def test_vocabulary_beyond_the_models_is_refused(name, tmp_path, capsys):
    wide = write_windows(tmp_path / "wide", 10, vocab_size=65)
    changes = dict(data=str(wide), out_dir=str(tmp_path / "run"), input_layer=name)
    error = refused(capsys, *as_options(Config(**TINY_RUN | changes)))
    assert "65" in error and "64" in error and "--vocab_size=65" in error
    assert not (tmp_path / "run").exists()


def test_missing_short_and_unwritable_folders_are_refused(data, tmp_path, capsys):
    config = Config(**TINY_RUN, data=data, out_dir=str(tmp_path / "run"))
    nowhere = dataclasses.replace(config, data=str(tmp_path / "nowhere"))
    assert "nowhere" in refused(capsys, *as_options(nowhere))
    changes = dict(max_seq_len=256, targets_per_update=256, micro_batch=1)
    long = dataclasses.replace(config, **changes)
    assert "256" in refused(capsys, *as_options(long))
    assert "device" in refused(capsys, *as_options(dataclasses.replace(config, device="abacus")))
    assert "float16" in refused(capsys, *as_options(dataclasses.replace(config, dtype="float16")))
    uneven = dataclasses.replace(config, micro_batch=3)
    assert "micro_batch 3" in refused(capsys, *as_options(uneven))
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("not a folder")
    blocked = dataclasses.replace(config, out_dir=str(tmp_path / "file" / "run"))
    assert "file" in refused(capsys, *as_options(blocked))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_weight_stops_before_the_step(value, stopped, monkeypatch, capsys):
    step, load = newest(stopped.out_dir), train.load_checkpoint

    def poisoned(path):
        model = load(path)
        model.blocks[1].mlp.up_proj.weight.data[3, 5] = value
        return model

    monkeypatch.setattr(train, "load_checkpoint", poisoned)
    before = {path: sha256(path) for path in step.iterdir()}
    error = refused(capsys, *as_options(stopped), "--resume")
    assert "update 7 " in error and stopped.out_dir in error
    assert newest(stopped.out_dir) == step
    assert {path: sha256(path) for path in step.iterdir()} == before


def test_nonfinite_gradient_stops_before_the_step(stopped, monkeypatch, capsys):
    steps, original, step = [], train.accumulate_gradients, torch.optim.AdamW.step

    def exploding(model, *given):
        loss = original(model, *given)
        if given[2] == 7:
            next(model.parameters()).grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(train, "accumulate_gradients", exploding)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *given: (steps.append(1), step(*given))[1]
    )
    assert "update 8 " in refused(capsys, *as_options(stopped), "--resume")
    assert len(steps) == 1 and steps_of(stopped.out_dir)[-1] == 6


def test_raise_in_a_validation_loses_no_weights(data, undisturbed, tmp_path, monkeypatch):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"), save_interval=4)

    def failing(*given):
        raise RuntimeError("the validation failed")

    with monkeypatch.context() as patch:
        patch.setattr(train, "held_out_sum", failing)
        with pytest.raises(RuntimeError, match="the validation failed"):
            run(config)
    assert steps_of(config.out_dir)[-1] == 4
    config = dataclasses.replace(config, save_interval=3)
    run(config, resume=True)
    assert_same(read_state(newest(config.out_dir)), read_state(newest(undisturbed.out_dir)))


def test_a_config_edited_by_hand_sets_no_checkpoint_aside(stopped, undisturbed, capsys):
    """Such as a larger max_updates in config.json, to train for longer."""
    path = Path(stopped.out_dir) / "config.json"
    before = path.read_bytes()
    edit_json(path, {"max_updates": 9})
    longer = dataclasses.replace(stopped, max_updates=9)
    error = refused(capsys, *as_options(longer), "--resume")
    assert "step_00000006 was made with max_updates 8; change that back" in error
    assert steps_of(stopped.out_dir) == [3, 6]
    path.write_bytes(before)
    run(stopped, resume=True)
    assert_same_run(stopped, undisturbed)


def test_a_run_from_before_a_field_existed_goes_on(stopped, undisturbed):
    for folder in (Path(stopped.out_dir), *step_folders(stopped.out_dir)):
        edit_json(folder / "config.json", {"grad_clip": ...})
        if (folder / "state.json").exists():
            hashes = read_json_file(folder / "state.json")["sha256"]
            edit_json(
                folder / "state.json",
                {"sha256": hashes | {"config.json": sha256(folder / "config.json")}},
            )
    run(stopped, resume=True)
    assert steps_of(stopped.out_dir)[-1] == 8
    one = read_state(newest(stopped.out_dir))
    assert_same(one, read_state(newest(undisturbed.out_dir)))
