"""The format of a data folder. Run with: python -m pytest tests/unit/test_shards.py

What is changed, torn or contradicts itself is in tests/hostile/test_hostile_data.py.
"""

import hashlib
import json
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
from helpers import edit_json, read_json_file, refused, verify_data, write_data
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocodes import shards
from nanocodes.batches import epoch_order, read_windows, update_windows, window_count
from nanocodes.files import write_json
from nanocodes.shards import SPLITS, open_shards, read_meta, write_shard


def test_shards_are_little_endian_uint16(tmp_path):
    entry = write_shard(tmp_path, "train", 7, np.array([1, 256, 0x1234, 65_535, 0]))
    data = b"\x01\x00\x00\x01\x34\x12\xff\xff\x00\x00"
    assert (tmp_path / "train_00007.bin").read_bytes() == data
    digest = hashlib.sha256(data).hexdigest()
    expected = {"file": "train_00007.bin", "tokens": 5, "max_id": 65_535, "sha256": digest}
    assert entry == expected == json.loads(json.dumps(entry))
    assert [path.name for path in tmp_path.iterdir()] == ["train_00007.bin"]


def test_written_shards_open_and_verify(tmp_path):
    write_data(tmp_path, [[1, 2]])
    meta = read_json_file(tmp_path / "meta.json")
    for split, rows in {"train": [[5, 6, 0], [7, 0]], "val": [[8, 9, 0]]}.items():
        entries = [write_shard(tmp_path, split, number, ids) for number, ids in enumerate(rows)]
        meta["splits"][split] |= {"tokens": sum(map(len, rows)), "shards": entries}
    write_json(tmp_path / "meta.json", meta)
    assert read_meta(tmp_path) == meta
    verify_data(tmp_path)
    train, val = (open_shards(tmp_path, split) for split in SPLITS)
    assert train.read(0, 5).tolist() == [5, 6, 0, 7, 0] and train.tokens == 5
    assert val.read(0, 3).tolist() == [8, 9, 0] and val.tokens == 3
    assert open_shards(str(tmp_path), "val").folder == tmp_path


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=6),
    st.data(),
)
def test_any_stretch_is_read_across_the_borders(rows, data):
    tokens = [token for row in rows for token in row]
    start = data.draw(st.integers(0, len(tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(tokens)))
    with tempfile.TemporaryDirectory() as folder:
        opened = open_shards(write_data(Path(folder), rows, vocab_size=65_536), "train")
        ids = opened.read(start, stop)
        assert ids.dtype == np.int64 and ids.tolist() == tokens[start:stop]


def test_an_id_beyond_the_vocabulary_is_refused_when_it_is_read(tmp_path):
    write_data(tmp_path, [range(7), range(7, 12), range(12, 20)], vocab_size=50)
    path = tmp_path / "train_00001.bin"
    ids = np.fromfile(path, "<u2")
    ids[2] = 50  # token 9
    ids.tofile(path)
    train = open_shards(tmp_path, "train")
    assert train.read(0, 9).tolist() == list(range(9))
    assert train.read(10, 20).tolist() == list(range(10, 20))
    refused(lambda: train.read(0, 20), tmp_path, 50)
    refused(lambda: train.read(9, 10), tmp_path, 50)
    refused(lambda: read_windows(train, [0, 2], 4), tmp_path, 50)  # 9 - 1 = 2 * 4
    assert len(read_windows(train, [0, 3], 4)[0]) == 2
    ids[2] = 49
    ids.tofile(path)
    assert open_shards(tmp_path, "train").read(9, 10).tolist() == [49]


def peak_memory():
    """The process's largest resident memory so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def test_opening_20_gigabytes_reads_nothing_but_the_update(tmp_path, monkeypatch):
    tokens, length, per_update = 10**10, 2048, 16
    write_data(tmp_path, [[0]])
    with open(tmp_path / "train_00000.bin", "r+b") as file:
        file.truncate(2 * tokens)  # all zeros and sparse
    splits = read_json_file(tmp_path / "meta.json")["splits"]
    splits["train"]["tokens"] = splits["train"]["shards"][0]["tokens"] = tokens
    edit_json(tmp_path / "meta.json", {"splits": splits})
    hashed = []

    def recorded_sha256(path, sha256=shards.sha256):
        hashed.append(Path(path).name)
        return sha256(path)

    monkeypatch.setattr(shards, "sha256", recorded_sha256)
    before = peak_memory()
    opened = open_shards(tmp_path, "train")
    assert peak_memory() - before < 20e6
    windows = window_count(opened, length)
    assert windows == 4_882_812
    chosen = update_windows(windows, per_update, 1, 300_000)
    assert len(set(chosen)) == per_update and max(chosen) > 10**6
    ids, targets = read_windows(opened, chosen, length)
    assert ids.shape == (per_update, length) and not ids.any() and not targets.any()
    assert opened.read(tokens - 1, tokens).tolist() == [0]
    assert peak_memory() - before < 200e6
    assert hashed == ["tokenizer.json"]
    epoch_order.cache_clear()
