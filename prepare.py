"""Text -> token shards: data/<name>/ as the top of shards.py describes it.

python prepare.py                                   the standard library of this Python
python prepare.py --source notes --tokenizer bpe:4096 --max_tokens 2e6
python prepare.py --source A=0.9 --source B=0.1     shares of the tokens
python prepare.py --source hf:HuggingFaceTB/smollm-corpus/fineweb-edu-dedup \\
    --tokenizer smollm2 --max_tokens 102e9
python prepare.py --verify data/stdlib

A source is stdlib, hf:<repo>[/<config>][@revision], or a file or folder of .txt, .md, .py (one
document a file), .jsonl, .jsonl.gz, .jsonl.xz and .parquet (one a row, its "text"). A tokenizer
is bpe:<size>, trained on the source, a tokenizer.json, smollm2, or another name on the hub.
"""
import argparse
import gzip
import json
import lzma
import os
import platform
import re
import sysconfig
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

import shards
from device import hold, refusals
from tokenizer import make_encoder, make_tokenizer, vocabulary

BPE_BYTES = 64_000_000  # the most text that a BPE is trained on
BATCH_BYTES, BATCHES = 500_000, 32  # what a thread encodes at a time, and how many wait

# ---------------- Sources: a document is the bytes of its raw text


def rows_of(path):
    """The rows of a .jsonl or .parquet file, few in memory at a time."""
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(batch_size=256, columns=["text"]):
            yield from batch.to_pylist()
    else:
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        with opener(path, "rb") as file:
            yield from (json.loads(line) for line in file if line.strip())


def local_documents(files):
    """The documents of files, passing over those of unknown kinds."""
    for file in files:
        if file.name.lower().endswith((".txt", ".md", ".py")):
            yield file.read_bytes()
        elif file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")):
            try:
                for row in rows_of(file):
                    yield row["text"].encode("utf-8", "replace")
            except Exception as error:  # each format raises its own kinds
                raise ValueError(f'{file}: {error!r}; mend it, a "text" in each row') from None


def hub_documents(name):
    """The texts of hf:<repo>[/<config>][@revision], streamed. A failure is tried again from the
    document where it came; but not before the first, where the name is wrong or no network."""
    from datasets import load_dataset

    path, _, revision = name.removeprefix("hf:").partition("@")
    parts = path.split("/", 2)
    options = dict(split="train", streaming=True, revision=revision or None)
    taken, waits = 0, []
    while True:
        try:
            for row in load_dataset("/".join(parts[:2]), *parts[2:], **options).skip(taken):
                document = row["text"].encode("utf-8", "replace")
                taken, waits = taken + 1, [1, 5, 30, 120, 600]
                yield document
            return
        except Exception as error:  # each layer down to the network raises its own kinds
            reason = f"{name} failed at document {taken} ({error!r})"
        if not waits:
            raise ValueError(f"{reason}; check the name and the network")
        print(f"{reason}; trying again in {waits[0]} s")
        time.sleep(waits.pop(0))


