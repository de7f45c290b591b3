"""Sources and their documents: python -m pytest tests/unit/test_sources.py"""

import gzip
import json
import lzma
import sys
import sysconfig
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from helpers import refused

from nanocodes.sources import Source, documents_of, parse_source


@pytest.mark.parametrize(
    "text, source",
    [
        ("stdlib", Source("stdlib", 1.0)),
        ("notes=0.9", Source("notes", 0.9)),
        ("a=b=.25", Source("a=b", 0.25)),
        ("hf:owner/repo@v1=3", Source("hf:owner/repo@v1", 3.0)),
    ],
)
def test_a_source_is_a_name_and_a_share(text, source):
    assert parse_source(text) == source


def test_what_is_on_disk_is_a_name_without_a_share(tmp_path):
    (tmp_path / "a=3").mkdir()
    assert parse_source(f"{tmp_path}/a=3") == Source(f"{tmp_path}/a=3", 1.0)


def test_the_revision_is_what_else_decides_the_documents():
    assert Source("stdlib").revision == "Python " + sys.version.split()[0]
    assert Source("hf:owner/repo@v1.0").revision == "v1.0"
    assert Source("notes").revision == ""


# ---------------- Files


def test_stdlib_is_the_python_files_without_installed_packages():
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    files = [p for p in files if {"site-packages", "dist-packages"}.isdisjoint(p.parts)]
    first = list(islice(documents_of("stdlib"), 100))
    assert first == [file.read_bytes() for file in files[:100]]
    assert sum(1 for _ in documents_of("stdlib")) == len(files) > 500


def test_files_of_every_kind_are_read_in_sorted_order(tmp_path):
    folder = tmp_path / "some folder"
    (folder / "deeper").mkdir(parents=True)
    (folder / "1 note.txt").write_bytes(b"caf\xe9 \xff\x00\r\n")
    (folder / "2.md").write_bytes("naïve".encode())
    (folder / "3.py").write_bytes(b"")
    lines = [{"text": "one"}, {"text": "a\u0000b\r\n"}, {"text": "\ud83d half"}, {"text": ""}]
    data = "\n\n".join(map(json.dumps, lines)).encode()
    (folder / "4.jsonl").write_bytes(data)
    (folder / "5.jsonl.gz").write_bytes(gzip.compress(data))
    (folder / "6.jsonl.xz").write_bytes(lzma.compress(data))
    table = pyarrow.table({"id": range(1000), "text": [f"row {i}" for i in range(1000)]})
    pyarrow.parquet.write_table(table, folder / "deeper" / "7.parquet")
    (folder / "8.bin").write_bytes(b"no")
    rows = [b"one", b"a\x00b\r\n", b"? half", b""]
    expected = [b"caf\xe9 \xff\x00\r\n", "naïve".encode(), b"", *rows, *rows, *rows]
    expected += [f"row {i}".encode() for i in range(1000)]
    assert list(documents_of(str(folder))) == expected
    assert list(documents_of(str(folder / "2.md"))) == ["naïve".encode()]


def test_no_folder_is_passed_over_in_silence(tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    (texts / "inner").mkdir(parents=True)
    (texts / "inner/a.txt").write_bytes(b"one")
    (texts / "b.txt").symlink_to(texts / "inner/a.txt")
    assert list(documents_of(str(texts))) == [b"one", b"one"]
    (tmp_path / "other").mkdir()
    (texts / "link").symlink_to(tmp_path / "other")
    refused(lambda: list(documents_of(str(texts))), "texts/link is a link to a folder")
    (texts / "link").unlink()
    (texts / "c.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="c.txt"):
        list(documents_of(str(texts)))

    def closed(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(OSError, match="Permission denied"):
        list(documents_of(str(texts)))


# ---------------- The hub


def hub(failing, count=10):
    """A stand-in for `datasets` whose stream breaks before the documents of `failing`, in turn."""
    calls = []
    left = list(failing)

    class Stream:
        def __init__(self, start=0):
            self.start = start

        def skip(self, n):
            return Stream(n)

        def __iter__(self):
            for i in range(self.start, count):
                if left and left[0] == i:
                    left.pop(0)
                    raise RuntimeError("connection lost\nin the middle")
                yield {"text": f"document {i}"}

    def load_dataset(*names, **options):
        calls.append((names, options))
        return Stream()

    return SimpleNamespace(load_dataset=load_dataset, calls=calls)


@pytest.fixture
def waits(monkeypatch):
    """The seconds of each wait, none of which is waited."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_a_source_on_the_hub_goes_on_after_failures(waits, monkeypatch, capsys):
    fake = hub([3, 3, 7])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    documents = list(documents_of("hf:owner/repo/some-config@v1.0"))
    assert documents == [f"document {i}".encode() for i in range(10)]
    assert waits == [1, 5, 1]
    options = dict(split="train", streaming=True, revision="v1.0")
    assert fake.calls == [(("owner/repo", "some-config"), options)] * 4
    assert capsys.readouterr().out.count("trying again") == 3


@pytest.mark.parametrize("failing, count", [([0], 0), ([4] * 6, 5)])
def test_a_source_on_the_hub_gives_up(failing, count, waits, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", hub(failing))
    with pytest.raises(ValueError, match=f"hf:owner/repo failed at document {failing[0]}"):
        list(documents_of("hf:owner/repo"))
    assert len(waits) == count
