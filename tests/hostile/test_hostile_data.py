"""Data that is changed, torn or cut off: python -m pytest tests/hostile/test_hostile_data.py"""

import copy
import errno
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import (
    ROOT,
    SEPARATOR,
    edited_tokenizer,
    read_json_file,
    refused,
    refused_main,
    trained_tokenizer,
    verify_data,
    write_data,
    write_documents,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import prepare
from nanocodes.files import read_json, write_json
from nanocodes.held_out import bits_per_byte
from nanocodes.shards import SPLITS, open_shards, write_shard


def small_data(folder):
    """A data folder of three shards to train on and one to validate."""
    return write_data(
        folder,
        [range(7), range(7, 12), range(12, 20)],
        [range(9)],
        vocab_size=50,
        bytes_per_token=4,
    )


@pytest.fixture
def folder(tmp_path):
    return small_data(tmp_path / "data")


def open_both(folder):
    return [open_shards(folder, split) for split in SPLITS]


# ---------------- meta.json


def test_a_missing_folder_or_meta_is_refused(folder, tmp_path):
    refused(lambda: open_both(tmp_path / "nowhere"), "nowhere", "prepare.py")
    (folder / "meta.json").unlink()
    refused(lambda: open_both(folder), "meta.json", "prepare.py")
    (folder / "meta.json").mkdir()
    refused(lambda: open_both(folder), "meta.json")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b"{} {}"],
)
def test_a_meta_that_is_no_json_object_is_refused(text, folder):
    (folder / "meta.json").write_bytes(text)
    refused(lambda: open_both(folder), "meta.json")


def test_half_a_meta_is_refused(folder):
    data = (folder / "meta.json").read_bytes()
    for kept in range(0, len(data) - 1, 17):
        (folder / "meta.json").write_bytes(data[:kept])
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


def change(folder, *path, to):
    """Set one value inside meta.json."""
    meta = read_json_file(folder / "meta.json")
    inside(meta, path[:-1])[path[-1]] = to
    (folder / "meta.json").write_text(json.dumps(meta))


def opens_or_is_refused(folder):
    try:
        for opened in open_both(folder):
            assert len(opened.read(0, opened.tokens)) == opened.tokens
            assert math.isfinite(bits_per_byte(1.0, opened))
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
        folder = small_data(Path(temporary))
        meta = read_json_file(folder / "meta.json")
        for _ in range(data.draw(st.integers(1, 2))):
            path = data.draw(st.sampled_from(list(places(meta))))
            parent = inside(meta, path[:-1])
            value = data.draw(any_json)
            edit = data.draw(st.sampled_from(["replace", "delete", "add", "swap"]))
            if edit == "delete":
                del parent[path[-1]]
            elif edit == "add" and isinstance(parent, dict):
                parent[data.draw(st.text(max_size=5))] = value
            elif edit == "add":
                parent.append(value)
            elif edit == "swap":
                other = data.draw(st.sampled_from(list(places(meta))))
                parent[path[-1]] = copy.deepcopy(inside(meta, other))
            else:
                parent[path[-1]] = value
        (folder / "meta.json").write_text(json.dumps(meta))
        opens_or_is_refused(folder)


@pytest.mark.parametrize("value", [5, None, {}, {"shards": [{}]}, {"shards": [], "tokens": 0}])
def test_a_third_split_opens_or_is_refused_in_one_sentence(value, folder):
    change(folder, "splits", "test", to=value)
    opens_or_is_refused(folder)


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


# ---------------- Shards and the tokenizer


@pytest.mark.parametrize("size", [0, 1, 9, 11, 12, 1000])
def test_a_shard_of_another_size_is_refused(size, folder):
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


def test_a_shard_without_tokens_is_refused(folder):
    shards = read_json_file(folder / "meta.json")["splits"]["train"]["shards"]
    empty = {"file": "train_00003.bin", "tokens": 0, "max_id": 0, "sha256": ""}
    change(folder, "splits", "train", "shards", to=[*shards, empty])
    (folder / "train_00003.bin").touch()
    refused(lambda: open_both(folder), "train")


def test_another_tokenizer_is_refused(folder):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    refused(lambda: open_both(folder), "tokenizer.json")
    path.unlink()
    refused(lambda: open_both(folder), "tokenizer.json")


