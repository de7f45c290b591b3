"""python -m pytest tests/test_shards.py

The shard format, its refusals, the order of the windows and the exact held-out sums.
"""

import copy
import errno
import hashlib
import itertools
import json
import math
import os
import resource
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shards

TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE"}}'
quick = settings(max_examples=60, deadline=None, derandomize=True)


def verify(folder):
    for split in shards.SPLITS:
        shards.open_shards(folder, split, verify=True)


def write_data(folder, train, val=((3, 0),), vocab_size=65_536, **changes):
    """A data folder as the top of shards.py describes it, from lists of ids, one per shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    meta = {
        "vocab_size": vocab_size,
        "separator": 0,
        "tokenizer": "bpe:97",
        "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
        "sources": [{"source": "stdlib", "share": 1.0}],
        "splits": {},
    }
    for split, lists in {"train": train, "val": val}.items():
        entries = []
        for number, ids in enumerate(lists):
            data = struct.pack(f"<{len(ids)}H", *ids)
            (folder / f"{split}_{number:05d}.bin").write_bytes(data)
            entry = {"file": f"{split}_{number:05d}.bin", "tokens": len(ids), "max_id": max(ids)}
            entries.append(entry | {"sha256": hashlib.sha256(data).hexdigest()})
        tokens = sum(map(len, lists))
        split_entry = {"documents": 1, "tokens": tokens, "bytes": 4 * tokens, "shards": entries}
        meta["splits"][split] = split_entry
    write_meta(folder, meta | changes)
    return folder


def write_meta(folder, meta):
    (folder / "meta.json").write_text(json.dumps(meta))


def read_meta_file(folder):
    return json.loads((folder / "meta.json").read_text())


def counting(tokens, cuts=()):
    """0, 1, 2, ... cut into shards: an id tells its position."""
    borders = [0, *cuts, tokens]
    return [list(range(a, b)) for a, b in itertools.pairwise(borders)]


def refused(action, *words):
    """The one sentence of a ValueError, with these words in it."""
    with pytest.raises(ValueError) as caught:
        action()
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence
    for word in words:
        assert str(word) in sentence
    return sentence


# -----------------------------------------------------------------------------
# The format


def test_shards_are_little_endian_uint16(tmp_path):
    ids = [1, 256, 0x1234, 65_535, 0]
    entry = shards.write_shard(tmp_path, "train", 7, np.array(ids))
    data = b"\x01\x00\x00\x01\x34\x12\xff\xff\x00\x00"
    assert (tmp_path / "train_00007.bin").read_bytes() == data
    digest = hashlib.sha256(data).hexdigest()
    expected = {"file": "train_00007.bin", "tokens": 5, "max_id": 65_535, "sha256": digest}
    assert entry == expected == json.loads(json.dumps(entry))
    assert shards.sha256(tmp_path / "train_00007.bin") == digest
    assert [path.name for path in tmp_path.iterdir()] == ["train_00007.bin"]


def test_written_shards_open_and_verify(tmp_path):
    write_data(tmp_path, [[1, 2]])
    lists = {"train": [[5, 6, 0], [7, 0]], "val": [[8, 9, 0]]}
    meta = read_meta_file(tmp_path)
    for split, parts in lists.items():
        entries = [shards.write_shard(tmp_path, split, i, ids) for i, ids in enumerate(parts)]
        tokens = sum(map(len, parts))
        meta["splits"][split] |= {"tokens": tokens, "shards": entries}
    shards.write_json(tmp_path / "meta.json", meta)
    assert shards.read_meta(tmp_path) == meta
    verify(tmp_path)
    train, val = (shards.open_shards(tmp_path, split) for split in shards.SPLITS)
    assert train.read(0, 5).tolist() == [5, 6, 0, 7, 0] and train.tokens == 5
    assert val.read(0, 3).tolist() == [8, 9, 0] and val.tokens == 3
    assert str(shards.open_shards(str(tmp_path), "val").folder) == str(tmp_path)


@quick
@given(
    st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=6),
    st.data(),
)
def test_any_stretch_is_read_across_the_borders(lists, data):
    whole = [token for ids in lists for token in ids]
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        opened = shards.open_shards(write_data(Path(folder), lists), "train")
        ids = opened.read(start, stop)
        assert ids.dtype == np.int64 and ids.tolist() == whole[start:stop]
        del opened


def test_tokens_per_byte_give_bits_per_byte(tmp_path):
    write_data(tmp_path, [[1] * 70], [[2] * 30])
    meta = read_meta_file(tmp_path)
    meta["splits"]["train"]["bytes"], meta["splits"]["val"]["bytes"] = 140, 120
    write_meta(tmp_path, meta)
    val = shards.open_shards(tmp_path, "val")
    assert (val.tokens, val.bytes) == (30, 120)
    # 2 bits a token, 4 bytes a token
    assert math.isclose(shards.bits_per_byte(2 * math.log(2), val), 0.5, rel_tol=1e-15)
    train = shards.open_shards(tmp_path, "train")
    assert math.isclose(shards.bits_per_byte(2 * math.log(2), train), 1.0, rel_tol=1e-15)


# -----------------------------------------------------------------------------
# Windows


@pytest.mark.parametrize("tokens, length, count", [(41, 8, 5), (48, 8, 5), (49, 8, 6), (9, 8, 1)])
def test_windows_have_stride_t_and_t_plus_1_tokens(tokens, length, count, tmp_path):
    opened = shards.open_shards(write_data(tmp_path, counting(tokens, cuts=(3, 7))), "train")
    assert shards.window_count(opened, length) == count
    ids, targets = shards.read_windows(opened, range(count), length)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.shape == targets.shape == (count, length)
    assert ids.flatten().tolist() == list(range(count * length))
    assert targets.flatten().tolist() == list(range(1, count * length + 1))
    ids, targets = shards.read_windows(opened, [count - 1, 0], length)
    assert ids[:, 0].tolist() == [(count - 1) * length, 0]


def test_less_than_one_window_is_refused(tmp_path):
    opened = shards.open_shards(write_data(tmp_path, counting(8)), "train")
    assert shards.window_count(opened, 7) == 1
    refused(lambda: shards.window_count(opened, 8), tmp_path, 8)
    refused(lambda: shards.validation_windows(opened, 8, 0), tmp_path, 8)


@quick
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 2**40))
def test_every_epoch_holds_every_window_once(windows, per_update, seed):
    updates = -(-3 * windows // per_update)
    drawn = [shards.update_windows(windows, per_update, seed, u) for u in range(updates)]
    assert {len(update) for update in drawn} == {per_update}
    row = [window for update in drawn for window in update]
    assert {type(window) for window in row} == {int}
    for epoch in range(3):
        assert sorted(row[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_an_update_is_a_pure_function():
    arguments = [(37, 10, 1, update) for update in range(30)]
    forward = [shards.update_windows(*a) for a in arguments]
    backward = [shards.update_windows(*a) for a in reversed(arguments)]
    assert backward[::-1] == forward
    shards.epoch_order.cache_clear()
    np.random.seed(3)
    torch.manual_seed(3)
    assert shards.update_windows(*arguments[17]) == forward[17]
    forward[17].clear()  # a caller that changes its list changes nobody else's
    assert len(shards.update_windows(*arguments[17])) == 10


def test_epochs_differ_and_updates_straddle_them():
    windows, per_update, seed = 100, 30, 5
    row = [w for u in range(10) for w in shards.update_windows(windows, per_update, seed, u)]
    epochs = [row[:100], row[100:200], row[200:300]]
    for one, other in itertools.combinations([*epochs, list(range(100))], 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
    # Update 3 is the last 10 windows of epoch 0 and the first 20 of epoch 1.
    straddling = shards.update_windows(windows, per_update, seed, 3)
    assert straddling == epochs[0][90:] + epochs[1][:20]


def test_seeds_give_different_orders():
    orders = [shards.update_windows(1000, 1000, seed, 0) for seed in range(6)]
    next_epochs = [shards.update_windows(1000, 1000, seed, 1) for seed in range(6)]
    for one, other in itertools.combinations(orders + next_epochs, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_order_is_pinned():
    """A change of the draw would part every resumed run from its past."""
    generator = np.random.default_rng([1337, 2])
    expected = generator.permutation(np.arange(50, dtype=np.uint32)).tolist()
    assert shards.update_windows(50, 50, 1337, 2) == expected
    assert expected[:6] == [22, 7, 34, 6, 15, 9]


@pytest.mark.parametrize("world, micro", [(1, 1), (1, 24), (2, 3), (3, 4), (4, 6), (8, 1), (24, 1)])
def test_an_update_does_not_depend_on_world_size_and_micro_batch(world, micro):
    per_update, update = 24, 2
    whole = shards.update_windows(37, per_update, 9, update)
    taken = []
    for m in range(per_update // (world * micro)):
        for rank in range(world):
            mine = shards.update_windows(37, per_update, 9, update)  # each rank asks for itself
            first = (m * world + rank) * micro
            taken += mine[first : first + micro]
    assert taken == whole


def test_all_tokens_are_targets_once_in_an_epoch(tmp_path):
    opened = shards.open_shards(write_data(tmp_path, counting(103, cuts=(50,))), "train")
    windows, targets = shards.window_count(opened, 4), []
    for update in range(5):
        chosen = shards.update_windows(windows, 5, 0, update)
        targets += shards.read_windows(opened, chosen, 4)[1].flatten().tolist()
    assert windows == 25 and sorted(targets) == list(range(1, 101))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 24, 25, 26, 1000, 0])
def test_validation_windows_are_fixed_and_evenly_spread(most, tmp_path):
    opened = shards.open_shards(write_data(tmp_path, [[1]], counting(103)), "val")
    chosen = shards.validation_windows(opened, 4, most)
    assert chosen == shards.validation_windows(opened, 4, most)
    assert len(chosen) == (25 if most in (0, 26, 1000) else most)
    gaps = np.diff([*chosen, 25])
    assert chosen[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


# -----------------------------------------------------------------------------
# Held-out sums

LENGTH, BATCH = 4, 3
CASES = {"all": 25, "one rank idle": 5, "one batch": 2, "whole batches": 12}


def several_sums(ids, targets):
    assert not torch.is_grad_enabled()
    return torch.stack([(ids + 1.0).log().sum(), (ids * targets).sum().sqrt(), ids.sum() / 3])


def one_sum(ids, targets):
    return (targets + 0.1).sum()


def all_held_out_sums(folder):
    """Every case's sums, with the first ids of the batches that this rank has seen."""
    opened, results = shards.open_shards(folder, "val"), {}
    for case, count in CASES.items():
        for function in (several_sums, one_sum):
            seen = []

            def seeing(ids, targets, function=function, seen=seen):
                seen.append(ids[:, 0].tolist())
                return function(ids, targets)

            windows = shards.validation_windows(opened, LENGTH, count)
            total = shards.held_out_sum(seeing, opened, windows, LENGTH, BATCH, "cpu")
            assert total.dtype == torch.float64
            results[f"{case} {function.__name__}"] = {"total": total.tolist(), "seen": seen}
    return results


