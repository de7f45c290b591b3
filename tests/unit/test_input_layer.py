"""The two kinds of input layer. Run with: python -m pytest tests/unit/test_input_layer.py"""

import numpy as np
import pytest
import torch
from helpers import random_ids, refused
from reference import V, small
from torch.nn import functional as F

import codes
from codes import LINEAR_CODES, LinearCode, code_table
from model import INPUT_LAYERS, LinearCodeInput, TableInput, Transformer

# ---------------- Linear codes


@pytest.mark.parametrize("name", LINEAR_CODES)
def test_a_code_computed_from_ids_is_its_table_bit_for_bit(name):
    V, d_model = 49_152, 2048
    table = torch.from_numpy(code_table(name, V, seed=3))
    layer = LinearCodeInput(codes.linear_code(name, seed=3), V, d_model)
    for ids in torch.arange(V).split(8192):
        looked_up = F.embedding(ids[None], table)
        for context in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=context == torch.bfloat16):
                computed = layer.values(ids[None])
            assert computed.dtype == torch.float32 and torch.equal(computed, looked_up)
    assert torch.equal(layer(ids[None, :3]), looked_up[:, :3].repeat(1, 1, layer.tiles))


@pytest.mark.parametrize("name", LINEAR_CODES)
def test_a_linear_code_holds_its_matrix_and_nothing_of_size_v(name):
    model = Transformer(small(vocab_size=49_152, d_model=2048, n_layers=1, input_layer=name))
    held = sum(buffer.numel() for buffer in model.input.buffers())
    width = len(model.input.matrix)
    assert held == width * 16 + width + 2
    assert list(model.input.parameters()) == [] and model.input.state_dict() == {}


def test_an_offset_and_other_numbers_for_bits():
    code = LinearCode(codes.random_matrix(24, 7, 1), offset=0b1011, low=-3.0, high=0.5)
    layer = LinearCodeInput(code, 97, 48)
    expected = torch.from_numpy(code.values(np.arange(97)))
    assert torch.equal(layer.table(), expected.repeat(1, 2))
    assert layer.zero_id is None


def test_the_vectors_survive_other_types_and_modes():
    layer = LinearCodeInput(codes.linear_code("signs32"), V, 32)
    table = layer.table()
    assert torch.equal(layer.double().table(), table.double())
    with torch.device("meta"):
        made_on_meta = Transformer(small(input_layer="signs32")).input
    assert torch.equal(made_on_meta.table(), table)


def test_ids_of_63_bits_are_exact():
    code = LinearCode(codes.invertible_matrix(63, 5), offset=2**63 - 1)
    layer = LinearCodeInput(code, 1000, 63)
    ids = torch.tensor([[0, 1, 2**62 - 1, 2**62, 2**63 - 1]])
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(layer(ids), torch.from_numpy(code.values(ids.numpy())))


# ---------------- Tables


def test_a_given_table_is_looked_up_tiled_and_not_stored():
    values = np.random.default_rng(0).normal(size=(V, 8))
    model = Transformer(small(), input_layer=TableInput(values, 32))
    ids = random_ids(2, 9, vocab_size=V, least=0)
    expected = torch.from_numpy(values.astype(np.float32))[ids].repeat(1, 1, 4)
    assert torch.equal(model.input(ids), expected)
    assert torch.equal(model.input.table()[ids], expected)
    assert not any(name.startswith("input") for name in model.state_dict())
    assert model.input.zero_id is None


def test_a_given_table_with_a_row_of_zeros_is_masked_there():
    values = np.random.default_rng(0).normal(size=(V, 32))
    values[7] = 0
    assert TableInput(values, 32).zero_id == 7
    trainable = TableInput(values, 32, trainable=True)
    assert trainable.zero_id is None and trainable.weight.requires_grad


@pytest.mark.parametrize("kind", ["linear", "table"])
def test_a_layer_handed_in_leaves_the_backbone_as_it_is(kind):
    if kind == "linear":
        layer = LinearCodeInput(LinearCode(np.eye(16)[::-1]), V, 32)
    else:
        layer = TableInput(np.ones((V, 1)), 32)
    model, plain = Transformer(small(), input_layer=layer), Transformer(small())
    assert model.input is layer
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_a_name_is_enough_to_add_one(monkeypatch):
    def constant(config):
        return TableInput(np.full((config.vocab_size, 4), 0.25), config.d_model)

    monkeypatch.setitem(INPUT_LAYERS, "constant", constant)
    model = Transformer(small(input_layer="constant"))
    assert (model.input(torch.tensor([[3]])) == 0.25).all()


# ---------------- Both


def test_fixed_codes_are_tiled_to_the_width():
    ids = torch.tensor([[0, 1, 6, 96]])
    x = Transformer(small()).input(ids)
    expected = [[[float(i >> (j % 16) & 1) for j in range(32)] for i in ids[0].tolist()]]
    assert x.dtype == torch.float32 and torch.equal(x, torch.tensor(expected))


def test_matrix_by_hand_equals_the_drawn_one():
    drawn = Transformer(small(input_layer="gf2", code_seed=7))
    rows = codes.invertible_matrix(16, 7)
    words = [sum(int(bit) << j for j, bit in enumerate(row)) for row in rows]
    config = small(input_layer="gf2", code_matrix=" ".join(f"{word:04x}" for word in words))
    given_by_hand = Transformer(config)
    assert torch.equal(given_by_hand.input.table(), drawn.input.table())
    other = Transformer(small(input_layer="gf2"))
    assert not torch.equal(other.input.table(), drawn.input.table())
    for i in (0, 1, 6, 96):
        bits = [(word & i).bit_count() % 2 for word in words]
        assert drawn.input.table()[i, :16].tolist() == bits


def test_identity_matrix_makes_gf2_the_binary_code():
    identity = " ".join(f"{1 << i:04x}" for i in range(16))
    gf2 = Transformer(small(input_layer="gf2", code_matrix=identity))
    binary16 = Transformer(small())
    assert torch.equal(gf2.input.table(), binary16.input.table())
    ids = random_ids(1, 9, vocab_size=V)
    assert torch.equal(gf2(ids)[0], binary16(ids)[0])


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(d_model=40), "16"),
        (dict(vocab_size=65_537), "65537"),
        (dict(vocab_size=65_537, input_layer="gf2"), "65537"),
        (dict(code_bits=6, d_model=48), "6"),
        (dict(code_offset=3), "offset"),
        (dict(input_layer="learned", code_offset=3), "a learned table has neither"),
        (dict(input_layer="learned", code_matrix="1"), "a learned table has neither"),
        (dict(code_matrix=" ".join(f"{1 << i:04x}" for i in range(16))), "matrix"),
        (dict(input_layer="gf2", code_offset=1 << 16), "65536"),
        (dict(input_layer="gf2", code_matrix="0001 0002"), "matrix"),
        (dict(input_layer="gf2", code_matrix=""), "matrix"),
        (dict(input_layer="gf2", code_matrix="zzzz " * 16), "matrix"),
        (dict(input_layer="gf2", code_matrix="0001 " * 16), "matrix"),
        (dict(input_layer="gf2", code_matrix="10000 " * 16), ""),
    ],
)
def test_input_layer_refuses(changes, word):
    refused(lambda: Transformer(small(**changes)), word)
