"""Text to shards: python -m pytest tests/test_prepare.py"""

import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from test_shards import verify
from test_tokenizer import byte_level, edited, normalized
from tokenizers import Tokenizer, models

import prepare
import shards

ROOT = Path(__file__).parent.parent
@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "small tokenizer.json"
    path.write_text(byte_level().to_str())
    return path


def write_documents(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def words(count, seed=0):
    draw = random.Random(seed)
    return [f"{seed} {i} " + "cat " * draw.randrange(40) for i in range(count)]


def run(*arguments):
    prepare.main([str(argument) for argument in arguments])


def split_ids(folder, split):
    """The ids of each document of a split, without the separators."""
    opened = shards.open_shards(folder, split)
    ids = opened.read(0, opened.tokens)
    ends = np.flatnonzero(ids == opened.meta["separator"])
    assert ends[-1] == len(ids) - 1
    return [part.tolist() for part in np.split(ids, ends + 1)[:-1] for part in [part[:-1]]]


def split_texts(folder, split):
    """The decoded documents of a split."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode_batch(split_ids(folder, split), skip_special_tokens=False)


def split_of(texts, val_share):
    """(train, val) texts as prepare.py divides them."""
    out = [prepare.held_out(text.encode(), val_share) for text in texts]
    pairs = list(zip(texts, out, strict=True))
    return [text for text, val in pairs if not val], [text for text, val in pairs if val]


# -----------------------------------------------------------------------------
# End to end


def test_stdlib(tmp_path, tokenizer_path):
    command = [sys.executable, "prepare.py", "--out", tmp_path / "std", "--tokenizer"]
    command += [tokenizer_path, "--max_tokens", "3e5", "--val_share", "0.2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "encoded by tiktoken" in done.stdout and done.stderr == ""
    folder = tmp_path / "std"
    verify(folder)
    meta = shards.read_meta(folder)
    assert (meta["vocab_size"], meta["separator"]) == (byte_level().get_vocab_size(), 0)
    assert meta["tokenizer"] == str(tokenizer_path)
    (source,) = meta["sources"]
    assert source["revision"] == "Python " + sys.version.split()[0]
    raw = list(islice(prepare.documents_of("stdlib"), source["documents"]))
    texts = [document.decode("utf-8", "replace") for document in raw]
    train, val = split_of(texts, 0.2)
    assert split_texts(folder, "train") == train
    assert split_texts(folder, "val") == val
    splits = meta["splits"].values()
    assert sum(split["documents"] for split in splits) == len(raw)
    assert sum(split["bytes"] for split in splits) == source["bytes"] == sum(map(len, raw))
    tokens = sum(split["tokens"] for split in splits)
    last = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(texts[-1]).ids) + 1
    assert tokens - last < 3e5 <= tokens == source["tokens"]


def test_stdlib_is_the_python_files_without_installed_packages():
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    files = [p for p in files if {"site-packages", "dist-packages"}.isdisjoint(p.parts)]
    first = list(islice(prepare.documents_of("stdlib"), 100))
    assert first == [file.read_bytes() for file in files[:100]]
    assert sum(1 for _ in prepare.documents_of("stdlib")) == len(files) > 500


def test_same_shards_for_any_number_of_threads(tmp_path, tokenizer_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare, "BATCHES", 3)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    source = write_documents(tmp_path / "a.jsonl", words(500))
    for tokenizer in (tokenizer_path, "bpe:300"):
        metas = []
        for workers in (1, 2, 3):
            out = tmp_path / f"{workers} {Path(tokenizer).stem}"
            run("--source", source, "--tokenizer", tokenizer, "--out", out, "--workers", workers)
            verify(out)
            metas.append(shards.read_meta(out))
        assert metas[0] == metas[1] == metas[2]
        assert len(metas[0]["splits"]["train"]["shards"]) > 3
        full = [shard["tokens"] for shard in metas[0]["splits"]["train"]["shards"][:-1]]
        assert set(full) == {1000}


def test_a_document_longer_than_a_shard(tmp_path, tokenizer_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 64)
    texts = ["dog " * 1000, *words(50)]
    source = write_documents(tmp_path / "a.jsonl", texts)
    out = tmp_path / "out"
    run("--source", source, "--tokenizer", tokenizer_path, "--out", out, "--val_share", 0.3)
    verify(out)
    train, val = split_of(texts, 0.3)
    assert split_texts(out, "train") == train and split_texts(out, "val") == val


def test_repeated_with_the_same_arguments_it_leaves_the_folder(tmp_path, tokenizer_path, capsys):
    source = write_documents(tmp_path / "a.jsonl", words(500))
    arguments = ["--source", source, "--tokenizer", tokenizer_path, "--out", tmp_path / "out"]
    run(*arguments)
    before = (tmp_path / "out" / "meta.json").stat().st_mtime_ns
    capsys.readouterr()
    run(*arguments)
    assert "is there" in capsys.readouterr().out
    assert (tmp_path / "out" / "meta.json").stat().st_mtime_ns == before
    with pytest.raises(SystemExit) as stop:
        run(*arguments, "--max_tokens", 500)
    assert stop.value.code == 2


def test_killed_half_way_it_leaves_nothing_that_looks_whole(tmp_path, tokenizer_path):
    pipe, out = tmp_path / "a.jsonl", tmp_path / "out"
    os.mkfifo(pipe)
    command = [sys.executable, "prepare.py", "--source", pipe, "--tokenizer", tokenizer_path]
    process = subprocess.Popen([*command, "--out", out], cwd=ROOT, stdout=subprocess.DEVNULL)
    with open(pipe, "w") as file:  # opens once the process reads
        file.write("".join(json.dumps({"text": text}) + "\n" for text in words(3000)))
        file.flush()
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists() and (tmp_path / "out.partial").is_dir()
    (tmp_path / "out.partial" / "train_00007.bin").write_bytes(b"old")
    pipe.unlink()
    write_documents(pipe, words(300))
    run("--source", pipe, "--tokenizer", tokenizer_path, "--out", out)
    verify(out)
    assert not (out / "train_00007.bin").exists() and not (tmp_path / "out.partial").exists()


def test_what_is_not_ours_is_left_alone_and_no_two_write_at_once(tmp_path, tokenizer_path, capsys):
    source, folder = write_documents(tmp_path / "a.jsonl", words(300)), tmp_path / "out.partial"
    arguments = ["--source", source, "--tokenizer", tokenizer_path, "--out", tmp_path / "out"]
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    assert "thesis.txt, which is not ours" in refusal(capsys, *arguments)
    assert (folder / "thesis.txt").read_text() == "precious"
    (folder / "thesis.txt").unlink()
    with prepare.work_folder(tmp_path / "out"):
        assert "another run is at work" in refusal(capsys, *arguments)
    run(*arguments)
    verify(tmp_path / "out")


# -----------------------------------------------------------------------------
# Sources


def test_every_kind_of_file(tmp_path):
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
    table = pa.table({"id": range(1000), "text": [f"row {i}" for i in range(1000)]})
    pyarrow.parquet.write_table(table, folder / "deeper" / "7.parquet")
    (folder / "8.bin").write_bytes(b"no")
    rows = [b"one", b"a\x00b\r\n", b"? half", b""]
    expected = [b"caf\xe9 \xff\x00\r\n", "naïve".encode(), b"", *rows, *rows, *rows]
    expected += [f"row {i}".encode() for i in range(1000)]
    assert list(prepare.documents_of(str(folder))) == expected
    assert list(prepare.documents_of(str(folder / "2.md"))) == ["naïve".encode()]


def test_no_folder_is_passed_over_in_silence(tmp_path, monkeypatch):
    (tmp_path / "texts/inner").mkdir(parents=True)
    (tmp_path / "texts/inner/a.txt").write_bytes(b"one")
    (tmp_path / "other").mkdir()
    (tmp_path / "texts/b.txt").symlink_to(tmp_path / "texts/inner/a.txt")
    assert list(prepare.documents_of(str(tmp_path / "texts"))) == [b"one", b"one"]
    (tmp_path / "texts/link").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="texts/link is a link to a folder"):
        list(prepare.documents_of(str(tmp_path / "texts")))
    (tmp_path / "texts/link").unlink()
    (tmp_path / "texts/c.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="c.txt"):
        list(prepare.documents_of(str(tmp_path / "texts")))

    def closed(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(OSError, match="Permission denied"):
        list(prepare.documents_of(str(tmp_path / "texts")))


def test_odd_documents_keep_their_bytes_and_their_count(tmp_path, tokenizer_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    raw = [b"", b"\x00\x00", b"caf\xe9", b"a<|endoftext|>b<|im_start|>", b"x\r\ny\r\n", b" "]
    raw += [f"tiny {i}".encode() for i in range(300)]
    for number, document in enumerate(raw):
        (folder / f"{number:04}.txt").write_bytes(document)
    out = tmp_path / "out"
    run("--source", folder, "--tokenizer", tokenizer_path, "--out", out, "--val_share", 0.5)
    meta = shards.read_meta(out)
    texts = {text: 1 for split in shards.SPLITS for text in split_texts(out, split)}
    assert set(texts) == {document.decode("utf-8", "replace") for document in raw}
    assert sum(split["documents"] for split in meta["splits"].values()) == len(raw)
    assert meta["sources"][0]["bytes"] == sum(map(len, raw))
    assert meta["sources"][0]["not_utf8"] == 1


def hub(failing, count=10):
    """A stand-in for `datasets` whose stream breaks before the documents of `failing`, in turn."""
    calls, left = [], list(failing)

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


def test_a_source_on_the_hub_goes_on_after_failures(monkeypatch, capsys):
    fake, waits = hub([3, 3, 7]), []
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(prepare.time, "sleep", waits.append)
    documents = list(prepare.documents_of("hf:owner/repo/some-config@v1.0"))
    assert documents == [f"document {i}".encode() for i in range(10)]
    assert waits == [1, 5, 1]
    options = dict(split="train", streaming=True, revision="v1.0")
    assert fake.calls == [(("owner/repo", "some-config"), options)] * 4
    assert capsys.readouterr().out.count("trying again") == 3


@pytest.mark.parametrize("failing, waits", [([0], 0), ([4] * 6, 5)])
def test_a_source_on_the_hub_gives_up(monkeypatch, failing, waits):
    slept = []
    monkeypatch.setitem(sys.modules, "datasets", hub(failing))
    monkeypatch.setattr(prepare.time, "sleep", slept.append)
    with pytest.raises(ValueError, match=f"hf:owner/repo failed at document {failing[0]}"):
        list(prepare.documents_of("hf:owner/repo"))
    assert len(slept) == waits


def test_shares_of_the_tokens(tmp_path, tokenizer_path):
    a = write_documents(tmp_path / "a=b.jsonl", words(2000, seed=1))
    b = write_documents(tmp_path / "b.jsonl", words(2000, seed=2))
    out = tmp_path / "out"
    run(
        *("--source", f"{a}=0.8", "--source", f"{b}=.2", "--tokenizer", tokenizer_path),
        *("--out", out, "--max_tokens", "2e4", "--val_share", 0.1),
    )
    first, second = shards.read_meta(out)["sources"]
    assert (first["source"], second["share"]) == (str(a), 0.2)
    total = first["tokens"] + second["tokens"]
    assert 20000 <= total < 20200
    assert abs(first["tokens"] / total - 0.8) < 0.01


def test_a_source_that_ends_early_leaves_the_rest_to_the_others(tmp_path, tokenizer_path, capsys):
    a = write_documents(tmp_path / "a.jsonl", words(20, seed=1))
    b = write_documents(tmp_path / "b.jsonl", words(900, seed=2))
    out = tmp_path / "out"
    run(
        *("--source", f"{a}=0.9", "--source", f"{b}=0.1", "--tokenizer", tokenizer_path),
        *("--out", out, "--val_share", 0.1),
    )
    sources = shards.read_meta(out)["sources"]
    assert [source["documents"] for source in sources] == [20, 900]
    assert f"{a} has ended after {sources[0]['tokens']:,} tokens" in capsys.readouterr().out
    assert sum(source["tokens"] for source in sources) == sum(
        split["tokens"] for split in shards.read_meta(out)["splits"].values()
    )


def test_the_split_depends_on_the_text_alone(tmp_path, tokenizer_path):
    texts = words(400)
    orders = [texts + texts[:100], list(reversed(texts)) + texts[50:150]]
    seen = []
    for number, order in enumerate(orders):
        source = write_documents(tmp_path / f"{number}.jsonl", order)
        out = tmp_path / str(number)
        run("--source", source, "--tokenizer", tokenizer_path, "--out", out, "--val_share", 0.25)
        seen.append([set(split_texts(out, split)) for split in ("train", "val")])
        assert seen[-1][0].isdisjoint(seen[-1][1])
    assert seen[0] == seen[1]
    assert 60 < len(seen[0][1]) < 140


# -----------------------------------------------------------------------------
# Tokenizers


def test_a_fallback_is_told_and_encodes(tmp_path, capsys):
    path = tmp_path / "normalized.json"
    path.write_text(normalized().to_str())
    source = write_documents(tmp_path / "a.jsonl", [*words(100), "ﬁne<|endoftext|>"])
    run(*("--source", source, "--tokenizer", path, "--out", tmp_path / "out", "--val_share", 0.2))
    assert "encoded by tokenizers, which is slower" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    texts = [text for split in shards.SPLITS for text in split_texts(tmp_path / "out", split)]
    assert "fine<|endoftext|>" in texts and len(texts) == 101


def test_a_bpe_is_trained_on_training_documents_only(tmp_path):
    texts = words(200)
    _, val = split_of(texts, 0.3)
    marked = [text + " zzyzx" * 50 * (text in val) for text in texts]
    assert split_of(marked, 0.3) != split_of(texts, 0.3)  # the marks move some documents
    source = write_documents(tmp_path / "a.jsonl", texts)
    opening = list(prepare.opening_texts([[str(source), 1.0]], 0.3))
    train, _ = split_of(texts, 0.3)
    only = write_documents(tmp_path / "b.jsonl", train)
    assert opening == list(prepare.opening_texts([[str(only), 1.0]], 0.3)) == train


# -----------------------------------------------------------------------------
# Refusals


def without_separator():
    return edited(
        lambda spec: spec["added_tokens"].clear() or spec["model"]["vocab"].pop("<|endoftext|>")
    )


def with_plain_separator():
    return edited(lambda spec: spec["added_tokens"][0].update(special=False))


def too_large():
    vocab = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 65537)}}
    return Tokenizer(models.WordLevel(vocab, unk_token="w1"))


def refusal(capsys, *arguments):
    """The sentence on stderr of a command that is refused."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    "options, words_of_it",
    [
        (["--source", "no such folder"], "does not exist"),
        (["--source", "a=0"], "no share above 0"),
        (["--source", "a=-1"], "no share above 0"),
        (["--source", "stdlib=much"], "no share above 0"),
        (["--tokenizer", "bpe:many"], "bpe:8192"),
        (["--tokenizer", "bpe:100"], "bpe:8192"),
        (["--tokenizer", "bpe:65537"], "bpe:8192"),
        (["--val_share", "0"], "--val_share"),
        (["--val_share", "1"], "--val_share"),
        (["--val_share", "nan"], "--val_share"),
        (["--max_tokens", "0"], "--max_tokens"),
        (["--max_tokens", "-5"], "--max_tokens"),
        (["--workers", "0"], "--workers"),
        (["--val_share", "0.000001"], "none is for"),
        (["--val_share", "0.999999"], "none is for"),
        (["--verify", "nowhere"], "nowhere"),
    ],
)
def test_refused_options(tmp_path, tokenizer_path, capsys, options, words_of_it):
    source = write_documents(tmp_path / "a.jsonl", words(20))
    arguments = ["--source", source] if "--source" not in options else []
    if "--tokenizer" not in options:
        arguments += ["--tokenizer", tokenizer_path]
    out = tmp_path / "out"
    assert words_of_it in refusal(capsys, *arguments, *options, "--out", out)
    assert not out.exists()


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
def test_refused_files(tmp_path, tokenizer_path, capsys, name, data):
    source = tmp_path / name
    source.write_bytes(data)
    out = tmp_path / "out"
    arguments = ["--source", source, "--tokenizer", tokenizer_path, "--out", out]
    assert (name if name != "a.bin" else "none is for") in refusal(capsys, *arguments)
    assert not out.exists()


