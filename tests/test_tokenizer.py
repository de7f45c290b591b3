"""Tokenizers and the encoder: python -m pytest tests/test_tokenizer.py"""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import tokenizer as tokenizing

TEXT = (
    "The 3 cats' 12 mice weren't  there in 2024; they'll   come\n\n    def f(x):\n\treturn x\n" * 5
    + "naïve café 漢字かな 🐈‍⬛ ½ ٣ \u3000 \x85 — “quoted”\r\n"
)


def byte_level(digits=True, every_byte=True, text=TEXT, size=400, **options):
    """A small trained byte-level BPE; without `every_byte` it has only the bytes of its text."""
    tokenizer = Tokenizer(models.BPE(**options))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
    apart = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, bytes_only]) if digits else bytes_only
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = bytes_only.alphabet() if every_byte else []
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def edited(edit, **options):
    """The same, its tokenizer.json changed by `edit(spec)`."""
    spec = json.loads(byte_level(**options).to_str())
    edit(spec)
    return Tokenizer.from_str(json.dumps(spec))


def loaded(tokenizer):
    """The same through a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(tokenizer.to_str())
        return tokenizing.load_tokenizer(path)


def encoders(tokenizer):
    """(our encoding, that of `tokenizers` as lists, whether ours is tiktoken's)."""
    encode, fast = tokenizing.make_encoder(loaded(tokenizer))
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.encode_special_tokens = True
    return encode, lambda text: reference.encode(text, add_special_tokens=False).ids, fast


EXACT = {
    "digits": encoders(byte_level()),
    "gpt2": encoders(byte_level(digits=False)),
    "missing bytes": encoders(byte_level(every_byte=False)),
    "other order of ids": encoders(
        edited(
            lambda spec: spec["model"]["vocab"].update(
                {token: 401 - id for token, id in spec["model"]["vocab"].items() if id > 1}
            )
        )
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_tiktoken_gives_the_ids_of_tokenizers_on_the_probe(kind):
    encode, reference, fast = EXACT[kind]
    assert fast
    for text in [*tokenizing.PROBE, TEXT, "".join(tokenizing.PROBE), ""]:
        assert encode(text).tolist() == reference(text)


@pytest.mark.parametrize("kind", EXACT)
@given(
    text=st.text()
    | st.text("ab'lt 12½\n\t\r\0<|>é漢\u3000")
    | st.lists(st.sampled_from(["the", " cats", "'ll", "12", "  ", "\n", "<|endoftext|>"])).map(
        "".join
    )
)
def test_tiktoken_gives_the_ids_of_tokenizers(kind, text):
    encode, reference, _ = EXACT[kind]
    assert encode(text).tolist() == reference(text)


def test_blanks_without_end_and_a_very_long_word():
    encode, reference, _ = EXACT["digits"]
    for text in ("x" + " " * 1_200_000 + "y", "w" * 300_000):
        assert encode(text).tolist() == reference(text)


def unmerged():
    """a, b, c with merges so that "abc" is never reached: tiktoken would look it up whole."""
    spec = json.loads(byte_level(size=258).to_str())
    for token in ("bc", "ab", "abc"):
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])
    spec["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    return Tokenizer.from_str(json.dumps(spec))


def twice():
    """Two merges that give "abc"."""
    spec = json.loads(byte_level(size=258).to_str())
    for token in ("ab", "bc", "abc"):
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])
    spec["model"]["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]]
    return Tokenizer.from_str(json.dumps(spec))


def normalized():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def prefixed():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def whole_words_kept():
    return edited(lambda spec: spec["model"].update(ignore_merges=True))


def with_plain_added_token():
    tokenizer = byte_level()
    tokenizer.add_tokens(["cats' 12"])
    return tokenizer


def words_only():
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "?": 1, "cat": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


OTHERS = [
    unmerged,
    twice,
    normalized,
    prefixed,
    whole_words_kept,
    with_plain_added_token,
    words_only,
]


@pytest.mark.parametrize("make", OTHERS)
def test_what_tiktoken_cannot_say_falls_back(make):
    encode, reference, fast = encoders(make())
    assert not fast
    for text in [TEXT, "abc bc ab cat <|endoftext|>", *tokenizing.PROBE[:50]]:
        assert encode(text).tolist() == reference(text)


def test_a_probe_that_differs_falls_back(monkeypatch):
    broken = [tokenizing.PATTERNS[0], tokenizing.PATTERNS[1].replace("'(?:[sdmt]|ll|ve|re)|", "")]
    monkeypatch.setattr(tokenizing, "PATTERNS", broken)
    encode, reference, fast = encoders(byte_level())
    assert not fast
    assert encode("we'll").tolist() == reference("we'll")


def test_bpe_is_trained_alike_each_time():
    first = tokenizing.train_bpe("bpe:300", [TEXT] * 3)
    assert first == tokenizing.train_bpe("bpe:300", iter([TEXT] * 3))
    tokenizer = loaded(Tokenizer.from_str(first.decode()))
    size, separator = tokenizing.vocabulary(tokenizer)
    assert separator == 0 and 257 < size <= 300
    assert len(tokenizer.encode("2024").ids) == 4


def test_added_tokens_count_in_the_vocabulary():
    tokenizer = byte_level(size=300)
    tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
    assert tokenizing.vocabulary(loaded(tokenizer))[0] == 302


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level(size=300).to_str())
    assert tokenizing.vocabulary(tokenizing.load_tokenizer(path, 300))[0] == 300
    with pytest.raises(ValueError, match="has 300 ids; use a tokenizer of at most 299"):
        tokenizing.load_tokenizer(path, 299)


def test_the_tokenizer_of_a_step_is_in_it_or_beside_it(tmp_path):
    step = tmp_path / "run" / "step_00000001"
    step.mkdir(parents=True)
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        tokenizing.tokenizer_path(step)
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    assert tokenizing.tokenizer_path(step) == (tmp_path / "run" / "tokenizer.json").resolve()
    (step / "tokenizer.json").write_text("{}")
    assert tokenizing.tokenizer_path(step) == step / "tokenizer.json"
