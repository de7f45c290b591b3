"""The windows of every update. Run with: python -m pytest tests/unit/test_batches.py"""

import itertools

import numpy as np
import pytest
import torch
from helpers import refused, write_data
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocodes.batches import (
    epoch_order,
    read_windows,
    update_windows,
    validation_windows,
    window_count,
)
from nanocodes.shards import open_shards


def counting(folder, tokens, cuts=()):
    """Opened shards of the tokens 0, 1, 2, ..., cut at these places: an id tells its position."""
    rows = [range(start, stop) for start, stop in itertools.pairwise([0, *cuts, tokens])]
    return open_shards(write_data(folder, rows), "train")


# ---------------- Windows


@pytest.mark.parametrize("tokens, length, count", [(41, 8, 5), (48, 8, 5), (49, 8, 6), (9, 8, 1)])
def test_windows_have_stride_t_and_t_plus_1_tokens(tokens, length, count, tmp_path):
    opened = counting(tmp_path, tokens, cuts=(3, 7))
    assert window_count(opened, length) == count
    ids, targets = read_windows(opened, range(count), length)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.shape == targets.shape == (count, length)
    assert ids.flatten().tolist() == list(range(count * length))
    assert targets.flatten().tolist() == list(range(1, count * length + 1))
    ids, targets = read_windows(opened, [count - 1, 0], length)
    assert ids[:, 0].tolist() == [(count - 1) * length, 0]


def test_less_than_one_window_is_refused(tmp_path):
    opened = counting(tmp_path, 8)
    assert window_count(opened, 7) == 1
    refused(lambda: window_count(opened, 8), tmp_path, 8)
    refused(lambda: validation_windows(opened, 8, 0), tmp_path, 8)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 24, 25, 26, 1000, 0])
def test_validation_windows_are_fixed_and_evenly_spread(most, tmp_path):
    opened = counting(tmp_path, 103)
    chosen = validation_windows(opened, 4, most)
    assert chosen == validation_windows(opened, 4, most)
    assert len(chosen) == (25 if most in (0, 26, 1000) else most)
    gaps = np.diff([*chosen, 25])
    assert chosen[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


# ---------------- Their order


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 2**40))
def test_every_epoch_holds_every_window_once(windows, per_update, seed):
    updates = -(-3 * windows // per_update)
    drawn = [update_windows(windows, per_update, seed, update) for update in range(updates)]
    assert {len(update) for update in drawn} == {per_update}
    row = [window for update in drawn for window in update]
    assert {type(window) for window in row} == {int}
    for epoch in range(3):
        assert sorted(row[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_all_tokens_are_targets_once_in_an_epoch(tmp_path):
    opened = counting(tmp_path, 103, cuts=(50,))
    windows = window_count(opened, 4)
    targets = []
    for update in range(5):
        chosen = update_windows(windows, 5, 0, update)
        targets += read_windows(opened, chosen, 4)[1].flatten().tolist()
    assert windows == 25 and sorted(targets) == list(range(1, 101))


def test_an_update_is_a_pure_function():
    arguments = [(37, 10, 1, update) for update in range(30)]
    forward = [update_windows(*a) for a in arguments]
    backward = [update_windows(*a) for a in reversed(arguments)]
    assert backward[::-1] == forward
    epoch_order.cache_clear()
    np.random.seed(3)
    torch.manual_seed(3)
    assert update_windows(*arguments[17]) == forward[17]
    forward[17].clear()  # a caller that changes its list changes nobody else's
    assert len(update_windows(*arguments[17])) == 10


def test_epochs_differ_and_updates_straddle_them():
    row = [window for update in range(10) for window in update_windows(100, 30, 5, update)]
    epochs = [row[:100], row[100:200], row[200:300]]
    for one, other in itertools.combinations([*epochs, list(range(100))], 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
    # Update 3 is the last 10 windows of epoch 0 and the first 20 of epoch 1.
    assert update_windows(100, 30, 5, 3) == epochs[0][90:] + epochs[1][:20]


def test_seeds_give_different_orders():
    orders = [update_windows(1000, 1000, seed, epoch) for seed in range(6) for epoch in range(2)]
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_the_order_is_pinned():
    """A change of the draw would part every resumed run from its past."""
    generator = np.random.default_rng([1337, 2])
    expected = generator.permutation(np.arange(50, dtype=np.uint32)).tolist()
    assert update_windows(50, 50, 1337, 2) == expected
    assert expected[:6] == [22, 7, 34, 6, 15, 9]


@pytest.mark.parametrize("world, micro", [(1, 1), (1, 24), (2, 3), (3, 4), (4, 6), (8, 1), (24, 1)])
def test_an_update_does_not_depend_on_world_size_and_micro_batch(world, micro):
    per_update, update = 24, 2
    expected = update_windows(37, per_update, 9, update)
    taken = []
    for micro_step in range(per_update // (world * micro)):
        for rank in range(world):
            own = update_windows(37, per_update, 9, update)  # each rank draws for itself
            first = (micro_step * world + rank) * micro
            taken += own[first : first + micro]
    assert taken == expected