def sums_of_a_rank(rank, folder, out):
    for world in (2, 3):
        if rank < world:
            meeting = f"file://{out}/meeting_{world}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
            results = all_held_out_sums(folder)
            (out / f"{world}_{rank}.json").write_text(json.dumps(results))
            dist.destroy_process_group()


def test_held_out_sum_is_the_plain_loop_on_any_number_of_ranks(tmp_path):
    ids = np.random.default_rng(0).integers(0, 1000, 103).tolist()
    folder = write_data(tmp_path / "data", [[1]], [ids[:40], ids[40:]])
    alone = all_held_out_sums(folder)
    for case, count in CASES.items():
        windows = [i * 25 // count for i in range(count)]
        sums, one = np.zeros(3), 0.0
        for first in range(0, count, BATCH):
            rows = [ids[w * LENGTH : (w + 1) * LENGTH + 1] for w in windows[first : first + BATCH]]
            flat_ids = [i for row in rows for i in row[:-1]]
            flat_targets = [i for row in rows for i in row[1:]]
            products = sum(a * b for a, b in zip(flat_ids, flat_targets, strict=True))
            sums += [sum(math.log(i + 1) for i in flat_ids), products**0.5, sum(flat_ids) / 3]
            one += sum(i + 0.1 for i in flat_targets)
        # These functions sum in float32 within a batch; only the sum over batches is float64.
        np.testing.assert_allclose(alone[f"{case} several_sums"]["total"], sums, rtol=1e-6)
        np.testing.assert_allclose(alone[f"{case} one_sum"]["total"], one, rtol=1e-6)
    out = tmp_path / "sums"
    out.mkdir()
    torch.multiprocessing.spawn(sums_of_a_rank, (folder, out), nprocs=3)
    for world in (2, 3):
        ranks = [json.loads((out / f"{world}_{rank}.json").read_text()) for rank in range(world)]
        for case, expected in alone.items():
            for results in ranks:
                assert results[case]["total"] == ranks[0][case]["total"]
                total = results[case]["total"]
                np.testing.assert_allclose(total, expected["total"], rtol=1e-12)
            seen = [results[case]["seen"] for results in ranks]
            dealt = [b for turn in itertools.zip_longest(*seen) for b in turn if b is not None]
            assert dealt == expected["seen"]
    assert ranks[2]["one rank idle several_sums"]["seen"] == []
    assert ranks[1]["one batch one_sum"]["seen"] == ranks[2]["one batch one_sum"]["seen"] == []


def test_held_out_sum_is_float64_over_the_batches(tmp_path):
    opened = shards.open_shards(write_data(tmp_path, [[1]], counting(9)), "val")
    parts = iter([1e8, 1.0, 1.0, 1.0])  # float32 would lose each 1

    def part(ids, targets):
        return torch.tensor(next(parts), dtype=torch.float32)

    assert shards.held_out_sum(part, opened, [0, 1, 0, 1], 4, 1, "cpu").item() == 1e8 + 3


# -----------------------------------------------------------------------------
# Refusals on opening and reading


@pytest.fixture
def folder(tmp_path):
    return write_data(tmp_path / "data", counting(20, cuts=(7, 12)), counting(9), vocab_size=50)


def open_both(folder):
    return [shards.open_shards(folder, split) for split in shards.SPLITS]


def test_missing_folder_and_meta_are_refused(folder, tmp_path):
    refused(lambda: open_both(tmp_path / "nowhere"), "nowhere", "prepare.py")
    (folder / "meta.json").unlink()
    refused(lambda: open_both(folder), "meta.json", "prepare.py")
    (folder / "meta.json").mkdir()
    refused(lambda: open_both(folder), "meta.json")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b"{} {}"],
)
def test_meta_that_is_no_json_object_is_refused(text, folder):
    (folder / "meta.json").write_bytes(text)
    refused(lambda: open_both(folder), "meta.json")


