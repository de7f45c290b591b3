"""Text to ids, by tiktoken where it is exact: python -m pytest tests/unit/test_encoder.py"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import SEPARATOR, TEXT, edited_tokenizer, trained_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from nanocodes import encoder
from nanocodes.encoder import make_encoder
from nanocodes.tokenizer import PROBE, load_tokenizer


@dataclass
class Encoder:
    """The encoder of a tokenizer that went through a file, and what it has to agree with."""

    encode: Callable
    library: str
    reference: Tokenizer  # as `tokenizers` reads it, with special tokens as ordinary text

    def assert_agrees(self, *texts):
        for text in texts:
            expected = self.reference.encode(text, add_special_tokens=False).ids
            assert self.encode(text).tolist() == expected


def encoder_of(tokenizer):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        encode, library = make_encoder(load_tokenizer(path))
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.encode_special_tokens = True
    return Encoder(encode, library, reference)


# ---------------- What tiktoken says exactly


def reverse_ids(spec):
    """Let the most joined tokens have the least ids, after the two special ones."""
    vocab = spec["model"]["vocab"]
    vocab |= {token: 401 - number for token, number in vocab.items() if number > 1}


EXACT = {
    "digits": encoder_of(trained_tokenizer()),
    "gpt2": encoder_of(trained_tokenizer(digits=False)),
    "missing bytes": encoder_of(trained_tokenizer(every_byte=False)),
    "other order of ids": encoder_of(edited_tokenizer(reverse_ids)),
}


@pytest.mark.parametrize("kind", EXACT)
def test_tiktoken_gives_the_ids_of_tokenizers_on_the_probe(kind):
    assert EXACT[kind].library == "tiktoken"
    EXACT[kind].assert_agrees(*PROBE, TEXT, "".join(PROBE), "")


@pytest.mark.parametrize("kind", EXACT)
@given(
    text=st.text()
    | st.text("ab'lt 12½\n\t\r\0<|>é漢\u3000")
    | st.lists(st.sampled_from(["the", " cats", "'ll", "12", "  ", "\n", SEPARATOR])).map("".join)
)
def test_tiktoken_gives_the_ids_of_tokenizers(kind, text):
    EXACT[kind].assert_agrees(text)


def test_blanks_without_end_and_a_very_long_word_are_encoded():
    EXACT["digits"].assert_agrees("x" + " " * 1_200_000 + "y", "w" * 300_000)


# ---------------- What it cannot say


def with_merges(*merges):
    """A byte-level BPE of these merges alone."""

    def edit(spec):
        vocab = spec["model"]["vocab"]
        for left, right in merges:
            vocab.setdefault(left + right, len(vocab))
        spec["model"]["merges"] = [list(merge) for merge in merges]

    return edited_tokenizer(edit, size=258)


def unreached():
    """No text gives "abc": tiktoken would look it up whole."""
    return with_merges(("b", "c"), ("a", "b"), ("ab", "c"))


def merged_twice():
    """Two merges give "abc"."""
    return with_merges(("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"))


def normalized():
    tokenizer = trained_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def prefixed():
    tokenizer = trained_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def whole_words_kept():
    return edited_tokenizer(lambda spec: spec["model"].update(ignore_merges=True))


def with_plain_added_token():
    tokenizer = trained_tokenizer()
    tokenizer.add_tokens(["cats' 12"])
    return tokenizer


def words_only():
    tokenizer = Tokenizer(models.WordLevel({SEPARATOR: 0, "?": 1, "cat": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        unreached,
        merged_twice,
        normalized,
        prefixed,
        whole_words_kept,
        with_plain_added_token,
        words_only,
    ],
)
def test_what_tiktoken_cannot_say_is_left_to_tokenizers(make):
    found = encoder_of(make())
    assert found.library == "tokenizers"
    found.assert_agrees(TEXT, f"abc bc ab cat {SEPARATOR}", *PROBE[:50])


def test_a_tokenizer_whose_probe_differs_is_left_to_tokenizers(monkeypatch):
    broken = [encoder.PATTERNS[0], encoder.PATTERNS[1].replace("'(?:[sdmt]|ll|ve|re)|", "")]
    assert broken != encoder.PATTERNS
    monkeypatch.setattr(encoder, "PATTERNS", broken)
    found = encoder_of(trained_tokenizer())
    assert found.library == "tokenizers"
    found.assert_agrees("we'll")
