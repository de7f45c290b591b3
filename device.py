"""Where a script runs: its device, the dtype of its products, its rank, and signals to stop."""

import os
import signal
import time

import torch
import torch.distributed as dist


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


def leave_ranks():
    """Undo join_ranks; every script does so on its way out, also after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


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


def catch_stop():
    """A list that a first SIGTERM or Ctrl-C makes true; a second one ends the process."""
    asked = []

    def on_signal(number, frame):
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return asked
