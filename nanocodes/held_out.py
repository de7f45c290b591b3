"""Held-out loss: exact sums over fixed windows on any number of ranks, whole and by frequency."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from nanocodes.batches import read_windows, validation_windows
from nanocodes.ranks import rank_and_world
from nanocodes.shards import Shards, open_shards

COUNTED_TOKENS = 100_000_000  # training tokens counted for the frequencies, from the first on
DECILES = 10


@torch.no_grad()
def held_out_sum(function, shards, windows, length, batch, device):
    """The float64 sum over windows and ranks of `function(ids, targets)`, a tensor of sums.

    The windows are cut into the same batches on any number of ranks, and dealt out in turn.
    """
    rank, world = rank_and_world()
    total = torch.zeros((), dtype=torch.float64)
    for start in range(rank * batch, len(windows), world * batch):
        ids, targets = read_windows(shards, windows[start : start + batch], length)
        total = total + function(ids.to(device), targets.to(device)).cpu().double()
    if world == 1:
        return total
    totals = [None] * world  # objects, since a rank without a batch does not know the shape
    dist.all_gather_object(totals, total)
    return sum(totals)


def bits_per_byte(nats_per_token, shards):
    """Nats per token as bits per byte of raw text, at the split's own bytes per token."""
    return nats_per_token / math.log(2) * shards.tokens / shards.bytes


# ---------------- By token frequency


def token_counts(shards, start, stop):
    """How often each id stands among tokens start..stop-1 of a split, (V,) int64."""
    counts = np.zeros(shards.meta["vocab_size"], dtype=np.int64)
    for first in range(start, stop, 2**24):
        ids = shards.read(first, min(first + 2**24, stop))
        counts += np.bincount(ids, minlength=len(counts))
    return counts


def deciles(train_counts, target_counts):
    """The decile of each id, (V,): 0 holds the ids most frequent in training.

    The targets, sorted by how often their id occurs in training, are cut into ten groups of
    equal size. An id goes whole into the group where the middle one of its targets lies.
    """
    order = np.argsort(-train_counts, kind="stable")
    sizes = target_counts[order]
    middles = sizes.cumsum() - sizes / 2
    decile = np.empty(len(order), dtype=np.int64)
    decile[order] = np.minimum(middles * DECILES // sizes.sum(), DECILES - 1)
    return decile


@dataclass
class HeldOut:
    """The held-out targets of a data folder, the same for every model that reads them."""

    val: Shards
    windows: list  # numbers of the windows of `length` targets
    length: int
    decile: np.ndarray  # (V,), of each id
    decile_targets: list  # how many targets each decile has
    train_counts: np.ndarray  # (V,), how often each id occurs in training
    target_counts: np.ndarray  # (V,), how often each id is a target

    @property
    def targets(self):
        return len(self.windows) * self.length


def open_held_out(folder, length, most_windows=0):
    """The HeldOut of a data folder in windows of `length`, at most so many, 0 meaning all."""
    train, val = open_shards(folder, "train"), open_shards(folder, "val")
    windows = validation_windows(val, length, most_windows)
    train_counts = token_counts(train, 0, min(train.tokens, COUNTED_TOKENS))
    target_counts = np.zeros_like(train_counts)
    for first in range(0, len(windows), 1024):
        _, targets = read_windows(val, windows[first : first + 1024], length)
        target_counts += np.bincount(targets.flatten(), minlength=len(target_counts))
    decile = deciles(train_counts, target_counts)
    decile_targets = np.bincount(decile, target_counts, DECILES).astype(int).tolist()
    return HeldOut(val, windows, length, decile, decile_targets, train_counts, target_counts)


@dataclass
class HeldOutLoss:
    nats_per_token: float
    bits_per_byte: float
    perplexity: float
    deciles: list  # nats per token in each decile, None where it has no target


def held_out_loss(model, held_out, batch_tokens):
    """The HeldOutLoss of a model, read in batches of about so many tokens."""
    rank, world = rank_and_world()
    decile = torch.from_numpy(held_out.decile)
    progress = tqdm(
        total=held_out.targets // world,
        desc="held-out targets",
        disable=True if rank > 0 else None,  # None: where there is no terminal
    )

    def decile_sums(ids, targets):
        progress.update(targets.numel())
        losses = model.losses(ids, targets).flatten().cpu().double()
        sums = torch.zeros(DECILES, dtype=torch.float64)
        return sums.index_add(0, decile[targets.flatten().cpu()], losses)

    device = model.head.weight.device
    batch = max(1, batch_tokens // held_out.length)
    windows, length = held_out.windows, held_out.length
    sums = held_out_sum(decile_sums, held_out.val, windows, length, batch, device)
    progress.close()
    nats = float(sums.sum()) / held_out.targets
    return HeldOutLoss(
        nats_per_token=nats,
        bits_per_byte=bits_per_byte(nats, held_out.val),
        perplexity=math.exp(min(nats, 700)),
        deciles=[
            float(total) / count if count else None
            for total, count in zip(sums, held_out.decile_targets, strict=True)
        ],
    )
