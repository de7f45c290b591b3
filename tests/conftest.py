"""Puts the project and its test helpers on the path; the runs that several test files share."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
# One thread, also in the processes that tests start: models this small gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import evaluation  # noqa: E402 - it is on the path only now
import torch  # noqa: E402 - it reads the number of threads when it is imported
import training  # noqa: E402


@pytest.fixture(autouse=True)
def signal_handlers_given_back():
    """A script that runs in this process may catch SIGTERM and Ctrl-C; no later test sees that."""
    with training.handlers_given_back():
        yield


@pytest.fixture
def float64():
    """Models made inside have float64 weights and float64 rotary tables."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Ten windows: with four an update, eight updates are three epochs and a bit."""
    return str(training.write_windows(tmp_path_factory.mktemp("data") / "ten", 10))


@pytest.fixture(scope="session")
def more_data(tmp_path_factory):
    """A hundred windows."""
    return str(training.write_windows(tmp_path_factory.mktemp("data") / "hundred", 100))


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory):
    """The Config of a finished run of eight updates without a stop."""
    config = training.tiny_run(data, tmp_path_factory.mktemp("run") / "whole")
    training.run(config)
    return config


@pytest.fixture
def stopped(undisturbed, tmp_path, monkeypatch):
    """A run like it, stopped after update 6: it holds the steps 3 and 6."""
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        training.stop_during(patch, 5)
        training.run(config)
    assert training.steps_of(config.out_dir) == [3, 6]
    return config


@dataclasses.dataclass
class Scored:
    """A folder of data, of benchmark sets under hub/, and of runs that may be scored on them."""

    folder: Path
    models: dict  # name of a run's folder -> its model


@pytest.fixture(scope="session")
def scored(tmp_path_factory):
    """Data, benchmark sets, and three runs."""
    folder = tmp_path_factory.mktemp("scored")
    generator = np.random.default_rng(0)
    ids = (generator.zipf(1.3, 5000) % evaluation.VOCABULARY).astype(np.int64)
    data = evaluation.write_scored_data(folder / "data", ids[:4000], ids[4000:])
    evaluation.write_hub(folder / "hub")
    models = {
        name: evaluation.write_scored_run(folder / name, data, **changes)
        for name, changes in evaluation.RUNS.items()
    }
    return Scored(folder, models)


@pytest.fixture
def offline(tmp_path_factory, monkeypatch):
    """Prepared sets go to a folder of the tests, and what evaluate.py sets is undone."""
    import datasets

    cache = tmp_path_factory.getbasetemp() / "prepared"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
