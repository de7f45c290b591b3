"""Text -> token shards: data/<name>/ as the top of nanocodes/shards.py describes it.

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

import os
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanocodes.command import make_parser, refusals
from nanocodes.encoder import make_encoder
from nanocodes.files import locked, sha256, write_json
from nanocodes.shards import (
    ID_DTYPE,
    SHARD_TOKENS,
    SPLITS,
    open_shards,
    read_meta,
    write_shard,
)
from nanocodes.sources import documents_of, parse_source
from nanocodes.tokenizer import make_tokenizer, vocabulary

BPE_BYTES = 64_000_000  # the most text that a BPE is trained on
BATCH_BYTES = 500_000  # what a thread encodes at a time
BATCHES = 32  # how many batches wait to be encoded or written

# ---------------- Which documents are held out, and which train a tokenizer


def is_held_out(document, val_share):
    """Whether a document is held out, by a hash of it, so that a copy goes the same way."""
    digest = blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_share * 2**64


def opening_texts(sources, val_share):
    """The first BPE_BYTES of the training documents of all sources, by their shares, as text."""
    shares = sum(source.share for source in sources)
    for source in sources:
        room = int(BPE_BYTES * source.share / shares)
        for document in documents_of(source.name):
            if not is_held_out(document, val_share):
                yield document[:room].decode("utf-8", "replace")
                room -= len(document)
            if room <= 0:
                break


# ---------------- Documents -> ids


@dataclass
class EncodedDocument:
    ids: np.ndarray  # (n,) of ID_DTYPE, the separator at the end
    bytes: int  # of raw text
    split: str
    is_utf8: bool


def encode_document(document, encode, separator, val_share):
    """The EncodedDocument of a document's bytes."""
    text = document.decode("utf-8", "replace")
    return EncodedDocument(
        ids=np.append(encode(text), separator).astype(ID_DTYPE),
        bytes=len(document),
        split="val" if is_held_out(document, val_share) else "train",
        is_utf8="\ufffd" not in text or text.encode() == document,
    )


def encoded(documents, encode, pool):
    """encode(document) of each in order. Threads are enough: both encoders let go of Python."""
    waiting = deque()
    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document) + 100  # what an object takes besides
        if size >= BATCH_BYTES:
            waiting.append(pool.submit(list, map(encode, batch)))
            batch = []
            size = 0
        if len(waiting) > BATCHES:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()
    yield from map(encode, batch)


@dataclass
class SourceCounts:
    """A source's entry in meta.json."""

    source: str
    revision: str
    share: float
    not_utf8: int = 0  # documents that are not UTF-8 throughout
    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, document):
        self.not_utf8 += not document.is_utf8
        self.documents += 1
        self.tokens += len(document.ids)
        self.bytes += document.bytes


def mixed(streams, counts, max_tokens):
    """Yield the EncodedDocuments of several streams until max_tokens or the end of all.

    The next one is always from the source that is furthest behind its share of the tokens.
    `counts`, a SourceCounts for each stream, keep the account.
    """
    live = list(range(len(streams)))
    total = 0
    with tqdm(total=max_tokens, unit=" tokens", unit_scale=True, disable=None) as progress:
        while live and (max_tokens is None or total < max_tokens):
            number = min(live, key=lambda i: counts[i].tokens / counts[i].share)
            document = next(streams[number], None)
            if document is None:
                live.remove(number)
                if live:
                    ended = counts[number]
                    progress.write(f"{ended.source} has ended after {ended.tokens:,} tokens")
                continue
            counts[number].add(document)
            total += len(document.ids)
            progress.update(len(document.ids))
            yield document


# ---------------- Ids -> shards


