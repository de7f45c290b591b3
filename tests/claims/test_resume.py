"""A run that is stopped, killed or moved ends as one that never was, bit for bit.

python -m pytest tests/claims/test_resume.py
"""

import dataclasses
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY_RUN, as_options, assert_same, processes, read_state, timeless_metrics
from training import assert_same_run, newest, run, steps_of, stop_during

import train
from nanocodes import checkpoint
from train import Config

# Epoch 2 begins in the middle of the third update, epoch 3 with the sixth.
STOPS = [(1,), (3,), (4,), (5,), (6,), (7,), (2, 5), (1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_resume_equals_no_stop(stops, undisturbed, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    for number, stop in enumerate(stops):
        with monkeypatch.context() as patch:
            stop_during(patch, stop - 1)
            run(config, resume=number > 0)
        assert f"stopped after update {stop}" in capsys.readouterr().out
        assert steps_of(config.out_dir)[-1] == stop
    run(config, resume=True)
    assert_same_run(config, undisturbed)


@pytest.mark.parametrize("name", ["binary16", "gf2"])
def test_resume_equals_no_stop_with_fixed_codes(name, data, tmp_path, monkeypatch):
    whole = Config(**TINY_RUN, data=data, input_layer=name, out_dir=str(tmp_path / "whole"))
    config = dataclasses.replace(whole, out_dir=str(tmp_path / "run"))
    run(whole)
    with monkeypatch.context() as patch:
        stop_during(patch, 3)
        run(config)
    run(config, resume=True)
    assert_same_run(config, whole)


@pytest.mark.parametrize(
    ("place", "name", "after"),
    [(checkpoint, "save_file", 4), (train, "held_out_sum", 5), (train, "draw_losses", 5)],
)
def test_stop_in_a_save_or_a_validation(
    place, name, after, undisturbed, tmp_path, monkeypatch, capsys
):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    original = getattr(place, name)

    sent = []

    def interrupted(*given):
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        run(config)
    assert f"stopped after update {after}" in capsys.readouterr().out
    run(config, resume=True)
    assert_same_run(config, undisturbed)


def test_sigterm_to_the_command_saves_and_exits_0(data, tmp_path, monkeypatch):
    changes = dict(data=data, max_updates=1_000_000, out_dir=str(tmp_path / "run"))
    config = Config(**TINY_RUN | changes)
    running = subprocess.Popen(
        [sys.executable, "-u", "train.py", *as_options(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in running.stdout:
        if line.startswith("update 3/"):
            running.send_signal(signal.SIGTERM)
            break
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0 and errors == ""
    found = re.search(r"stopped after update (\d+) as asked; .*--resume.*\n$", output)
    last = int(found[1])
    assert steps_of(config.out_dir)[-1] == last
    undisturbed = dataclasses.replace(config, out_dir=str(tmp_path / "undisturbed"))
    for one, resume in ((config, True), (undisturbed, False)):
        with monkeypatch.context() as patch:
            stop_during(patch, last + 1)
            run(one, resume)
    assert steps_of(config.out_dir)[-1] == last + 2
    assert_same(read_state(newest(config.out_dir)), read_state(newest(undisturbed.out_dir)))
    assert timeless_metrics(config.out_dir) == timeless_metrics(undisturbed.out_dir)


def test_kills_at_any_moment_lose_nothing(data, tmp_path):
    changes = dict(data=data, max_updates=30, save_interval=2, eval_interval=100)
    config = Config(**TINY_RUN | changes | dict(out_dir=str(tmp_path / "killed")))
    whole = dataclasses.replace(config, save_interval=100, out_dir=str(tmp_path / "whole"))
    run(whole)
    metrics = Path(config.out_dir) / "metrics.jsonl"
    for update in (3, 7, 12):
        running = processes.Process(target=train.train, args=(config, True))
        running.start()
        end = time.monotonic() + 60
        while not (metrics.exists() and f'"update": {update},' in metrics.read_text()):
            assert running.is_alive() and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        running.kill()
        running.join()
        assert running.exitcode == -signal.SIGKILL
    run(config, resume=True)
    assert_same(read_state(newest(config.out_dir)), read_state(newest(whole.out_dir)))
    assert timeless_metrics(config.out_dir) == timeless_metrics(whole.out_dir)


def test_resume_with_nothing_whole_begins(undisturbed, tmp_path, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "step_00000003.partial").mkdir(parents=True)
    run(config, resume=True)
    assert "from the start" in capsys.readouterr().out
    assert_same_run(config, undisturbed)


def test_finished_run_says_so(undisturbed, capsys):
    before = read_state(newest(undisturbed.out_dir)), timeless_metrics(undisturbed.out_dir)
    train.main([*as_options(undisturbed), "--resume"])
    assert f"{undisturbed.out_dir} is finished after 8 updates\n" in capsys.readouterr().out
    after = read_state(newest(undisturbed.out_dir)), timeless_metrics(undisturbed.out_dir)
    assert_same(before[0], after[0])
    assert before[1] == after[1]


def test_free_fields_may_change_on_the_way(stopped, undisturbed, tmp_path):
    shutil.copytree(stopped.data, tmp_path / "moved")
    changes = dict(
        data=str(tmp_path / "moved"),
        micro_batch=4,
        eval_interval=2,
        save_interval=1,
        log_interval=2,
        keep_checkpoints=-1,
        checkpoint_activations=True,
    )
    config = dataclasses.replace(stopped, **changes)
    run(config, resume=True)
    assert steps_of(config.out_dir) == [3, 6, 7, 8]
    one, other = read_state(newest(config.out_dir)), read_state(newest(undisturbed.out_dir))
    for name in one:
        if name.startswith("weight "):
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


def test_run_folder_may_be_moved(stopped, undisturbed, tmp_path):
    Path(stopped.out_dir).rename(tmp_path / "moved")
    config = dataclasses.replace(stopped, out_dir=str(tmp_path / "moved"))
    run(config, resume=True)
    assert_same_run(config, undisturbed)


def test_last_validation_that_was_cut_off_is_made_by_a_resume(undisturbed, tmp_path, monkeypatch):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"), eval_interval=100)
    with monkeypatch.context() as patch:
        patch.setattr(train, "held_out_sum", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(config)
    assert steps_of(config.out_dir)[-1] == 8
    run(config, resume=True)
    assert timeless_metrics(config.out_dir)[-1] == timeless_metrics(undisturbed.out_dir)[-1]
