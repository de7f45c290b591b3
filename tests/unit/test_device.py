"""Devices and dtypes. Run with: python -m pytest tests/unit/test_device.py"""

import pytest
import torch
from helpers import refused

from nanocodes.device import autocast, measure_peak, pick_device, pick_dtype

CPU = torch.device("cpu")


def test_auto_is_the_accelerator_where_there_is_one():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert pick_device("auto").type == (accelerator.type if accelerator else "cpu")
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["tpu", "", "cpu:one", "meta", "cuda:99", "xla"])
def test_a_device_that_computes_nothing_is_refused(name):
    refused(lambda: pick_device(name), f"there is no device {name}; choose another")


def test_local_rank_picks_the_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "99")
    refused(lambda: pick_device("cuda"), "no device cuda:99;", "no more processes than GPUs")


def test_a_dtype_is_as_asked():
    assert pick_dtype("float32", CPU) == (torch.float32, "as asked")
    assert pick_dtype("bfloat16", CPU) == (torch.bfloat16, "as asked")
    refused(lambda: pick_dtype("float16", CPU), "'float16' is unknown; choose auto, float32 or b")


@pytest.mark.parametrize(
    "amx, avx512, dtype",
    [
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_where_a_cpu_multiplies_it(amx, avx512, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    picked, reason = pick_dtype("auto", CPU)
    assert picked == dtype and reason.startswith("auto: this cpu device ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_of_the_dtype_and_weights_are_not(dtype):
    weight = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (weight @ weight).dtype == dtype
    assert weight.dtype == torch.float32


def test_the_peak_of_a_device_is_measured():
    assert measure_peak(CPU, torch.float32, 64, 64, 64) > 0
