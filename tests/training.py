"""Small trainings for the tests of train.py: their data, stops, and what their folders hold."""

import contextlib
import signal
from pathlib import Path

from helpers import (
    TINY_RUN,
    assert_same,
    read_state,
    refused_main,
    timeless_metrics,
    write_random_data,
)

import train
from nanocodes.checkpoint import step_folders
from nanocodes.command import catch_stop
from train import Config

LENGTH = TINY_RUN["max_seq_len"]
VAL_WINDOWS = 7


def write_windows(folder, windows, vocab_size=64, **options):
    """A data folder of so many whole windows and a piece of one, and VAL_WINDOWS to validate."""
    sizes = [count * LENGTH + 6 for count in (windows, VAL_WINDOWS)]
    return write_random_data(folder, *sizes, vocab_size=vocab_size, **options)


def tiny_run(data, out_dir, **changes):
    """The Config of a run of eight updates, with changes."""
    return Config(**TINY_RUN | {"data": str(data), "out_dir": str(out_dir)} | changes)


@contextlib.contextmanager
def handlers_given_back():
    """Undo what a training in this process does to the handlers of signals."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(config, resume=False):
    """Train in this process, with signals as main handles them."""
    with handlers_given_back():
        train.train(config, resume, catch_stop())


def stop_during(monkeypatch, update):
    """Send SIGTERM in the middle of the update that counts from 0."""
    original = train.accumulate_gradients

    def interrupted(model, data, config, now, *others):
        if now == update:
            signal.raise_signal(signal.SIGTERM)
        return original(model, data, config, now, *others)

    monkeypatch.setattr(train, "accumulate_gradients", interrupted)


def refused(capsys, *arguments):
    """The one sentence on stderr with which train.py refuses these arguments."""
    sentence = refused_main(capsys, train.main, *arguments)
    assert sentence.startswith("train.py: ")
    return sentence


# ---------------- What a run folder holds


def newest(out):
    """The newest step folder of a run."""
    return step_folders(out)[-1]


def steps_of(out):
    """The updates of all step folders of a run."""
    return [int(step.name.removeprefix("step_")) for step in step_folders(out)]


def losses_of(out):
    """{update: training loss} of a run."""
    return {m["update"]: m["loss"] for m in timeless_metrics(out) if "loss" in m}


def assert_same_run(config, other, updates=8):
    """Assert that two runs ended after so many updates with the same weights, optimizer state and
    metrics, bit for bit."""
    assert steps_of(config.out_dir)[-1] == updates
    one = newest(Path(config.out_dir))
    assert_same(read_state(one), read_state(newest(other.out_dir)))
    assert timeless_metrics(config.out_dir) == timeless_metrics(other.out_dir)