class SplitWriter:
    """Writes the documents of one split into shards of SHARD_TOKENS, the last one shorter."""

    def __init__(self, folder, split):
        self.folder = folder
        self.split = split
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self.shards = []  # entries of meta.json
        self.buffer = np.empty(SHARD_TOKENS, ID_DTYPE)
        self.filled = 0  # tokens in the buffer

    def write(self, document):
        self.documents += 1
        self.tokens += len(document.ids)
        self.bytes += document.bytes
        ids = document.ids
        while len(ids):
            part = ids[: len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            ids = ids[len(part) :]
            if self.filled == len(self.buffer):
                self.flush()

    def flush(self):
        """Write what the buffer holds as a shard."""
        if self.filled:
            ids = self.buffer[: self.filled]
            self.shards.append(write_shard(self.folder, self.split, len(self.shards), ids))
            self.filled = 0

    def entry(self):
        """The split's entry in meta.json."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "shards": self.shards,
        }


# ---------------- The data folder


@contextmanager
def work_folder(out):
    """A folder beside `out`, emptied of what a killed run left and locked against another run."""
    folder = out.with_name(out.name + ".partial")
    with locked(folder):
        for path in set(folder.iterdir()) - {folder / ".lock"}:
            if not re.fullmatch(r"tokenizer\.json|(train|val)_\d{5}\.bin(\.partial)?", path.name):
                raise ValueError(f"{folder} holds {path.name}, which is not ours; move it away")
            path.unlink()
        yield folder


def write_folder(folder, sources, tokenizer_name, max_tokens, val_share, workers):
    """Write tokenizer.json and the shards; returns meta.json's value."""
    tokenizer_file = folder / "tokenizer.json"
    texts = opening_texts(sources, val_share)
    tokenizer = make_tokenizer(tokenizer_name, tokenizer_file, texts)
    vocab_size, separator = vocabulary(tokenizer)
    encode, library = make_encoder(tokenizer)
    slower = "" if library == "tiktoken" else ", which is slower: tiktoken would give other ids"
    print(f"tokenizer {tokenizer_name}: {vocab_size:,} ids, encoded by {library}{slower}")

    def encode_one(document):
        return encode_document(document, encode, separator, val_share)

    counts = [SourceCounts(source.name, source.revision, source.share) for source in sources]
    writers = {split: SplitWriter(folder, split) for split in SPLITS}
    with ThreadPoolExecutor(workers) as pool:
        streams = [encoded(documents_of(source.name), encode_one, pool) for source in sources]
        for document in mixed(streams, counts, max_tokens):
            writers[document.split].write(document)
        pool.shutdown(cancel_futures=True)  # what was read beyond max_tokens
    for writer in writers.values():
        writer.flush()

    documents = sum(writer.documents for writer in writers.values())
    for split, writer in writers.items():
        if not writer.tokens:
            raise ValueError(
                f"of {documents} documents none is for {split}; "
                "give more (a file is one) or another --val_share"
            )
    return {
        "vocab_size": vocab_size,
        "separator": separator,
        "tokenizer": tokenizer_name,
        "sources": [asdict(count) for count in counts],
        "tokenizer_sha256": sha256(tokenizer_file),
        "splits": {split: writer.entry() for split, writer in writers.items()},
    }


def is_made(out, arguments):
    """Whether the data folder `out` is there, made with these arguments. Raises ValueError if
    anything else is there, or a shard of it is missing."""
    if (out / "meta.json").is_file() and read_meta(out).get("arguments") == arguments:
        for split in SPLITS:
            open_shards(out, split)
        return True
    if out.exists():
        raise ValueError(f"{out} is there, not made with these arguments; remove it or set --out")
    return False


def prepare(sources, tokenizer_name, out, max_tokens, val_share, workers):
    """Make the data folder `out` of a list of Sources, unless it is there already.

    max_tokens counts train and val together, None meaning all. Raises ValueError, OSError.
    """
    arguments = {
        "sources": [[source.name, source.share] for source in sources],
        "tokenizer": tokenizer_name,
        "max_tokens": max_tokens,
        "val_share": val_share,
    }
    if is_made(out, arguments):
        print(f"{out} is there, made with these arguments; remove it to make it again")
        return
    if not 0 < val_share < 1:
        raise ValueError(f"--val_share {val_share} is not between 0 and 1; give 0.01")
    if workers < 1 or not (max_tokens is None or max_tokens > 0):
        raise ValueError("--max_tokens or --workers is not above 0; give at least 1")

    start = time.perf_counter()
    with work_folder(out) as folder:
        meta = write_folder(folder, sources, tokenizer_name, max_tokens, val_share, workers)
        write_json(folder / "meta.json", meta | {"arguments": arguments})
        os.rename(folder, out)
        (out / ".lock").unlink()
    print_summary(out, meta, time.perf_counter() - start)


def print_summary(out, meta, seconds):
    for split, entry in meta["splits"].items():
        bytes_per_token = entry["bytes"] / entry["tokens"]
        print(
            f"{split}: {entry['documents']:,} documents, "
            f"{entry['tokens']:,} tokens of {bytes_per_token:.2f} bytes"
        )
    megabytes = sum(source["bytes"] for source in meta["sources"]) / 1e6
    not_utf8 = sum(source["not_utf8"] for source in meta["sources"])
    print(
        f"{out}: {megabytes:.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s; "
        f"{not_utf8:,} documents are not UTF-8 throughout"
    )


def default_out(source):
    """data/<name> for the first source: notes.txt -> data/notes, hf:a/b/c@v1 -> data/c."""
    path = Path(source.name.partition("@")[0]).resolve()
    return Path("data") / path.name.partition(".")[0]


def main(argv=None):
    parser = make_parser(__doc__)
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
            for split in SPLITS:
                open_shards(args.verify, split, verify=True)
            print(f"{args.verify} is as it was made")
            return
        sources = [parse_source(text) for text in args.source or ["stdlib"]]
        out = args.out or default_out(sources[0])
        prepare(sources, args.tokenizer, out, args.max_tokens, args.val_share, args.workers)


if __name__ == "__main__":
    main()
