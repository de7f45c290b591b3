"""Held-out loss: python -m pytest tests/unit/test_held_out.py

The figures of whole runs are in test_evaluate.py.
"""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import edit_json, read_json_file, run_ranks, write_data

from nanocodes.batches import validation_windows
from nanocodes.held_out import bits_per_byte, deciles, held_out_sum, token_counts
from nanocodes.ranks import join_ranks, leave_ranks
from nanocodes.shards import open_shards

# ---------------- The sum over windows, batches and ranks

LENGTH = 4
BATCH = 3
CASES = {"all": 25, "one rank idle": 5, "one batch": 2, "whole batches": 12}  # numbers of windows


def several_sums(ids, targets):
    assert not torch.is_grad_enabled()
    return torch.stack([(ids + 1.0).log().sum(), (ids * targets).sum().sqrt(), ids.sum() / 3])


def one_sum(ids, targets):
    return (targets + 0.1).sum()


def all_held_out_sums(folder):
    """Every case's sums, with the first ids of the batches that this rank has seen."""
    opened = open_shards(folder, "val")
    results = {}
    for (case, count), function in itertools.product(CASES.items(), (several_sums, one_sum)):
        seen = []

        def seeing(ids, targets, function=function, seen=seen):
            seen.append(ids[:, 0].tolist())
            return function(ids, targets)

        windows = validation_windows(opened, LENGTH, count)
        total = held_out_sum(seeing, opened, windows, LENGTH, BATCH, "cpu")
        assert total.dtype == torch.float64
        results[f"{case} {function.__name__}"] = {"total": total.tolist(), "seen": seen}
    return results


def sums_of_a_rank(folder, out):
    rank, world = join_ranks(torch.device("cpu"))
    (out / f"{world}_{rank}.json").write_text(json.dumps(all_held_out_sums(folder)))
    leave_ranks()


def plain_sums(ids, count):
    """several_sums and one_sum of a case by a plain loop over its batches."""
    windows = [i * 25 // count for i in range(count)]
    sums = np.zeros(3)
    one = 0.0
    for first in range(0, count, BATCH):
        starts = [w * LENGTH for w in windows[first : first + BATCH]]
        inputs = [i for start in starts for i in ids[start : start + LENGTH]]
        targets = [i for start in starts for i in ids[start + 1 : start + LENGTH + 1]]
        products = sum(a * b for a, b in zip(inputs, targets, strict=True))
        sums += [sum(math.log(i + 1) for i in inputs), products**0.5, sum(inputs) / 3]
        one += sum(i + 0.1 for i in targets)
    return sums, one


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 1000, 103).tolist()


@pytest.fixture(scope="module")
def folder(ids, tmp_path_factory):
    folder = tmp_path_factory.mktemp("held_out")
    return write_data(folder, [[1]], [ids[:40], ids[40:]], vocab_size=1000)


def test_a_held_out_sum_is_the_plain_loop(ids, folder):
    found = all_held_out_sums(folder)
    for case, count in CASES.items():
        sums, one = plain_sums(ids, count)
        # These functions sum in float32 within a batch; only the sum over batches is float64.
        np.testing.assert_allclose(found[f"{case} several_sums"]["total"], sums, rtol=1e-6)
        np.testing.assert_allclose(found[f"{case} one_sum"]["total"], one, rtol=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_a_held_out_sum_does_not_depend_on_the_number_of_ranks(world, folder, tmp_path):
    alone = all_held_out_sums(folder)
    exit_statuses, _ = run_ranks(world, tmp_path, sums_of_a_rank, folder, tmp_path)
    assert exit_statuses == [0] * world
    ranks = [read_json_file(tmp_path / f"{world}_{rank}.json") for rank in range(world)]
    for case, expected in alone.items():
        for results in ranks:
            total = results[case]["total"]
            assert total == ranks[0][case]["total"]
            np.testing.assert_allclose(total, expected["total"], rtol=1e-12)
        seen = [results[case]["seen"] for results in ranks]
        dealt = [batch for turn in itertools.zip_longest(*seen) for batch in turn if batch]
        assert dealt == expected["seen"]
    assert ranks[1]["one batch one_sum"]["seen"] == []
    assert ranks[-1]["one batch one_sum"]["seen"] == []
    if world == 3:
        assert ranks[2]["one rank idle several_sums"]["seen"] == []


def test_a_held_out_sum_is_float64_over_the_batches(folder):
    parts = iter([1e8, 1.0, 1.0, 1.0])  # float32 would lose each 1

    def part(ids, targets):
        return torch.tensor(next(parts), dtype=torch.float32)

    opened = open_shards(folder, "val")
    assert held_out_sum(part, opened, [0, 1, 0, 1], 4, 1, "cpu").item() == 1e8 + 3


# ---------------- Units and frequencies


def test_bytes_per_token_give_bits_per_byte(tmp_path):
    write_data(tmp_path, [[1] * 70], [[2] * 30])
    splits = read_json_file(tmp_path / "meta.json")["splits"]
    splits["train"]["bytes"] = 140
    splits["val"]["bytes"] = 120
    edit_json(tmp_path / "meta.json", {"splits": splits})
    val = open_shards(tmp_path, "val")
    assert (val.tokens, val.bytes) == (30, 120)
    # 2 bits a token, 4 bytes a token
    assert math.isclose(bits_per_byte(2 * math.log(2), val), 0.5, rel_tol=1e-15)
    train = open_shards(tmp_path, "train")
    assert math.isclose(bits_per_byte(2 * math.log(2), train), 1.0, rel_tol=1e-15)


def test_tokens_are_counted_by_id(ids, folder):
    opened = open_shards(folder, "val")
    counts = token_counts(opened, 5, 90)
    assert counts.dtype == np.int64
    assert counts.tolist() == [ids[5:90].count(number) for number in range(1000)]


def test_deciles_are_cut_by_training_frequency():
    train = np.array([5, 100, 50, 0, 7, 6, 4, 3, 2, 1, 8, 9])
    targets = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    expected = {1: 0, 2: 1, 10: 2, 4: 3, 5: 4, 0: 5, 6: 6, 7: 7, 8: 8, 9: 9}
    decile = deciles(train, targets)
    assert {i: int(decile[i]) for i in expected} == expected
    # One id with half of the targets takes the place of five groups.
    heavy = deciles(np.array([9, 8, 7, 6, 5, 4]), np.array([5, 1, 1, 1, 1, 1]))
    assert heavy.tolist() == [2, 5, 6, 7, 8, 9]
