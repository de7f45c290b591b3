"""Text -> token ids: by tiktoken where it gives the very ids of `tokenizers`, since it is faster.

A byte-level BPE cuts a text into words, and then joins neighbours within a word. tiktoken says
both in terms of its own: an expression that matches the words, and a rank for each token.
"""

import json
from dataclasses import dataclass

import numpy as np
import tiktoken

from nanocodes.tokenizer import PROBE

# The two ways to cut a text that tiktoken can say: GPT-2's, and SmolLM2's, with digits apart.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITTERS = [BYTE_LEVEL, {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}]

# The same as expressions, possessive so that long words need no backtracking.
PATTERNS = [
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s",
]


@dataclass
class TiktokenForm:
    """A tokenizer in tiktoken's terms."""

    encoding: tiktoken.Encoding
    id_of_rank: np.ndarray  # int32, -1 for a byte that has no token


def byte_characters():
    """{character: byte}: how a byte-level BPE writes each of the 256 bytes as a character."""
    byte_of = {chr(byte): byte for byte in range(256) if chr(byte).isprintable() and byte != 32}
    others = [byte for byte in range(256) if chr(byte) not in byte_of]
    return byte_of | {chr(256 + number): byte for number, byte in enumerate(others)}


def is_plain_byte_level(spec):
    """Whether a tokenizer.json is a byte-level BPE without options that tiktoken does not have."""
    model = spec["model"]
    options = [model[key] for key in model if key not in ("type", "vocab", "merges")]
    return (
        model["type"] == "BPE"
        and not any(options)
        and spec["pre_tokenizer"] in SPLITTERS
        and not spec["normalizer"]
        and all(token["special"] for token in spec["added_tokens"])
    )


def tiktoken_form(tokenizer):
    """The TiktokenForm of a tokenizer, None where it has none.

    tiktoken joins any two neighbours that make a token, best rank first. This is the merge list
    itself if each token is the product of one merge, of tokens ranked before it, and is what its
    own text gives. A byte without a token gets a rank too, since tiktoken needs one.
    """
    spec = json.loads(tokenizer.to_str())
    if not is_plain_byte_level(spec):
        return None
    vocab = spec["model"]["vocab"]
    byte_of = byte_characters()
    ids = {character: vocab.get(character, -1) for character in byte_of}  # in the order of rank
    for left, right in spec["model"]["merges"]:
        token = left + right
        of_ranked_tokens = left in ids and right in ids
        from_its_own_text = [part.value for part in tokenizer.model.tokenize(token)] == [token]
        if not of_ranked_tokens or token in ids or not from_its_own_text:
            return None
        ids[token] = vocab[token]
    encoding = tiktoken.Encoding(
        name="",
        pat_str=PATTERNS[SPLITTERS.index(spec["pre_tokenizer"])],
        mergeable_ranks={bytes(map(byte_of.get, token)): rank for rank, token in enumerate(ids)},
        special_tokens={},
    )
    return TiktokenForm(encoding, np.array(list(ids.values()), dtype=np.int32))


def make_encoder(tokenizer):
    """A function from a text to its ids, int32 (n,), and the library that does the work.

    The library is "tiktoken" where that gives the ids of `tokenizers` on all of PROBE, and
    "tokenizers" otherwise.
    """

    def by_tokenizers(text):
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    form = tiktoken_form(tokenizer)
    if form is None:
        return by_tokenizers, "tokenizers"

    def by_tiktoken(text):
        try:
            ids = form.id_of_rank[form.encoding.encode_to_numpy(text)]
        except ValueError:  # its expression gives up on blanks without end
            return by_tokenizers(text)
        return ids if (ids >= 0).all() else by_tokenizers(text)

    if all(np.array_equal(by_tiktoken(text), by_tokenizers(text)) for text in PROBE):
        return by_tiktoken, "tiktoken"
    return by_tokenizers, "tokenizers"
