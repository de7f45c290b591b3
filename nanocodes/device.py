"""Where and in which type a script computes: its device, the dtype of its matrix products."""

import os
import time

import torch


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


def autocast(device, dtype):
    """A context in which matrix products are of this dtype: torch.autocast, off for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


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


def peak_flops(device, dtype):
    """FLOP/s of a product so large that those of a model are hardly faster: what MFU is of."""
    side = 1024 if device.type == "cpu" else 8192
    return measure_peak(device, dtype, side, side, side)
