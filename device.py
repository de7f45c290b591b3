"""Where a script runs: its device and dtype, its ranks, and how it stops, is locked and refuses."""

import fcntl
import os
import signal
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from safetensors import SafetensorError


def pick_device(name="auto"):
    """auto, cpu, cuda, mps, ... -> torch.device; auto is the accelerator, where there is one.

    Under torchrun, LOCAL_RANK picks among the GPUs of a machine. Raises ValueError if there is
    no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.zeros(1, device=name).device
        torch.zeros(1, device=device).item()  # "meta" exists but computes nothing
    except (RuntimeError, AssertionError, ImportError):
        raise ValueError(
            f"there is no device {name}; choose another, or no more processes than GPUs"
        ) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def pick_dtype(name, device):
    """auto, float32 or bfloat16 -> the dtype of matrix products and the reason in words.

    Weights and optimizer state are float32 in any case.
    """
    if name not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype {name!r} is unknown; choose auto, float32 or bfloat16")
    if name != "auto":
        return getattr(torch, name), "as asked"
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if fast:
        return torch.bfloat16, f"auto: this {device.type} device multiplies bfloat16"
    return torch.float32, f"auto: this {device.type} device has no fast bfloat16"


def rank_and_world():
    """This process's rank and the number of processes that have joined."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def join_ranks(device):
    """Join the other processes of torchrun, if any; returns rank_and_world()."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank_and_world()


def from_rank_0(function, *arguments):
    """Call a function on rank 0 alone: every rank returns what it returned, or refuses alike."""
    if not dist.is_initialized():
        return function(*arguments)
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [function(*arguments)]
        except (ValueError, OSError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def measure_peak(device, dtype, rows, inner, columns):
    """FLOP/s of (rows, inner) @ (inner, columns) on this device, the best of eight."""
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * rows * inner * columns / min(seconds)


def hold(folder):
    """Make a folder, if need be, and keep others out of it until the returned file is closed.

    Raises ValueError if another run holds it.
    """

    def lock():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {folder}; wait for it to end") from None
        except OSError:
            pass  # some network file systems have no locks

    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")
    from_rank_0(lock)
    return file


@contextmanager
def named(path):
    """Name this file in an OSError that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def refusals(parser):
    """What each script runs in: a refusal becomes one sentence on stderr and exit status 2."""
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:
        parser.exit(2, " ".join(f"{parser.prog}: {error}".splitlines()) + "\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def catch_stop():
    """A list that a first SIGTERM or Ctrl-C makes true; a second one ends the process."""
    asked = []

    def on_signal(number, frame):
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return asked
