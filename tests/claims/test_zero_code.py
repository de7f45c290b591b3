"""The zero code: what the README and docs/ say of id 0 in binary16 and gf2.

python -m pytest tests/claims/test_zero_code.py
"""

import math

import numpy as np
import pytest
import torch
from helpers import assert_close, lively, random_ids
from reference import FIXED, V, double, gradients, reference_logits, small

import codes
from model import Transformer


def ids_of(*shape, seed=0, least=1):
    return random_ids(*shape, vocab_size=V, seed=seed, least=least)


@pytest.mark.parametrize("input_layer", FIXED)
@pytest.mark.parametrize("length", [1, 3])
def test_zero_code_alone_gives_uniform_logits(input_layer, length):
    model = lively(Transformer(small(input_layer=input_layer)))
    ids, targets = torch.zeros(1, length, dtype=torch.int64), ids_of(1, length)
    assert torch.equal(model(ids)[0], torch.zeros(1, length, V))
    assert_close(model(ids, targets)[1], torch.tensor(math.log(V)), 1e-6)
    residuals = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: residuals.append(output))
    model.input.zero_id = None  # 0 in every block of itself, not only by the mask
    assert torch.equal(model(ids)[0], torch.zeros(1, length, V))
    assert len(residuals) == 3 and not any(residual.any() for residual in residuals)


def test_uniform_loss_of_the_papers_vocabulary():
    model = Transformer(small(vocab_size=49_152))
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert abs(model(zero, zero)[1].item() - 10.8027) < 5e-5


def test_learned_row_of_zeros_is_not_uniform():
    model = Transformer(small(input_layer="learned"))
    assert model.input.zero_id is None
    for length in (1, 3):
        ids = torch.zeros(1, length, dtype=torch.int64)
        assert (model(ids)[0].std(dim=-1) > 1e-3).all()
        assert abs(model(ids, ids)[1].item() - math.log(V)) > 1e-4


@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_leading_zeros_add_one_each_to_the_softmax_denominator(zeros, float64):
    model, row = double(small()), [45, 7, 0, 19]
    logits = model(torch.tensor([[0] * zeros + row]))[0][0]
    assert torch.equal(logits[:zeros], torch.zeros(zeros, V))
    assert_close(logits[zeros:], reference_logits(model, row, zeros), 1e-11)
    assert (logits[zeros:] - reference_logits(model, row)).abs().max() > 0.05


@pytest.mark.parametrize("input_layer", FIXED)
def test_padding_with_id_0_is_neutral_on_the_right_only(input_layer, float64):
    model = double(small(input_layer=input_layer))
    alone = model(torch.tensor([[45, 7]]))[0]
    right = model(torch.tensor([[45, 7, 0, 0]]))[0][:, :2]
    left = model(torch.tensor([[0, 0, 45, 7]]))[0][:, 2:]
    assert_close(right, alone, 1e-12)
    assert (left - alone).abs().amax(dim=-1).min() > 0.05


@pytest.mark.parametrize("input_layer", FIXED)
def test_separator_in_the_middle_takes_the_plain_mean(input_layer, float64):
    model = double(small(input_layer=input_layer))
    ids = torch.tensor([[45, 7, 0, 19]])
    block, seen = model.blocks[0], []
    block.attention.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(ids)
    values = block.attention.v_proj(block.attention_norm(model.input(ids)))
    assert torch.equal(values[0, 2], torch.zeros(32))
    mean = block.attention.o_proj((values[0, 0] + values[0, 1]) / 3)
    assert_close(seen[0][0, 2], mean, 1e-12)
    assert seen[1][0, 2].abs().max() > 0.05


def leading_zeros_model(n_layers, **changes):
    model = lively(Transformer(small(n_layers=n_layers, **changes)))
    ids, targets = ids_of(2, 12), ids_of(2, 12, seed=1, least=0)
    ids[0, :3] = ids[0, 6] = ids[1, 4] = 0
    return model, ids, targets


