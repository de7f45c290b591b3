"""Sources of text, and their documents: the bytes of raw text, one document at a time.

A source is stdlib, hf:<repo>[/<config>][@revision], or a file or folder. Of files, .txt, .md and
.py are one document each; .jsonl, .jsonl.gz, .jsonl.xz and .parquet one a row, its "text".
"""

import gzip
import json
import lzma
import platform
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

WHOLE_FILES = (".txt", ".md", ".py")
ROW_FILES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
WAITS = (1, 5, 30, 120, 600)  # seconds before each new attempt, once a stream has begun


@dataclass(frozen=True)
class Source:
    name: str
    share: float = 1.0  # of the tokens, in proportion to those of the other sources

    @property
    def revision(self):
        """What else decides the documents: the Python of stdlib, or a revision on the hub."""
        if self.name == "stdlib":
            return f"Python {platform.python_version()}"
        return self.name.partition("@")[2]


def parse_source(text):
    """The Source of "name" or "name=share". Raises ValueError if the share is no number."""
    name, _, share = text.rpartition("=")
    if not name or Path(text).exists():
        return Source(text)
    if not share.replace(".", "", 1).isdecimal() or not 0 < float(share) < 1e9:
        raise ValueError(f"--source {text} has no share above 0 after its =; write name=0.9")
    return Source(name, float(share))


# ---------------- Files


def files_below(folder):
    """The files of a folder and of the folders in it, sorted. Nothing is passed over in silence:
    raises OSError at a folder that cannot be read, ValueError at a link to one, maybe a circle."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_dir() and path.is_symlink():
            raise ValueError(f"{path} is a link to a folder; name that with a --source of its own")
        if path.is_dir():
            yield from files_below(path)
        else:
            yield path


def stdlib_files():
    """The .py files of this Python's standard library, sorted, without installed packages."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"site-packages", "dist-packages"}.intersection(path.parts):
            yield path


def read_parquet(path):
    """The rows of a .parquet file, few in memory at a time."""
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(path).iter_batches(batch_size=256, columns=["text"]):
        yield from batch.to_pylist()


def read_jsonl(path):
    """The rows of a .jsonl file, compressed or not, one in memory at a time."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def file_documents(files):
    """The documents of files, passing over those of unknown kinds."""
    for path in files:
        if path.name.lower().endswith(WHOLE_FILES):
            yield path.read_bytes()
        elif path.name.endswith(ROW_FILES):
            rows = read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)
            try:
                for row in rows:
                    yield row["text"].encode("utf-8", "replace")
            except Exception as error:  # each format raises its own kinds
                raise ValueError(f'{path}: {error!r}; mend it, a "text" in each row') from None


# ---------------- The hub


def hub_documents(name):
    """The texts of hf:<repo>[/<config>][@revision], streamed.

    A stream that fails is opened again at the document where it failed, after a wait. It is not
    if it fails before its first document: then the name is wrong, or there is no network.
    """
    from datasets import load_dataset

    path, _, revision = name.removeprefix("hf:").partition("@")
    parts = path.split("/", 2)  # owner, repository and perhaps the configuration
    read = 0
    waits = []
    while True:
        try:
            rows = load_dataset(
                "/".join(parts[:2]),
                *parts[2:],
                split="train",
                streaming=True,
                revision=revision or None,
            )
            for row in rows.skip(read):
                document = row["text"].encode("utf-8", "replace")
                read += 1
                waits = list(WAITS)
                yield document
            return
        except Exception as error:  # each layer down to the network raises its own kinds
            reason = f"{name} failed at document {read} ({error!r})"
        if not waits:
            raise ValueError(f"{reason}; check the name and the network")
        print(f"{reason}; trying again in {waits[0]} s")
        time.sleep(waits.pop(0))


# ---------------- Any source


def documents_of(name):
    """The documents of a source, an iterator of bytes; files are taken in sorted order."""
    if name.startswith("hf:"):
        return hub_documents(name)
    if name == "stdlib":
        return file_documents(stdlib_files())
    if name and Path(name).is_dir():
        return file_documents(files_below(name))
    if name and Path(name).exists():
        return file_documents([Path(name)])
    raise ValueError(f"the source {name} does not exist; give stdlib, hf:<repo> or a path")
