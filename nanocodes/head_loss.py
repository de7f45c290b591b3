"""What the head reads -> losses, with few logits in memory at a time.

All logits of a batch would take more memory than anything else: V numbers for each target. So
they are made in chunks. In training the gradients of a chunk are made along with it, going
forward, so that no logits are kept for the backward pass or made again there.

N targets, V vocabulary; losses are -ln p(target), in nats.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGITS_AT_ONCE = 2**25  # 128 MB in float32


def chunks(hidden, targets, vocab_size):
    """Cut hidden (N, d_model) and targets (N,) so that each piece has about LOGITS_AT_ONCE."""
    count = -(-len(targets) * vocab_size // LOGITS_AT_ONCE)  # rounded up
    return zip(hidden.chunk(count), targets.chunk(count), strict=True)


def log_probabilities(hidden, weight):
    """ln p of every id, (n, V), at least in float32: weight (V, d_model) is the head's."""
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)


@torch.no_grad()
def target_losses(hidden, weight, targets):
    """The loss of each target, (N,)."""
    losses = []
    for some_hidden, some_targets in chunks(hidden, targets, len(weight)):
        log_p = log_probabilities(some_hidden, weight)  # (n, V)
        losses.append(F.nll_loss(log_p, some_targets, reduction="none"))
    return torch.cat(losses)


def mean_loss(hidden, weight, targets):
    """The mean loss of all targets, a scalar that can be differentiated."""
    return MeanLoss.apply(hidden, weight, targets)


class MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        mean = 0.0
        hidden_gradients = []
        weight_gradient = torch.zeros_like(
            weight, dtype=torch.promote_types(weight.dtype, torch.float32)
        )
        for some_hidden, some_targets in chunks(hidden, targets, len(weight)):
            log_p = log_probabilities(some_hidden, weight)  # (n, V)
            mean = mean + F.nll_loss(log_p, some_targets, reduction="sum") / len(targets)
            # The derivative of a loss with respect to the logits is p, less 1 at the target.
            minus_one = -torch.ones_like(log_p[:, :1])
            gradient = log_p.exp_().scatter_add_(1, some_targets[:, None], minus_one)
            gradient = gradient.div_(len(targets)).to(hidden.dtype)
            hidden_gradients.append(gradient @ weight)
            weight_gradient += gradient.T @ some_hidden
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return gradient * hidden_gradient, gradient * weight_gradient, None


def last_logits(hidden, weight):
    """The logits (B, V) of hidden (B, d_model), float32 on the CPU, for decoding.

    For one row a CPU makes one product on one core, but several products on all of its cores:
    so the head is cut into 64 pieces where V allows.
    """
    pieces = 64 if len(weight) % 64 == 0 else 1
    pieces_of_head = weight.unflatten(0, (pieces, -1))  # (pieces, V / pieces, d_model)
    inputs = hidden.T.expand(pieces, -1, -1)  # (pieces, d_model, B)
    return (pieces_of_head @ inputs).flatten(0, 1).T.float().cpu()
