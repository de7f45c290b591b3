"""Text to shards. Run with: python -m pytest tests/unit/test_prepare.py

Bad sources, kills and folders that are in the way are in tests/hostile/test_hostile_data.py.
"""

import random
from itertools import islice
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from helpers import (
    SEPARATOR,
    refused_main,
    refused_script,
    trained_tokenizer,
    verify_data,
    write_documents,
)
from tokenizers import Tokenizer, normalizers

import prepare
from nanocodes.shards import SPLITS, open_shards, read_meta
from nanocodes.sources import Source, documents_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer") / "small tokenizer.json"
    trained_tokenizer().save(str(path))
    return path


def words(count, seed=0):
    """So many different texts of up to forty words."""
    draw = random.Random(seed)
    return [f"{seed} {i} " + "cat " * draw.randrange(40) for i in range(count)]


def run(*arguments):
    prepare.main([str(argument) for argument in arguments])


def split_texts(folder, split):
    """The decoded documents of a split."""
    opened = open_shards(folder, split)
    ids = opened.read(0, opened.tokens)
    ends = np.flatnonzero(ids == opened.meta["separator"])
    assert ends[-1] == len(ids) - 1
    documents = [part[:-1].tolist() for part in np.split(ids, ends + 1)[:-1]]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode_batch(documents, skip_special_tokens=False)


def divided(texts, val_share):
    """(train, val) texts as prepare.py divides them."""
    train = [text for text in texts if not prepare.is_held_out(text.encode(), val_share)]
    val = [text for text in texts if prepare.is_held_out(text.encode(), val_share)]
    return train, val


# ---------------- End to end


def test_the_standard_library_becomes_shards_of_its_documents(tmp_path, tokenizer, capsys):
    out = tmp_path / "std"
    run("--out", out, "--tokenizer", tokenizer, "--max_tokens", "3e5", "--val_share", 0.2)
    printed = capsys.readouterr()
    assert "encoded by tiktoken" in printed.out and printed.err == ""
    verify_data(out)
    meta = read_meta(out)
    assert (meta["vocab_size"], meta["separator"]) == (trained_tokenizer().get_vocab_size(), 0)
    assert meta["tokenizer"] == str(tokenizer)
    (source,) = meta["sources"]
    assert source["revision"] == Source("stdlib").revision
    documents = list(islice(documents_of("stdlib"), source["documents"]))
    texts = [document.decode("utf-8", "replace") for document in documents]
    train, val = divided(texts, 0.2)
    assert split_texts(out, "train") == train
    assert split_texts(out, "val") == val
    splits = meta["splits"].values()
    assert sum(split["documents"] for split in splits) == len(documents)
    bytes_of_text = sum(map(len, documents))
    assert sum(split["bytes"] for split in splits) == source["bytes"] == bytes_of_text
    tokens = sum(split["tokens"] for split in splits)
    last = len(Tokenizer.from_file(str(tokenizer)).encode(texts[-1]).ids) + 1
    assert tokens - last < 3e5 <= tokens == source["tokens"]


@pytest.mark.parametrize("trained", [False, True])
def test_the_shards_are_the_same_for_any_number_of_threads(
    trained, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare, "BATCHES", 3)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    source = write_documents(tmp_path / "a.jsonl", words(500))
    name = "bpe:300" if trained else tokenizer
    metas = []
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        run("--source", source, "--tokenizer", name, "--out", out, "--workers", workers)
        verify_data(out)
        metas.append(read_meta(out))
    assert metas[0] == metas[1] == metas[2]
    entries = metas[0]["splits"]["train"]["shards"]
    assert len(entries) > 3
    assert {shard["tokens"] for shard in entries[:-1]} == {1000}


def test_a_document_may_be_longer_than_a_shard(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 64)
    texts = ["dog " * 1000, *words(50)]
    source = write_documents(tmp_path / "a.jsonl", texts)
    out = tmp_path / "out"
    run("--source", source, "--tokenizer", tokenizer, "--out", out, "--val_share", 0.3)
    verify_data(out)
    train, val = divided(texts, 0.3)
    assert split_texts(out, "train") == train and split_texts(out, "val") == val