def test_half_a_meta_is_refused(folder):
    whole = (folder / "meta.json").read_bytes()
    for kept in range(0, len(whole) - 1, 17):
        (folder / "meta.json").write_bytes(whole[:kept])
        refused(lambda: open_both(folder), "meta.json")


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def inside(value, path):
    for key in path:
        value = value[key]
    return value


def opens_or_is_refused(folder):
    try:
        for opened in open_both(folder):
            assert len(opened.read(0, opened.tokens)) == opened.tokens
            assert math.isfinite(shards.bits_per_byte(1.0, opened))
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error)


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 49, 50, 65_536, 65_537, 2**63, 10**30, "val_00000.bin", "", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_change_of_meta_opens_or_is_refused_in_one_sentence(data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_data(Path(temporary), counting(20, cuts=(7,)), counting(9), vocab_size=50)
        meta = read_meta_file(folder)
        for _ in range(data.draw(st.integers(1, 2))):
            path = data.draw(st.sampled_from(list(places(meta))))
            parent, value = inside(meta, path[:-1]), data.draw(any_json)
            what = data.draw(st.sampled_from(["replace", "delete", "add", "swap"]))
            if what == "delete":
                del parent[path[-1]]
            elif what == "add" and isinstance(parent, dict):
                parent[data.draw(st.text(max_size=5))] = value
            elif what == "add":
                parent.append(value)
            elif what == "swap":
                other = data.draw(st.sampled_from(list(places(meta))))
                parent[path[-1]] = copy.deepcopy(inside(meta, other))
            else:
                parent[path[-1]] = value
        write_meta(folder, meta)
        opens_or_is_refused(folder)


@pytest.mark.parametrize("value", [5, None, {}, {"shards": [{}]}, {"shards": [], "tokens": 0}])
def test_a_third_split_opens_or_is_refused_in_one_sentence(value, folder):
    change(folder, "splits", "test", to=value)
    opens_or_is_refused(folder)


def change(folder, *path, to):
    meta = read_meta_file(folder)
    inside(meta, path[:-1])[path[-1]] = to
    write_meta(folder, meta)


@pytest.mark.parametrize(
    "path, value",
    [
        (("vocab_size",), 65_537),
        (("vocab_size",), 0),
        (("vocab_size",), 50.0),
        (("vocab_size",), 19),  # the shards hold id 19
        (("separator",), 50),
        (("separator",), -1),
        (("tokenizer_sha256",), "0" * 64),
        (("splits", "val", "bytes"), 0),
        (("splits", "val", "tokens"), 8),
        (("splits", "val", "shards"), []),
        (("splits", "train", "shards", 0, "file"), "train_00001.bin"),
        (("splits", "train", "shards", 0, "file"), "../data/train_00000.bin"),
        (("splits", "train", "shards", 0, "file"), "train\n"),
        (("splits", "train", "shards", 0, "tokens"), 8),
        (("splits", "train", "shards", 1, "max_id"), 50),
        (("splits", "train", "shards", 1, "max_id"), True),
    ],
)
def test_contradictions_in_meta_are_refused(path, value, folder):
    assert len(open_both(folder)) == 2
    change(folder, *path, to=value)
    refused(lambda: open_both(folder), folder)


@pytest.mark.parametrize("size", [0, 1, 9, 11, 12, 1000])
def test_shard_of_another_size_is_refused(size, folder):
    path = folder / "train_00001.bin"
    assert path.stat().st_size == 10
    os.truncate(path, size)
    refused(lambda: open_both(folder), "train_00001.bin")


def test_missing_and_misnamed_shards_are_refused(folder):
    (folder / "train_00001.bin").rename(folder / "train_1.bin")
    refused(lambda: open_both(folder), "train_00001.bin")
    change(folder, "splits", "train", "shards", 1, "file", to="train_1.bin")
    refused(lambda: open_both(folder), "meta.json")
    (folder / "train_1.bin").rename(folder / "train_00001.bin")
    change(folder, "splits", "train", "shards", 1, "file", to="train_00001.bin")
    assert len(open_both(folder)) == 2
    (folder / "val_00000.bin").unlink()
    (folder / "val_00000.bin").mkdir()
    refused(lambda: open_both(folder), "val_00000.bin")


def test_shard_without_tokens_is_refused(folder):
    meta = read_meta_file(folder)
    shard = {"file": "train_00003.bin", "tokens": 0, "max_id": 0, "sha256": ""}
    meta["splits"]["train"]["shards"].append(shard)
    write_meta(folder, meta)
    (folder / "train_00003.bin").touch()
    refused(lambda: open_both(folder), "train")


def test_another_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_bytes(TOKENIZER + b"\n")
    refused(lambda: open_both(folder), "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    refused(lambda: open_both(folder), "tokenizer.json")


def test_id_beyond_the_vocabulary_is_refused_when_read(folder):
    with open(folder / "train_00001.bin", "r+b") as file:
        file.seek(4)  # token 9
        file.write(struct.pack("<H", 50))
    train = shards.open_shards(folder, "train")
    assert train.read(0, 9).tolist() == list(range(9))
    assert train.read(10, 20).tolist() == list(range(10, 20))
    refused(lambda: train.read(0, 20), folder, 50)
    refused(lambda: train.read(9, 10), folder, 50)
    refused(lambda: shards.read_windows(train, [0, 2], 4), folder, 50)  # 9 - 1 = 2 * 4
    assert len(shards.read_windows(train, [0, 3], 4)[0]) == 2
    with open(folder / "train_00001.bin", "r+b") as file:
        file.seek(4)
        file.write(struct.pack("<H", 49))
    assert shards.open_shards(folder, "train").read(9, 10).tolist() == [49]


def test_verify_finds_one_flipped_bit(folder):
    verify(folder)
    files = sorted(path for path in folder.iterdir() if path.name != "meta.json")
    assert len(files) == 5
    for path in files:
        whole = path.read_bytes()
        for bit in {0, 8 * len(whole) // 2 + 3, 8 * len(whole) - 1}:
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            refused(lambda: verify(folder), path.name)
        path.unlink()
        refused(lambda: verify(folder), path.name)
        path.write_bytes(whole)
    verify(folder)


# -----------------------------------------------------------------------------
# Writing whole


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_whole(failing, tmp_path, monkeypatch):
    path = tmp_path / "meta.json"
    shards.write_json(path, {"old": 1})

    def fail(*arguments):
        partial = tmp_path / "meta.json.partial"
        os.truncate(partial, partial.stat().st_size // 2)  # half is written when the disk is full
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(shards.os, failing, fail)
        with pytest.raises(OSError, match="No space left on device") as error:
            shards.write_json(path, {"new": [0] * 1000})
        assert failing == "replace" or error.value.filename == str(path)
        assert json.loads(path.read_text()) == {"old": 1}
        with pytest.raises(OSError, match="No space left"):
            shards.write_shard(tmp_path, "train", 0, [1, 2])
        assert not (tmp_path / "train_00000.bin").exists()
    shards.write_json(path, {"new": 2})  # what is left of the failed one is in nobody's way
    assert shards.read_json(path) == {"new": 2}


def test_value_that_is_no_json_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "state.json"
    shards.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        shards.write_json(path, {"new": object()})
    assert shards.read_json(path) == {"old": 1}


def test_written_data_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, calls = tmp_path / "shard.bin", []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("replace", Path(source).stat().st_size, path.exists()))
        replace(source, target)

    monkeypatch.setattr(shards.os, "fsync", recorded_fsync)
    monkeypatch.setattr(shards.os, "replace", recorded_replace)
    shards.write_whole(path, b"x" * 100)  # so few that they wait in Python's buffer
    assert calls == [("fsync", 100, False), ("replace", 100, False)]
    assert path.read_bytes() == b"x" * 100


# -----------------------------------------------------------------------------
# Opening costs no full read


def peak_memory():
    """The process's largest resident memory so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def test_opening_20_gigabytes_reads_nothing_but_the_update(tmp_path, monkeypatch):
    tokens, length, per_update = 10**10, 2048, 16
    write_data(tmp_path, [[0]])
    os.truncate(tmp_path / "train_00000.bin", 2 * tokens)  # all zeros and sparse
    meta = read_meta_file(tmp_path)
    meta["splits"]["train"]["tokens"] = tokens
    meta["splits"]["train"]["shards"][0]["tokens"] = tokens
    write_meta(tmp_path, meta)
    hashed = []

    def recorded_sha256(path, real=shards.sha256):
        hashed.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(shards, "sha256", recorded_sha256)
    before = peak_memory()
    opened = shards.open_shards(tmp_path, "train")
    assert peak_memory() - before < 20e6
    windows = shards.window_count(opened, length)
    assert windows == 4_882_812
    chosen = shards.update_windows(windows, per_update, 1, 300_000)
    assert len(set(chosen)) == per_update and max(chosen) > 10**6
    ids, targets = shards.read_windows(opened, chosen, length)
    assert ids.shape == (per_update, length) and not ids.any() and not targets.any()
    assert opened.read(tokens - 1, tokens).tolist() == [0]
    assert peak_memory() - before < 200e6
    assert hashed == ["tokenizer.json"]
    shards.epoch_order.cache_clear()