def files_below(folder):
    """The files of a folder and of the folders in it, sorted. Nothing is passed over in silence:
    raises OSError at a folder that cannot be read, ValueError at a link to one, maybe a circle."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_dir() and path.is_symlink():
            raise ValueError(f"{path} is a link to a folder; name that with a --source of its own")
        yield from files_below(path) if path.is_dir() else [path]


def documents_of(name):
    """The documents of a source, an iterator of bytes; files are taken in sorted order."""
    if name.startswith("hf:"):
        return hub_documents(name)
    if name == "stdlib":
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        installed = {"site-packages", "dist-packages"}
        return local_documents(file for file in files if installed.isdisjoint(file.parts))
    if name and Path(name).exists():
        return local_documents(files_below(name) if Path(name).is_dir() else [Path(name)])
    raise ValueError(f"the source {name} does not exist; give stdlib, hf:<repo> or a path")


def held_out(document, val_share):
    """Whether a document is held out, by a hash of it, so that a copy goes the same way."""
    digest = blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_share * 2**64


def opening_texts(sources, val_share):
    """The first BPE_BYTES of the training documents of all sources, by their shares, as text."""
    for name, share in sources:
        room = int(BPE_BYTES * share / sum(share for _, share in sources))
        for document in documents_of(name):
            if not held_out(document, val_share):
                yield document[:room].decode("utf-8", "replace")
                room -= len(document)
            if room <= 0:
                break


# ---------------- Shards


def encoded(documents, encode, pool):
    """encode(document) of each in order. Threads are enough: both encoders let go of Python."""
    waiting, batch, size = deque(), [], 0
    for document in documents:
        batch.append(document)
        size += len(document) + 100  # what an object takes besides
        if size >= BATCH_BYTES:
            waiting.append(pool.submit(list, map(encode, batch)))
            batch, size = [], 0
        if len(waiting) > BATCHES:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()
    yield from map(encode, batch)


def append(folder, split, entry, buffer, ids):
    """Put ids behind those of a split; a full buffer becomes a shard."""
    start = entry["tokens"] % len(buffer)
    part = ids[: len(buffer) - start]
    buffer[start : start + len(part)] = part
    entry["tokens"] += len(part)
    if start + len(part) == len(buffer):
        entry["shards"].append(shards.write_shard(folder, split, len(entry["shards"]), buffer))
    if len(part) < len(ids):
        append(folder, split, entry, buffer, ids[len(part) :])


def write_splits(folder, sources, encode, max_tokens, pool):
    """Encode the sources into the shards of `folder`; returns the sources and splits of meta.json.
    The next document is always from the source that is furthest behind its share of the tokens."""
    counts = dict(documents=0, tokens=0, bytes=0)
    splits = {split: dict(counts, shards=[]) for split in shards.SPLITS}
    buffers = {split: np.empty(shards.SHARD_TOKENS, shards.ID_DTYPE) for split in splits}
    entries, streams = [], []
    for name, share in sources:
        python = f"Python {platform.python_version()}"
        revision = python if name == "stdlib" else name.partition("@")[2]
        entries.append(dict(source=name, revision=revision, share=share, not_utf8=0, **counts))
        streams.append(encoded(documents_of(name), encode, pool))
    live, total = [*range(len(sources))], 0
    with tqdm(total=max_tokens, unit=" tokens", unit_scale=True, disable=None) as bar:
        while live and (max_tokens is None or total < max_tokens):
            number = min(live, key=lambda i: entries[i]["tokens"] / entries[i]["share"])
            entry, item = entries[number], next(streams[number], None)
            if item is None:
                live.remove(number)
                if live:
                    bar.write(f"{entry['source']} has ended after {entry['tokens']:,} tokens")
                continue
            ids, size, split, damaged = item
            append(folder, split, splits[split], buffers[split], ids)
            entry["tokens"] += len(ids)
            entry["not_utf8"] += damaged
            for counted in (entry, splits[split]):
                counted["documents"] += 1
                counted["bytes"] += size
            total += len(ids)
            bar.update(len(ids))
    for split, entry in splits.items():
        rest = buffers[split][: entry["tokens"] % shards.SHARD_TOKENS]
        if len(rest):
            entry["shards"].append(shards.write_shard(folder, split, len(entry["shards"]), rest))
        if not entry["tokens"]:
            what = f"of {sum(e['documents'] for e in entries)} documents none is for {split}"
            raise ValueError(f"{what}; give more (a file is one) or another --val_share")
    return entries, splits


@contextmanager
def work_folder(out):
    """A folder beside `out`, emptied of what a killed run left and locked against another run."""
    folder = out.with_name(out.name + ".partial")
    with hold(folder):
        for file in set(folder.iterdir()) - {folder / ".lock"}:
            if not re.fullmatch(r"tokenizer\.json|(train|val)_\d{5}\.bin(\.partial)?", file.name):
                raise ValueError(f"{folder} holds {file.name}, which is not ours; move it away")
            file.unlink()
        yield folder


def fill(folder, sources, name, max_tokens, val_share, workers):
    """Write tokenizer.json and the shards; returns what meta.json says of them."""
    path = folder / "tokenizer.json"
    tokenizer = make_tokenizer(name, path, opening_texts(sources, val_share))
    vocab_size, separator = vocabulary(tokenizer)
    encode, fast = make_encoder(tokenizer)
    way = "tiktoken" if fast else "tokenizers, which is slower: tiktoken would give other ids"
    print(f"tokenizer {name}: {vocab_size:,} ids, encoded by {way}")

    def encode_document(document):
        text = document.decode("utf-8", "replace")
        damaged = "\ufffd" in text and text.encode() != document
        ids = encode(text).astype(shards.ID_DTYPE)
        split = "val" if held_out(document, val_share) else "train"
        return np.append(ids, ids.dtype.type(separator)), len(document), split, damaged

    with ThreadPoolExecutor(workers) as pool:
        entries, splits = write_splits(folder, sources, encode_document, max_tokens, pool)
        pool.shutdown(cancel_futures=True)  # what was read beyond max_tokens
    return dict(vocab_size=vocab_size, separator=separator, tokenizer=name, sources=entries,
                tokenizer_sha256=shards.sha256(path), splits=splits)  # fmt: skip


def prepare(sources, name, out, max_tokens, val_share, workers):
    """Make the data folder `out` of sources, pairs of a name and a share of the tokens."""
    arguments = dict(sources=sources, tokenizer=name, max_tokens=max_tokens, val_share=val_share)
    if (out / "meta.json").is_file() and shards.read_meta(out).get("arguments") == arguments:
        for split in shards.SPLITS:
            shards.open_shards(out, split)
        return print(f"{out} is there, made with these arguments; remove it to make it again")
    if out.exists():
        raise ValueError(f"{out} is there, not made with these arguments; remove it or set --out")
    if not 0 < val_share < 1:
        raise ValueError(f"--val_share {val_share} is not between 0 and 1; give 0.01")
    if workers < 1 or not (max_tokens is None or max_tokens > 0):
        raise ValueError("--max_tokens or --workers is not above 0; give at least 1")
    begun = time.perf_counter()
    with work_folder(out) as folder:
        meta = fill(folder, sources, name, max_tokens, val_share, workers)
        shards.write_json(folder / "meta.json", meta | dict(arguments=arguments))
        os.rename(folder, out)
        (out / ".lock").unlink()
    seconds, size = time.perf_counter() - begun, sum(e["bytes"] for e in meta["sources"]) / 1e6
    for split, entry in meta["splits"].items():
        print(f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens of "
              f"{entry['bytes'] / entry['tokens']:.2f} bytes")  # fmt: skip
    print(f"{out}: {size:.1f} MB in {seconds:.1f} s, {size / seconds:.1f} MB/s; "
          f"{sum(e['not_utf8'] for e in meta['sources']):,} documents are not UTF-8 throughout")


def parse_source(text):
    """[name, share] of "name" or "name=share"."""
    name, _, share = text.rpartition("=")
    if not name or Path(text).exists():
        return [text, 1.0]
    if not share.replace(".", "", 1).isdecimal() or not 0 < float(share) < 1e9:
        raise ValueError(f"--source {text} has no share above 0 after its =; write name=0.9")
    return [name, float(share)]


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--source", action="append", help="default stdlib; again for a mixture")
    parser.add_argument("--tokenizer", default="bpe:8192", help="default bpe:8192")
    parser.add_argument("--out", type=Path, help="default data/<name of the first source>")
    parser.add_argument("--max_tokens", type=float, help="end at so many, train and val together")
    parser.add_argument("--val_share", type=float, default=0.01, help="held out; default 0.01")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count(), 16), help="threads")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="check a data folder instead")
    args = parser.parse_args(argv)
    with refusals(parser):
        if args.verify:
            for split in shards.SPLITS:
                shards.open_shards(args.verify, split, verify=True)
            return print(f"{args.verify} is as it was made")
        sources = [parse_source(text) for text in args.source or ["stdlib"]]
        first = Path(sources[0][0].partition("@")[0]).resolve().name.partition(".")[0]
        out = args.out or Path("data") / first
        prepare(sources, args.tokenizer, out, args.max_tokens, args.val_share, args.workers)


if __name__ == "__main__":
    main()
