"""The batch of every update, a pure function of the data, the seed and the update's number.

A split is cut into windows: window w reads tokens wT .. wT + T, which are T inputs and, one
place later, T targets. An epoch is all windows in an order drawn from the seed, each one once.
Updates take windows from that order one after another, however many ranks share the work.
"""

from functools import lru_cache

import numpy as np
import torch


def window_count(shards, length):
    """How many windows of `length` targets a split holds. Raises ValueError if it is none."""
    if shards.tokens <= length:
        what = f"{shards.folder} has a split of {shards.tokens} tokens, no window of {length} + 1"
        raise ValueError(f"{what}; use more text or a smaller max_seq_len")
    return (shards.tokens - 1) // length


def read_windows(shards, windows, length):
    """ids and targets of some windows, int64 (len(windows), length) each."""
    rows = np.stack([shards.read(w * length, (w + 1) * length + 1) for w in windows])
    rows = torch.from_numpy(rows)  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]


@lru_cache(maxsize=2)  # an update can lie across the end of an epoch
def epoch_order(windows, seed, epoch):
    """All window numbers in the order of one epoch, a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(np.arange(windows, dtype=np.uint32))


def update_windows(windows, per_update, seed, update):
    """The window numbers of one update; epochs follow each other, each has every window once."""
    positions = range(update * per_update, (update + 1) * per_update)
    return [int(epoch_order(windows, seed, p // windows)[p % windows]) for p in positions]


def validation_windows(shards, length, most):
    """At most `most` windows, all of them where it is 0, spread evenly over a split."""
    windows = window_count(shards, length)
    chosen = min(most, windows) or windows
    return [i * windows // chosen for i in range(chosen)]
