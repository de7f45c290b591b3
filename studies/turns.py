"""Timings beside each other: programs in processes of their own that take turns.

In each round all programs take a turn, one after another, so that what slows the machine for a
while slows all of them; a ratio is of two turns of one round.
"""

import itertools
import math
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata, util
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from nanocodes.device import pick_device, pick_dtype
from nanocodes.shards import Shards
from train import accumulate_gradients

# What torch.nn's threads and glibc's allocator are told by the environment; see the Makefile.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
SETTINGS = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "LD_PRELOAD", *KEEP_MEMORY)
PACKAGES = ("torch", "transformers", "litgpt", "tokenizers", "tiktoken", "numpy")

# ---------------- Clocks


def wait_for(device):
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(function, device):
    """(the seconds of a call, what it returned)."""
    started = time.perf_counter()
    result = function()
    wait_for(device)
    return time.perf_counter() - started, result


class Clock:
    """Tells how the time is spent: from one `begin` to the next it belongs to one part."""

    def __init__(self, device):
        self.device = device
        self.seconds = {}
        self.part = None
        self.since = 0.0

    def begin(self, part):
        """From now on the time belongs to `part`; None stops the clock."""
        wait_for(self.device)
        now = time.perf_counter()
        if self.part is not None:
            self.seconds[self.part] = self.seconds.get(self.part, 0.0) + now - self.since
        self.part = part
        self.since = now

    def reset(self):
        """Forget the seconds so far."""
        self.seconds.clear()


# ---------------- Programs and their turns


@dataclass
class Program:
    """`make` is called in the program's process: it makes all ready and returns the function
    that takes a turn, which returns {what it measures: a number or a list of numbers}."""

    make: Callable  # one that can be sent to another process
    environment: dict = field(default_factory=dict)  # variables of its process


def peak_bytes(device):
    """The most memory that this process has used: of its GPU, or else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def serve(pipe, make, device):
    """The life of a program's process: make ready, then take a turn whenever asked."""
    take_turn = make()
    take_turn()  # compiles, and allocates what stays
    with suppress(EOFError):  # once the other end is closed
        pipe.send("ready")
        while pipe.recv():
            measured = take_turn()
            pipe.send(measured | {"peak_bytes": peak_bytes(pick_device(device))})
            torch.cuda.empty_cache()  # for the next program


def interleave(programs, rounds, device):
    """{name: Program} -> {name: {what its turns measured: an array of a value for each round}}.

    `device` is the name of the one that all work on; "peak_bytes" is measured of every program.
    Raises ValueError if a program ends before its last turn.
    """
    context = multiprocessing.get_context("spawn")
    pipes = {}
    turns = {name: [] for name in programs}
    try:
        for name, program in programs.items():
            pipes[name], other_end = context.Pipe()
            process = context.Process(
                target=serve, args=(other_end, program.make, device), daemon=True
            )
            with patch.dict(os.environ, program.environment):
                process.start()
            other_end.close()
            pipes[name].recv()  # ready, before the next one starts
        for _, name in itertools.product(range(rounds), programs):
            pipes[name].send("turn")
            turns[name].append(pipes[name].recv())
    except (EOFError, ConnectionError):
        raise ValueError(f"{name} has ended; mend what it says above or leave it out") from None
    return {
        name: {key: np.array([turn[key] for turn in of_program]) for key in of_program[0]}
        for name, of_program in turns.items()
    }


def median_and_quartiles(values, digits=2):
    """The median of some values and their quartiles, in words."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


# ---------------- A turn of training

PARTS = ("data", "forward", "backward", "clip", "optimizer")  # of a step
RANDOM_IDS = 2**22  # of which a turn trains on some


class TimedShards(Shards):
    """A split of which all reading is timed as "data"."""

    clock = None

    def read(self, start, stop):
        self.clock.begin("data")
        return super().read(start, stop)


def random_shards(vocab_size, clock):
    """A split of ids drawn uniformly, without the separator."""
    ids = np.random.default_rng(0).integers(1, vocab_size, RANDOM_IDS, np.uint16)
    data = TimedShards(
        folder=Path("random"),
        meta={"vocab_size": vocab_size},
        maps=[ids],
        starts=[0],
        tokens=len(ids),
        bytes=len(ids),
    )
    data.clock = clock
    return data


def matrices(model):
    """(inputs, outputs) of every matrix that a model multiplies by."""
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def count_weights(model):
    """How many weights these matrices have."""
    return sum(math.prod(shape) for shape in matrices(model))


def training_turn(raw_model, model, optimizer, config, steps):
    """The function of a turn of so many steps, each made as train.py makes them.

    `model` is raw_model, perhaps compiled. A turn measures the mean seconds of a step and of each
    of its PARTS, the FLOPs of a step, and the last loss. It raises ValueError if that or the norm
    of the gradient is not finite.
    """
    device = next(raw_model.parameters()).device
    dtype, _ = pick_dtype(config.dtype, device)
    clock = Clock(device)
    data = random_shards(config.vocab_size, clock)
    model.register_forward_pre_hook(lambda *_: clock.begin("forward"))
    model.register_forward_hook(lambda *_: clock.begin("backward"))
    updates = itertools.count()
    attention = config.n_layers * config.max_seq_len * config.d_model  # the causal half
    flops = 6 * (count_weights(raw_model) + attention) * config.targets_per_update

    def make_step(update):
        clock.begin("data")
        loss = accumulate_gradients(model, data, config, update, 0, 1, dtype)
        clock.begin("clip")
        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), config.grad_clip)
        loss, norm = torch.stack([loss, norm]).tolist()
        if not math.isfinite(loss + norm):
            raise ValueError(f"loss {loss} and norm {norm}: a step like that is not timed")
        clock.begin("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.begin(None)
        return loss

    def take_turn():
        clock.reset()
        for _ in range(steps):
            loss = make_step(next(updates))
        seconds = {part: clock.seconds[part] / steps for part in PARTS}
        return seconds | {"seconds": sum(seconds.values()), "flops": flops, "loss": loss}

    return take_turn


# ---------------- What figures depend on


def circumstances():
    """The machine, the date, the command and the versions, as a dict."""
    cpuinfo = Path("/proc/cpuinfo")
    info = cpuinfo.read_text() if cpuinfo.exists() else ""
    cpu = info.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    versions = {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)}
    return {
        "machine": f"{cpu}, {torch.get_num_threads()} threads, GPU {gpu}",
        "date": date.today().isoformat(),
        "command": " ".join([*settings, "python", *sys.argv]),
        "python": platform.python_version(),
        **versions,
    }