@pytest.mark.parametrize("table", [{"body": ["x"]}, {"text": [3]}, {"text": ["x", None]}])
def test_refused_parquet(tmp_path, tokenizer_path, capsys, table):
    source = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table(table), source)
    arguments = ["--source", source, "--tokenizer", tokenizer_path, "--out", tmp_path / "out"]
    assert "a.parquet" in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    "make, words_of_it",
    [
        (lambda: "{}", "is no tokenizer"),
        (lambda: "not JSON", "is no tokenizer"),
        (lambda: without_separator().to_str(), "no special token <|endoftext|>"),
        (lambda: with_plain_separator().to_str(), "no special token <|endoftext|>"),
        (lambda: too_large().to_str(), "65537 ids"),
    ],
)
def test_refused_tokenizers(tmp_path, capsys, make, words_of_it):
    path = tmp_path / "tokenizer.json"
    path.write_text(make())
    source = write_documents(tmp_path / "a.jsonl", words(20))
    arguments = ["--source", source, "--tokenizer", path, "--out", tmp_path / "out"]
    assert words_of_it in refusal(capsys, *arguments)


def test_a_tokenizer_that_the_hub_does_not_give(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fail(repo, name):
        raise OSError(f"cannot reach {repo}\nat all")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    source = write_documents(tmp_path / "a.jsonl", words(20))
    arguments = ["--source", source, "--out", tmp_path / "out", "--tokenizer"]
    assert "HuggingFaceTB/SmolLM2-1.7B" in refusal(capsys, *arguments, "smollm2")
    assert "openai-community/gpt2" in refusal(capsys, *arguments, "openai-community/gpt2")


def test_a_tokenizer_from_the_hub(tmp_path, tokenizer_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a: asked.append(a) or str(tokenizer_path)
    )
    source = write_documents(tmp_path / "a.jsonl", words(300))
    run("--source", source, "--out", tmp_path / "out", "--tokenizer", "smollm2")
    assert asked == [("HuggingFaceTB/SmolLM2-1.7B", "tokenizer.json")]
    assert shards.read_meta(tmp_path / "out")["tokenizer"] == "smollm2"


def test_folders_that_are_not_overwritten(tmp_path, tokenizer_path, capsys):
    source = write_documents(tmp_path / "a.jsonl", words(20))
    arguments = ["--source", source, "--tokenizer", tokenizer_path, "--out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert "remove it or set --out" in refusal(capsys, *arguments, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    assert "remove it or set --out" in refusal(capsys, *arguments, source)
    (tmp_path / "mine" / "meta.json").write_text("{")
    assert "meta.json" in refusal(capsys, *arguments, tmp_path / "mine")


def test_verify(tmp_path, tokenizer_path, capsys):
    source = write_documents(tmp_path / "a.jsonl", words(300))
    out = tmp_path / "out"
    run("--source", source, "--tokenizer", tokenizer_path, "--out", out)
    run("--verify", out)
    assert "is as it was made" in capsys.readouterr().out
    data = bytearray((out / "train_00000.bin").read_bytes())
    data[100] ^= 1
    (out / "train_00000.bin").write_bytes(data)
    assert "train_00000.bin" in refusal(capsys, "--verify", out)


def test_a_refusal_at_the_command_line():
    command = [sys.executable, "prepare.py", "--verify", "no such folder"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("prepare.py: no such folder/meta.json is missing")
