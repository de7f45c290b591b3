"""The loss in chunks. Run with: python -m pytest tests/unit/test_head_loss.py"""

import pytest
import torch
from torch.nn import functional as F

from nanocodes import head_loss
from nanocodes.head_loss import chunks, last_logits, mean_loss, target_losses

N, V, D = 24, 97, 16  # targets, vocabulary, width


def draw(dtype=torch.float64, seed=0):
    """hidden, weight and targets; the logits have a standard deviation of 4."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def reference(hidden, weight, targets):
    """The loss of each target and the gradients of their mean, of one plain cross-entropy."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses.mean(), (hidden, weight))


def distance(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(params=[1, V, 5 * V, 8 * V + 7, N * V - 1, N * V, 2**26])
def logits_at_once(request, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", request.param)
    return request.param


def test_losses_and_gradients_are_those_of_cross_entropy(logits_at_once):
    for seed in range(5):
        hidden, weight, targets = draw(seed=seed)
        losses, to_hidden, to_weight = reference(hidden, weight, targets)
        assert distance(target_losses(hidden, weight, targets), losses) < 1e-14
        mean = mean_loss(hidden, weight, targets)
        (3 * mean).backward()
        assert mean.shape == () and abs(mean.item() - losses.mean().item()) < 1e-14
        assert distance(hidden.grad, 3 * to_hidden) < 1e-14
        assert distance(weight.grad, 3 * to_weight) < 1e-14


def test_the_gradient_is_that_of_small_differences(logits_at_once):
    hidden, weight, targets = draw()
    few_hidden, few_weight = (x.detach()[..., :4].requires_grad_() for x in (hidden[:7], weight))

    def loss(hidden, weight):
        return mean_loss(hidden, weight, targets[:7])

    assert torch.autograd.gradcheck(loss, (few_hidden, few_weight))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_losses_are_at_least_float32_and_gradients_as_the_weights(dtype, bound, logits_at_once):
    hidden, weight, targets = draw(dtype)
    expected, to_hidden, to_weight = reference(hidden, weight, targets)
    losses = target_losses(hidden, weight, targets)
    mean = mean_loss(hidden, weight, targets)
    mean.backward()
    assert mean.dtype == losses.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert distance(losses, expected) < bound
    assert distance(hidden.grad, to_hidden) < bound
    assert distance(weight.grad, to_weight) < bound


def test_a_chunk_has_no_more_logits_than_allowed(logits_at_once):
    hidden, _, targets = draw()
    pieces = list(chunks(hidden, targets, V))
    most = max(logits_at_once // V, 1)
    assert all(len(part) == len(ids) <= most for part, ids in pieces)
    assert torch.equal(torch.cat([part for part, _ in pieces]), hidden)
    assert torch.equal(torch.cat([ids for _, ids in pieces]), targets)
    assert (len(pieces) == 1) == (logits_at_once >= N * V)


def test_no_logits_are_kept_for_the_backward_pass():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        mean = mean_loss(*draw())
    assert kept == [(N, D), (V, D)] and mean.requires_grad


def test_losses_without_gradients_need_no_graph():
    assert not target_losses(*draw()).requires_grad


def test_the_compiler_takes_it_whole(logits_at_once):
    hidden, weight, targets = draw()
    _, to_hidden, to_weight = reference(hidden, weight, targets)
    compiled = torch.compile(mean_loss, backend="aot_eager", fullgraph=True)
    compiled(hidden, weight, targets).backward()
    assert distance(hidden.grad, to_hidden) < 1e-14
    assert distance(weight.grad, to_weight) < 1e-14


@pytest.mark.parametrize("function", [mean_loss, target_losses])
def test_another_number_of_targets_is_refused(function, logits_at_once):
    hidden, weight, targets = draw()
    for wrong in (targets[:-1], targets[:5], torch.cat((targets, targets[:1]))):
        with pytest.raises((ValueError, RuntimeError)):
            function(hidden, weight, wrong)


def test_second_derivatives_are_refused():
    hidden, weight, targets = draw()
    squared = mean_loss(hidden, weight, targets) ** 2
    (slope,) = torch.autograd.grad(squared, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("vocab_size", [97, 128])
def test_the_logits_of_decoding_are_one_product(vocab_size):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab_size, D, dtype=torch.float64, generator=generator)
    logits = last_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert distance(logits, hidden @ weight.T) < 1e-6