@pytest.mark.parametrize("input_layer", FIXED)
def test_deep_backward_is_finite_only_with_the_mask(input_layer):
    model, ids, targets = leading_zeros_model(24, input_layer=input_layer)
    assert model.input.zero_id == 0
    logits = model(ids)[0]
    loss, masked = gradients(model, ids, targets)
    assert all(gradient.isfinite().all() for gradient in masked.values())
    assert all(gradient.any() for gradient in masked.values())
    model.input.zero_id = None
    assert torch.equal(model(ids)[0], logits)
    unmasked_loss, unmasked = gradients(model, ids, targets)
    assert torch.equal(unmasked_loss, loss)
    assert not all(gradient.isfinite().all() for gradient in unmasked.values())


@pytest.mark.parametrize("input_layer", FIXED)
def test_deep_backward_is_finite_at_the_initial_weights(input_layer):
    model = Transformer(small(n_layers=24, input_layer=input_layer))
    ids = ids_of(1, 12)
    ids[0, 0] = 0
    _, masked = gradients(model, ids, ids_of(1, 12, seed=1))
    assert all(gradient.isfinite().all() for gradient in masked.values())


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_mask_changes_no_gradient(checkpoint_activations, float64):
    model, ids, targets = leading_zeros_model(2)
    model.double().checkpoint_activations = checkpoint_activations
    _, masked = gradients(model, ids, targets)
    model.input.zero_id = None
    _, unmasked = gradients(model, ids, targets)
    for name in masked:
        assert_close(masked[name], unmasked[name], 1e-11)


def residual_gradients(model, ids, targets):
    """The gradient of the loss at every block's output, (n_layers, B, T, d_model)."""
    outputs = []

    def keep(module, inputs, output):
        output.retain_grad()
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    gradients(model, ids, targets)
    for hook in hooks:
        hook.remove()
    return torch.stack([output.grad for output in outputs])


def test_gradient_at_a_leading_zero_grows_with_each_block_but_for_the_mask(float64):
    model, ids, targets = leading_zeros_model(6)
    model.double()
    masked = residual_gradients(model, ids, targets)
    assert torch.equal(masked[:, 0, :3], torch.zeros(6, 3, 32))
    assert (masked[:-1, 0, 6].norm(dim=-1) > 1e-6).all()  # a zero in the middle keeps its own
    assert (masked[:-1, 0, 3:].norm(dim=-1) > 1e-6).all()
    model.input.zero_id = None
    unmasked = residual_gradients(model, ids, targets)
    assert_close(unmasked[:, 0, 3:], masked[:, 0, 3:], 1e-11)
    assert_close(unmasked[:, 1], masked[:, 1], 1e-11)
    sizes = unmasked[:, 0, 0].norm(dim=-1)
    assert (sizes[:-1] / sizes[1:] > 30).all()


def test_offset_moves_the_zero_code_to_another_id(float64):
    word = int(codes.ids_from_codes(codes.code_table("gf2", V).astype(np.uint8))[5])
    model = double(small(input_layer="gf2", code_offset=word))
    assert model.input.zero_id == 5
    assert model.input(torch.tensor([[0]])).any() and not model.input(torch.tensor([[5]])).any()
    assert torch.equal(model(torch.tensor([[5, 5]]))[0], torch.zeros(1, 2, V))
    ids, targets = torch.tensor([[5, 5, 0, 9]]), torch.tensor([[1, 2, 3, 4]])
    masked = residual_gradients(model, ids, targets)
    assert not masked[:, 0, :2].any() and masked[0, 0, 2].any()
    ids = torch.tensor([[0, 0, 5, 9]])  # nothing is masked here
    assert residual_gradients(model, ids, targets)[0].norm(dim=-1).min() > 1e-6


def test_offset_whose_zero_code_lies_beyond_the_vocabulary_leaves_no_mask():
    word = int(codes.ids_from_codes(codes.code_table("gf2", V + 1).astype(np.uint8))[V])
    model = lively(Transformer(small(input_layer="gf2", code_offset=word)))
    assert model.input.zero_id is None
    assert model.input(torch.arange(V)[None]).any(dim=-1).all()
    assert (model(torch.tensor([[0, 0]]))[0].std(dim=-1) > 0.1).all()
