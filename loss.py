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
    pieces = chunks(hidden, targets, len(weight))
    losses = [F.nll_loss(log_probabilities(h, weight), t, reduction="none") for h, t in pieces]
    return torch.cat(losses)


class MeanLoss(torch.autograd.Function):
    """The mean loss of all targets: MeanLoss.apply(hidden, weight, targets)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        mean, to_hidden = 0.0, []
        to_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for part, ids in chunks(hidden, targets, len(weight)):
            logs = log_probabilities(part, weight)  # (n, V)
            mean = mean + F.nll_loss(logs, ids, reduction="sum") / len(targets)
            # The slope of a loss in the logits is p, less 1 at the target.
            slope = logs.exp_().scatter_add_(1, ids[:, None], -torch.ones_like(logs[:, :1]))
            slope = slope.div_(len(targets)).to(hidden.dtype)
            to_hidden.append(slope @ weight)
            to_weight += slope.T @ part
        ctx.save_for_backward(torch.cat(to_hidden), to_weight)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx, slope):
        to_hidden, to_weight = ctx.saved_tensors
        return slope * to_hidden, slope * to_weight, None
