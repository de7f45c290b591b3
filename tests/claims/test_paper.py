"""The paper's numbers, and what is held equal between input layers.

python -m pytest tests/claims/test_paper.py
"""

import numpy as np
import pytest
import torch
from reference import INPUT_LAYERS, small

from codes import gf2_rank, invertible_matrix
from model import ModelConfig, Transformer
from nanocodes.checkpoint import backbone_hash
from nanocodes.plan import flops_per_target, parameter_counts
from train import Config, micro_steps


def default_model(input_layer):
    with torch.device("meta"):
        return Transformer(ModelConfig(input_layer=input_layer))


@pytest.mark.parametrize(
    "input_layer, total, table",
    [
        ("learned", 1_812_039_680, 100_663_296),
        ("binary16", 1_711_376_384, 0),
        ("gf2", 1_711_376_384, 0),
    ],
)
def test_parameters_of_the_paper(input_layer, total, table):
    model = default_model(input_layer)
    block = 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    counts = {"input": table, "backbone": 24 * block + 2048, "head": 49_152 * 2048}
    assert parameter_counts(model) == counts
    assert sum(p.numel() for p in model.parameters()) == sum(counts.values()) == total
    # One multiply-add is 2 operations, and the backward pass costs twice the forward one. Attention
    # compares a query with half the context on average, for the scores and again for the values.
    forward = 2 * (24 * (4 * 2048**2 + 3 * 2048 * 8192) + 49_152 * 2048)
    forward += 24 * 2 * (2 * 2048 * (2048 // 2))
    assert flops_per_target(model) == 3 * forward == 10_871_635_968


def test_table_is_a_hundred_million_parameters_and_5_56_percent():
    assert round(100 * 100_663_296 / 1_812_039_680, 2) == 5.56
    assert 49_152 * 2048 == 100_663_296


def test_backbone_is_the_same_bits_for_every_input_layer():
    models = [Transformer(small(input_layer=name)) for name in INPUT_LAYERS]
    assert len({backbone_hash(model) for model in models}) == 1
    learned = models[0].state_dict()
    del learned["input.weight"]
    for model in models[1:]:
        assert model.state_dict().keys() == learned.keys()
        assert all(torch.equal(model.state_dict()[name], learned[name]) for name in learned)


def test_the_papers_matrix_is_the_second_draw_of_its_seed():
    generator = np.random.default_rng(12345)
    first, second = generator.integers(0, 2, (16, 16)), generator.integers(0, 2, (16, 16))
    assert gf2_rank(first) < 16
    assert np.array_equal(invertible_matrix(16, 12345), second)


@pytest.mark.parametrize("input_layer", ["binary16", "gf2"])
def test_the_papers_codes_are_tiled_128_times_without_scale(input_layer):
    model = default_model(input_layer)
    assert model.input.tiles == 128
    x = model.input(torch.tensor([[6]]))
    assert x.shape == (1, 1, 2048) and set(x.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(x, x[..., :16].repeat(1, 1, 128))


def test_the_papers_budget():
    config = Config()
    assert micro_steps(config, 2) == 8
    assert 2 * 8 * 2048 * 8 == config.targets_per_update == 262_144
    targets = config.max_updates * config.targets_per_update
    assert targets == 100_000_071_680 and targets // 2048 == 48_828_160
    assert targets - config.targets_per_update < 100e9 <= targets
    assert (config.vocab_size, config.max_seq_len) == (49_152, 2048)
    assert (config.lr, config.warmup_updates, config.grad_clip) == (1.5e-4, 2000, 1.0)
    assert (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.95, 0.1)
    assert (config.code_seed, config.code_offset) == (12345, 0)
