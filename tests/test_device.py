"""Refusals, locks, Ctrl-C. Run with: python -m pytest tests/test_device.py

Devices, dtypes, ranks and stops are tested where they are used, in tests/test_train.py.
"""

import argparse
import errno
import fcntl
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import device
from tokenizer import train_bpe

ROOT = Path(__file__).parent.parent


def ended_by(error):
    """How a script ends that raises an error: its exit status."""
    with pytest.raises(SystemExit) as ended, device.refusals(argparse.ArgumentParser("script.py")):
        raise error
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (ValueError("no data; make it"), 2, "script.py: no data; make it\n"),
        (ValueError("of two\nlines\n"), 2, "script.py: of two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), 2,
         "script.py: [Errno 28] No space left: 'a/b'\n"),
        (KeyboardInterrupt(), 130, "script.py: interrupted\n"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_sentence(capsys, error, status, sentence):
    assert ended_by(error) == status
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyError("a fault"), AssertionError()])
def test_a_fault_of_our_own_keeps_its_traceback(error):
    with pytest.raises(type(error)), device.refusals(argparse.ArgumentParser("script.py")):
        raise error


def test_a_locked_folder_is_refused_until_the_lock_is_closed(tmp_path):
    held = device.hold(tmp_path / "new")
    with pytest.raises(ValueError, match="another run is at work in .*new; wait"):
        device.hold(tmp_path / "new")
    held.close()
    device.hold(tmp_path / "new").close()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def without_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    device.hold(tmp_path).close()


def test_on_one_rank_a_function_is_only_called():
    assert device.from_rank_0(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        device.from_rank_0(divmod, 7, 0)


def test_ctrl_c_ends_a_script_without_a_traceback(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10**6)))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe("bpe:300", ["0123456789"]))
    command = [sys.executable, "prepare.py", "--source", tmp_path, "--out", tmp_path / "data"]
    command += ["--tokenizer", tmp_path / "tokenizer.json"]
    # What a shell starts in the background ignores Ctrl-C, and so would what it starts.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
                               preexec_fn=listen)  # fmt: skip
    while not (tmp_path / "data.partial/.lock").exists():  # it is at work
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert running.stderr.read().splitlines()[-1] == "prepare.py: interrupted"
    assert not (tmp_path / "data").exists()
