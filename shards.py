"""Token shards: their format and checks, the batch of every update, held-out sums.

A data folder, made by `prepare.py`, is one tokenized corpus:

    meta.json         the tokenizer, the sources, and the counts and sha256 of every shard
    tokenizer.json    the tokenizer, in the format of Hugging Face's `tokenizers`
    train_00000.bin   token ids, little-endian uint16, no header; train_00001.bin, ...
    val_00000.bin     the same, of held-out documents

Each document ends with the separator. The shards of a split are read as one row of tokens.
Functions raise ValueError, in one sentence, for whatever is missing, changed or does not fit.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from device import named, rank_and_world

SHARD_TOKENS = 100_000_000  # tokens in a full shard: 200 MB
ID_DTYPE = np.dtype("<u2")
SPLITS = ("train", "val")
SHARD = {"file": str, "tokens": int, "max_id": int, "sha256": str}
SPLIT = {"documents": int, "tokens": int, "bytes": int, "shards": [SHARD]}  # bytes of raw text
META = {"vocab_size": int, "separator": int, "tokenizer": str, "tokenizer_sha256": str,
        "sources": [dict], "splits": {split: SPLIT for split in SPLITS}}  # fmt: skip


def sha256(path):
    """The hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path, data):
    """Write bytes so that `path` is as it was or complete, whatever happens on the way."""
    partial = path.with_name(path.name + ".partial")
    with named(path), open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path):
    """The JSON object in a file."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); make it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; make it again")
    return value


def write_shard(folder, split, number, ids):
    """Write (n,) ids, already checked against the vocabulary; returns the shard's SHARD entry."""
    path = Path(folder) / f"{split}_{number:05d}.bin"
    write_whole(path, np.asarray(ids).astype(ID_DTYPE).tobytes())
    return dict(file=path.name, tokens=len(ids), max_id=int(np.max(ids)), sha256=sha256(path))


def matches(value, shape):
    """Whether a JSON value has the keys and types of META, counts not below zero."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(matches(value.get(k), shape[k]) for k in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches(item, shape[0]) for item in value)
    return type(value) is shape and (shape is not int or value >= 0)


def read_meta(folder):
    """meta.json of a data folder."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; make {folder} with prepare.py first, see the README")
    meta = read_json(path)
    if not matches(meta, META) or not 0 <= meta["separator"] < meta["vocab_size"] <= 65536:
        raise ValueError(f"{path} is not as prepare.py writes it; prepare the data again")
    for name in SPLITS:
        split, listed = meta["splits"][name], meta["splits"][name]["shards"]
        ordered = all(s["file"] == f"{name}_{i:05d}.bin" for i, s in enumerate(listed))
        filled = all(0 < s["tokens"] and s["max_id"] < meta["vocab_size"] for s in listed)
        summed = sum(s["tokens"] for s in listed) == split["tokens"] > 0 < split["bytes"]
        if not (ordered and filled and summed):
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
    bytes: int

    def read(self, start, stop):
        """Tokens start..stop-1 as int64."""
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
    folder, meta, tokenizer = Path(folder), read_meta(folder), Path(folder) / "tokenizer.json"
    if not tokenizer.is_file() or sha256(tokenizer) != meta["tokenizer_sha256"]:
        raise ValueError(f"{tokenizer} is not the tokenizer of these shards; prepare them again")
    entry, maps, starts = meta["splits"][split], [], []
    for shard in entry["shards"]:
        path, size = folder / shard["file"], shard["tokens"] * ID_DTYPE.itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"{path} is missing or not of {size} bytes; prepare the data again")
        if verify and sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} is not as it was made; prepare the data again")
        starts.append(sum(map(len, maps)))
        maps.append(np.memmap(path, dtype=ID_DTYPE, mode="r"))
    return Shards(folder, meta, maps, starts, entry["tokens"], entry["bytes"])


# ---------------- Windows: number w reads tokens wT .. wT + T, T inputs and T targets one later


def window_count(shards, length):
    """How many windows of `length` targets a split holds, at least one."""
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


@torch.no_grad()
def held_out_sum(function, shards, windows, length, batch, device):
    """The float64 sum over windows and ranks of `function(ids, targets)`, a tensor of sums.
    The windows are cut into the same batches on any number of ranks, and dealt out in turn."""
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