def test_verify_finds_one_flipped_bit(folder):
    verify_data(folder)
    files = sorted(path for path in folder.iterdir() if path.name != "meta.json")
    assert len(files) == 5
    for path in files:
        data = path.read_bytes()
        for bit in {0, 8 * len(data) // 2 + 3, 8 * len(data) - 1}:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            refused(lambda: verify_data(folder), path.name)
        path.unlink()
        refused(lambda: verify_data(folder), path.name)
        path.write_bytes(data)
    verify_data(folder)


# ---------------- A full disk


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_whole(failing, tmp_path, monkeypatch):
    path = tmp_path / "meta.json"
    write_json(path, {"old": 1})

    def fail(*arguments):
        half_written = tmp_path / "meta.json.partial"
        os.truncate(half_written, half_written.stat().st_size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, failing, fail)
        with pytest.raises(OSError, match="No space left on device") as error:
            write_json(path, {"new": [0] * 1000})
        assert failing == "replace" or error.value.filename == str(path)
        assert read_json_file(path) == {"old": 1}
        with pytest.raises(OSError, match="No space left"):
            write_shard(tmp_path, "train", 0, [1, 2])
        assert not (tmp_path / "train_00000.bin").exists()
    write_json(path, {"new": 2})  # what is left of the failed one is in nobody's way
    assert read_json(path) == {"new": 2}


# ---------------- Sources and tokenizers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained_tokenizer().save(str(path))
    return path


@pytest.fixture
def source(tmp_path):
    """The path of a .jsonl of documents."""
    return write_documents(tmp_path / "a.jsonl", [f"the cats are {i}" for i in range(500)])


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n'),
        ("a.jsonl", b'{"text": "fine"}\n["text"]\n'),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n'),
        ("a.jsonl", b'{"text": "fi'),
        ("a.jsonl", b"\xff\xfe\x00"),
        ("a.jsonl", b"[" * 100_000),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 1000)[:-20]),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.xz", b"no xz"),
        ("a.parquet", b"no parquet"),
        ("a.bin", b"unknown"),
    ],
)
def test_a_damaged_source_is_refused(tmp_path, tokenizer, capsys, name, data):
    (tmp_path / name).write_bytes(data)
    out = tmp_path / "out"
    arguments = ["--source", tmp_path / name, "--tokenizer", tokenizer, "--out", out]
    part = "none is for" if name == "a.bin" else name
    assert part in refused_main(capsys, prepare.main, *arguments)
    assert not out.exists()


@pytest.mark.parametrize("table", [{"body": ["x"]}, {"text": [3]}, {"text": ["x", None]}])
def test_a_parquet_without_text_is_refused(tmp_path, tokenizer, capsys, table):
    source = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), source)
    arguments = ["--source", source, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert "a.parquet" in refused_main(capsys, prepare.main, *arguments)


def without_separator():
    def edit(spec):
        spec["added_tokens"].clear()
        del spec["model"]["vocab"][SEPARATOR]

    return edited_tokenizer(edit).to_str()


def with_plain_separator():
    return edited_tokenizer(lambda spec: spec["added_tokens"][0].update(special=False)).to_str()


def too_large():
    vocab = {SEPARATOR: 0} | {f"w{i}": i for i in range(1, 65_537)}
    return Tokenizer(models.WordLevel(vocab, unk_token="w1")).to_str()


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda: "{}", "is no tokenizer"),
        (lambda: "not JSON", "is no tokenizer"),
        (without_separator, "no special token <|endoftext|>"),
        (with_plain_separator, "no special token <|endoftext|>"),
        (too_large, "65537 ids"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, source, capsys, make, part):
    path = tmp_path / "tokenizer.json"
    path.write_text(make())
    arguments = ["--source", source, "--tokenizer", path, "--out", tmp_path / "out"]
    assert part in refused_main(capsys, prepare.main, *arguments)


# ---------------- Folders in the way, and kills


def test_what_is_there_is_not_overwritten(tmp_path, source, tokenizer, capsys):
    arguments = ["--source", source, "--tokenizer", tokenizer, "--out"]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    assert "remove it or set --out" in refused_main(capsys, prepare.main, *arguments, folder)
    assert (folder / "thesis.txt").read_text() == "precious"
    assert "remove it or set --out" in refused_main(capsys, prepare.main, *arguments, source)
    (folder / "meta.json").write_text("{")
    assert "meta.json" in refused_main(capsys, prepare.main, *arguments, folder)


def test_what_is_not_ours_is_left_alone_and_no_two_write_at_once(
    tmp_path, source, tokenizer, capsys
):
    out = tmp_path / "out"
    arguments = list(map(str, ["--source", source, "--tokenizer", tokenizer, "--out", out]))
    thesis = tmp_path / "out.partial" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    sentence = refused_main(capsys, prepare.main, *arguments)
    assert "thesis.txt, which is not ours" in sentence
    assert thesis.read_text() == "precious"
    thesis.unlink()
    with prepare.work_folder(out):
        assert "another run is at work" in refused_main(capsys, prepare.main, *arguments)
    prepare.main(arguments)
    verify_data(out)


@pytest.mark.parametrize(
    "number, exit_status, last_words",
    [(signal.SIGKILL, -9, ""), (signal.SIGINT, 130, "prepare.py: interrupted\n")],
    ids=["killed", "Ctrl-C"],
)
def test_ended_half_way_it_leaves_nothing_that_looks_whole(
    number, exit_status, last_words, tmp_path, tokenizer
):
    pipe = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    partial_out = tmp_path / "out.partial"
    os.mkfifo(pipe)
    arguments = list(map(str, ["--source", pipe, "--tokenizer", tokenizer, "--out", out]))
    process = subprocess.Popen(
        [sys.executable, "prepare.py", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with open(pipe, "w") as file:  # opens once the process reads
        for i in range(20_000):
            file.write(json.dumps({"text": f"{i} " + "cat " * (i % 40)}) + "\n")
        file.flush()
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == exit_status and error == last_words
    assert not out.exists() and partial_out.is_dir()

    (partial_out / "train_00007.bin").write_bytes(b"old")
    pipe.unlink()
    write_documents(pipe, [f"the cats are {i}" for i in range(500)])
    prepare.main(arguments)
    verify_data(out)
    assert not (out / "train_00007.bin").exists() and not partial_out.exists()
