"""The loss in chunks. Run with: python -m pytest tests/test_loss.py"""

import pytest
import torch
from torch.nn import functional as F

import loss
from loss import MeanLoss, chunks, target_losses

N, V, D = 24, 97, 16  # targets, vocabulary, width


def made(dtype=torch.float64, seed=0):
    """hidden, weight and targets; logits of a standard deviation of 4."""
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
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", request.param)
    return request.param


def test_losses_and_gradients_are_those_of_cross_entropy(logits_at_once):
    for seed in range(5):
        given = hidden, weight, targets = made(seed=seed)
        each, to_hidden, to_weight = reference(*given)
        assert distance(target_losses(*given), each) < 1e-14
        mean = MeanLoss.apply(*given)
        (3 * mean).backward()
        assert mean.shape == () and abs(mean.item() - each.mean().item()) < 1e-14
        assert distance(hidden.grad, 3 * to_hidden) < 1e-14
        assert distance(weight.grad, 3 * to_weight) < 1e-14


def test_the_gradient_is_that_of_small_differences(logits_at_once):
    hidden, weight, targets = made()
    assert torch.autograd.gradcheck(lambda *w: MeanLoss.apply(*w, targets), (hidden, weight))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_losses_are_at_least_float32_and_gradients_as_the_weights(dtype, bound, logits_at_once):
    given = hidden, weight, targets = made(dtype)
    each, to_hidden, to_weight = reference(*given)
    mean = MeanLoss.apply(*given)
    mean.backward()
    assert mean.dtype == target_losses(*given).dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert distance(target_losses(*given), each) < bound
    assert distance(hidden.grad, to_hidden) < bound
    assert distance(weight.grad, to_weight) < bound


def test_a_chunk_has_no_more_logits_than_allowed(logits_at_once):
    hidden, weight, targets = made()
    pieces = list(chunks(hidden, targets, V))
    most = max(logits_at_once // V, 1)
    assert all(len(part) == len(ids) <= most for part, ids in pieces)
    assert torch.equal(torch.cat([part for part, _ in pieces]), hidden)
    assert torch.equal(torch.cat([ids for _, ids in pieces]), targets)
    assert (len(pieces) == 1) == (logits_at_once >= N * V)


def test_no_logits_are_kept_for_the_backward_pass():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        mean = MeanLoss.apply(*made())
    assert kept == [(N, D), (V, D)] and mean.requires_grad


def test_losses_without_gradients_need_no_graph():
    assert not target_losses(*made()).requires_grad


def test_the_compiler_takes_it_whole(logits_at_once):
    given = hidden, weight, _ = made()
    expected = reference(*given)
    compiled = torch.compile(MeanLoss.apply, backend="aot_eager", fullgraph=True)
    compiled(*given).backward()
    assert distance(hidden.grad, expected[1]) < 1e-14
    assert distance(weight.grad, expected[2]) < 1e-14


def test_another_number_of_targets_is_refused(logits_at_once):
    hidden, weight, targets = made()
    for wrong in (targets[:-1], targets[:5], torch.cat((targets, targets[:1]))):
        for function in (MeanLoss.apply, target_losses):
            with pytest.raises((ValueError, RuntimeError)):
                function(hidden, weight, wrong)


def test_second_derivatives_are_refused():
    hidden, weight, targets = made()
    (slope,) = torch.autograd.grad(MeanLoss.apply(hidden, weight, targets) ** 2, hidden,
                                   create_graph=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