def test_repeated_with_the_same_arguments_it_leaves_the_folder(tmp_path, tokenizer, capsys):
    source = write_documents(tmp_path / "a.jsonl", words(500))
    meta = tmp_path / "out" / "meta.json"
    arguments = ["--source", source, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    run(*arguments)
    before = meta.stat().st_mtime_ns
    capsys.readouterr()
    run(*arguments)
    assert "is there" in capsys.readouterr().out
    refused_main(capsys, prepare.main, *arguments, "--max_tokens", 500)
    assert meta.stat().st_mtime_ns == before


def test_verify_finds_a_changed_shard(tmp_path, tokenizer, capsys):
    source = write_documents(tmp_path / "a.jsonl", words(300))
    out = tmp_path / "out"
    run("--source", source, "--tokenizer", tokenizer, "--out", out)
    run("--verify", out)
    assert "is as it was made" in capsys.readouterr().out
    data = bytearray((out / "train_00000.bin").read_bytes())
    data[100] ^= 1
    (out / "train_00000.bin").write_bytes(data)
    assert "train_00000.bin" in refused_main(capsys, prepare.main, "--verify", out)


@pytest.mark.parametrize(
    "name, out",
    [
        ("stdlib", "data/stdlib"),
        ("some/notes.txt", "data/notes"),
        ("hf:a/b/c@v1", "data/c"),
    ],
)
def test_the_folder_has_the_name_of_the_source(name, out):
    assert prepare.default_out(Source(name)) == Path(out)


# ---------------- Documents


def test_odd_documents_keep_their_bytes_and_their_count(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    raw = [b"", b"\x00\x00", b"caf\xe9", b"a<|endoftext|>b<|im_start|>", b"x\r\ny\r\n", b" "]
    raw.append("U+FFFD itself: \ufffd".encode())
    raw += [f"tiny {i}".encode() for i in range(300)]
    for number, document in enumerate(raw):
        (folder / f"{number:04}.txt").write_bytes(document)
    out = tmp_path / "out"
    run("--source", folder, "--tokenizer", tokenizer, "--out", out, "--val_share", 0.5)
    meta = read_meta(out)
    texts = {text for split in SPLITS for text in split_texts(out, split)}
    assert texts == {document.decode("utf-8", "replace") for document in raw}
    assert sum(split["documents"] for split in meta["splits"].values()) == len(raw)
    assert meta["sources"][0]["bytes"] == sum(map(len, raw))
    assert meta["sources"][0]["not_utf8"] == 1


def test_sources_have_their_shares_of_the_tokens(tmp_path, tokenizer):
    a = write_documents(tmp_path / "a=b.jsonl", words(2000, seed=1))
    b = write_documents(tmp_path / "b.jsonl", words(2000, seed=2))
    out = tmp_path / "out"
    sources = ["--source", f"{a}=0.8", "--source", f"{b}=.2"]
    run(*sources, "--tokenizer", tokenizer, "--out", out, "--max_tokens", "2e4", "--val_share", 0.1)
    first, second = read_meta(out)["sources"]
    assert (first["source"], second["share"]) == (str(a), 0.2)
    total = first["tokens"] + second["tokens"]
    assert 20_000 <= total < 20_200
    assert abs(first["tokens"] / total - 0.8) < 0.01


def test_a_source_that_ends_early_leaves_the_rest_to_the_others(tmp_path, tokenizer, capsys):
    a = write_documents(tmp_path / "a.jsonl", words(20, seed=1))
    b = write_documents(tmp_path / "b.jsonl", words(900, seed=2))
    out = tmp_path / "out"
    sources = ["--source", f"{a}=0.9", "--source", f"{b}=0.1"]
    run(*sources, "--tokenizer", tokenizer, "--out", out, "--val_share", 0.1)
    meta = read_meta(out)
    first, second = meta["sources"]
    assert [first["documents"], second["documents"]] == [20, 900]
    assert f"{a} has ended after {first['tokens']:,} tokens" in capsys.readouterr().out
    splits = meta["splits"].values()
    assert first["tokens"] + second["tokens"] == sum(split["tokens"] for split in splits)


def test_the_split_depends_on_the_text_alone(tmp_path, tokenizer):
    texts = words(400)
    found = []
    for number, order in enumerate([texts + texts[:100], texts[::-1] + texts[50:150]]):
        source = write_documents(tmp_path / f"{number}.jsonl", order)
        out = tmp_path / str(number)
        run("--source", source, "--tokenizer", tokenizer, "--out", out, "--val_share", 0.25)
        train, val = (set(split_texts(out, split)) for split in SPLITS)
        assert train.isdisjoint(val)
        assert 60 < len(val) < 140
        found.append((train, val))
    assert found[0] == found[1]


# ---------------- Tokenizers


def test_a_slower_encoder_is_told_and_encodes(tmp_path, capsys):
    tokenizer = trained_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    path = tmp_path / "normalized.json"
    tokenizer.save(str(path))
    source = write_documents(tmp_path / "a.jsonl", [*words(100), f"ﬁne{SEPARATOR}"])
    out = tmp_path / "out"
    run("--source", source, "--tokenizer", path, "--out", out, "--val_share", 0.2)
    assert "encoded by tokenizers, which is slower" in capsys.readouterr().out
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    texts = [text for split in SPLITS for text in split_texts(out, split)]
    assert f"fine{SEPARATOR}" in texts and len(texts) == 101


def test_a_bpe_is_trained_on_training_documents_only(tmp_path):
    texts = words(200)
    train, val = divided(texts, 0.3)
    assert len(val) > 30
    every = write_documents(tmp_path / "a.jsonl", texts)
    only = write_documents(tmp_path / "b.jsonl", train)
    opening = list(prepare.opening_texts([Source(str(every))], 0.3))
    assert opening == list(prepare.opening_texts([Source(str(only))], 0.3)) == train


def test_a_tokenizer_comes_from_the_hub(tmp_path, tokenizer, monkeypatch):
    calls = []

    def download(*names):
        calls.append(names)
        return str(tokenizer)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    source = write_documents(tmp_path / "a.jsonl", words(300))
    run("--source", source, "--out", tmp_path / "out", "--tokenizer", "smollm2")
    assert calls == [("HuggingFaceTB/SmolLM2-1.7B", "tokenizer.json")]
    assert read_meta(tmp_path / "out")["tokenizer"] == "smollm2"


def test_a_tokenizer_that_the_hub_does_not_give_is_refused(tmp_path, capsys, monkeypatch):
    def fail(repository, name):
        raise OSError(f"cannot reach {repository}\nat all")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    source = write_documents(tmp_path / "a.jsonl", words(20))
    arguments = ["--source", source, "--out", tmp_path / "out", "--tokenizer"]
    for name, repository in [
        ("smollm2", "HuggingFaceTB/SmolLM2-1.7B"),
        ("openai-community/gpt2", "openai-community/gpt2"),
    ]:
        assert repository in refused_main(capsys, prepare.main, *arguments, name)


# ---------------- Options


@pytest.mark.parametrize(
    "options, part",
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
def test_options_out_of_range_are_refused(tmp_path, tokenizer, capsys, options, part):
    source = write_documents(tmp_path / "a.jsonl", words(20))
    defaults = {"--source": source, "--tokenizer": tokenizer, "--out": tmp_path / "out"}
    arguments = [text for pair in defaults.items() if pair[0] not in options for text in pair]
    assert part in refused_main(capsys, prepare.main, *arguments, *options)
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_without_a_traceback():
    sentence = refused_script("prepare.py", "--verify", "no such folder")
    assert sentence.startswith("prepare.py: no such folder/meta.json is missing")
