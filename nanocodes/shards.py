"""Token shards: the format of a data folder, and its checks.

A data folder, made by prepare.py, is one tokenized corpus:

    meta.json         the tokenizer, the sources, and the counts and sha256 of every shard
    tokenizer.json    the tokenizer, in the format of Hugging Face's `tokenizers`
    train_00000.bin   token ids, little-endian uint16, no header; train_00001.bin, ...
    val_00000.bin     the same, of held-out documents

Each document ends with the separator. The shards of a split are read as one row of tokens.
Functions raise ValueError, in one sentence, for whatever is missing, changed or does not fit.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanocodes.files import read_json, sha256, write_whole

SHARD_TOKENS = 100_000_000  # tokens in a full shard: 200 MB
ID_DTYPE = np.dtype("<u2")
SPLITS = ("train", "val")

# The keys of meta.json and the types of their values.
SHARD = {"file": str, "tokens": int, "max_id": int, "sha256": str}
SPLIT = {"documents": int, "tokens": int, "bytes": int, "shards": [SHARD]}  # bytes of raw text
META = {
    "vocab_size": int,
    "separator": int,
    "tokenizer": str,
    "tokenizer_sha256": str,
    "sources": [dict],
    "splits": {split: SPLIT for split in SPLITS},
}


def write_shard(folder, split, number, ids):
    """Write (n,) ids, already checked against the vocabulary; returns the shard's SHARD entry."""
    path = Path(folder) / f"{split}_{number:05d}.bin"
    write_whole(path, np.asarray(ids).astype(ID_DTYPE).tobytes())
    return {
        "file": path.name,
        "tokens": len(ids),
        "max_id": int(np.max(ids)),
        "sha256": sha256(path),
    }


def matches(value, shape):
    """Whether a JSON value has the keys and types of META, counts not below zero."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(matches(value.get(k), shape[k]) for k in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches(item, shape[0]) for item in value)
    return type(value) is shape and (shape is not int or value >= 0)


def read_meta(folder):
    """meta.json of a data folder, a dict as META describes it."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; make {folder} with prepare.py first, see the README")
    meta = read_json(path)
    if not matches(meta, META) or not 0 <= meta["separator"] < meta["vocab_size"] <= 65536:
        raise ValueError(f"{path} is not as prepare.py writes it; prepare the data again")
    for name in SPLITS:
        split = meta["splits"][name]
        shards = split["shards"]
        in_order = all(s["file"] == f"{name}_{i:05d}.bin" for i, s in enumerate(shards))
        none_empty = all(0 < s["tokens"] and s["max_id"] < meta["vocab_size"] for s in shards)
        sum_agrees = sum(s["tokens"] for s in shards) == split["tokens"] > 0 < split["bytes"]
        if not (in_order and none_empty and sum_agrees):
            raise ValueError(f"{path}: the shards of {name} do not add up; prepare the data again")
    return meta


@dataclass
class Shards:
    """One split of a data folder, opened."""

    folder: Path
    meta: dict
    maps: list  # one memory map of uint16 a shard
    starts: list  # the position of each shard's first token
    tokens: int
    bytes: int  # of raw text

    def read(self, start, stop):
        """Tokens start..stop-1, int64 (stop - start,)."""
        parts = [
            shard[max(start - first, 0) : stop - first]
            for first, shard in zip(self.starts, self.maps, strict=True)
            if first < stop and start < first + len(shard)
        ]
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.meta["vocab_size"]:  # a fixed code would quietly take it
            what = f"{self.folder} holds the id {ids.max()}, beyond its vocabulary"
            raise ValueError(f"{what}, after token {start}; prepare the data again")
        return ids


def open_shards(folder, split, verify=False):
    """Open "train" or "val" without reading its tokens, unless `verify` compares every sha256."""
    folder = Path(folder)
    meta = read_meta(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file() or sha256(tokenizer) != meta["tokenizer_sha256"]:
        raise ValueError(f"{tokenizer} is not the tokenizer of these shards; prepare them again")
    entry = meta["splits"][split]
    maps = []
    starts = []
    tokens = 0
    for shard in entry["shards"]:
        path = folder / shard["file"]
        size = shard["tokens"] * ID_DTYPE.itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"{path} is missing or not of {size} bytes; prepare the data again")
        if verify and sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} is not as it was made; prepare the data again")
        maps.append(np.memmap(path, dtype=ID_DTYPE, mode="r"))
        starts.append(tokens)
        tokens += shard["tokens"]
    return Shards(folder, meta, maps, starts, entry["tokens"], entry["bytes"])
