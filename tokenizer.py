"""Text <-> token ids: tokenizer.json files, the separator, and an encoder that is fast and exact.

A tokenizer is a file in the format of Hugging Face's `tokenizers`, with at most 65,536 ids and
the special token SEPARATOR, which ends every document. In a text it is ordinary characters.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
DIGITS = dict(type="Digits", individual_digits=True)
SPLITTERS = [BYTE_LEVEL, dict(type="Sequence", pretokenizers=[DIGITS, BYTE_LEVEL])]
PATTERNS = [  # the same as expressions, possessive so that long words need no backtracking
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s",
]
PROBE = [  # where the two would differ if they ever did
    *("I'll we'LL 1's x'y", "  12 3½²Ⅷ٣  4", f"{SEPARATOR}<|im_start|>", "👩‍👩‍👧 漢字かな"),
    *(f"a{blank * n}b{blank * n}1" for blank in " \t\n\r\u3000" for n in range(1, 40)),
    *(f"a{c}b {c}1{c}{c} .{c}" for c in map(chr, [*range(0x300), *range(0x300, 0xD800, 31)])),
    *(f"a{c}b {c}1{c}{c} .{c}" for c in map(chr, range(0xE000, 0x110000, 257))),
]


def train_bpe(name, texts):
    """The bytes of a tokenizer.json of SmolLM2's family, "bpe:<size>", trained on texts."""
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or not 257 <= int(size) <= 65536:
        raise ValueError(f"{name} has no size from 257 to 65536; write bpe:8192")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    options = dict(initial_alphabet=byte_level.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=int(size), special_tokens=[SEPARATOR], **options)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def fetch_tokenizer(name):
    """The path of a tokenizer.json, itself or a name on the hub; smollm2 is SmolLM2's."""
    if Path(name).is_file():
        return Path(name)
    from huggingface_hub import hf_hub_download

    repo = "HuggingFaceTB/SmolLM2-1.7B" if name == "smollm2" else name
    try:
        return Path(hf_hub_download(repo, "tokenizer.json"))
    except (ValueError, OSError) as error:
        raise ValueError(f"no tokenizer {name} on disk or hub ({error!r}); give a path") from None


def tokenizer_path(step):
    """The tokenizer.json of a step folder: in it or, as train.py writes it, beside it."""
    inner, outer = Path(step) / "tokenizer.json", Path(step).resolve().parent / "tokenizer.json"
    if not inner.is_file() and not outer.is_file():
        raise ValueError(f"{step} has no tokenizer.json; copy it there from the run's data")
    return inner if inner.is_file() else outer


def load_tokenizer(path, most=65536):
    """The Tokenizer in a file. Raises ValueError if it is unreadable, lacks the separator, or
    has more than `most` ids."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True  # as the ordinary text that they are in a document
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for text in PROBE:  # one by one, since a panic in a batch never comes back
            tokenizer.encode(text, add_special_tokens=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `tokenizers` raises nothing narrower, and panics
        raise ValueError(f"{path} is no tokenizer ({error}); use another") from None
    size, separator = vocabulary(tokenizer)
    if size > most:
        raise ValueError(f"{path} has {size} ids; use a tokenizer of at most {most}")
    if separator is None or separator in tokenizer.encode(SEPARATOR, add_special_tokens=False).ids:
        raise ValueError(f"{path} has no special token {SEPARATOR}; use a tokenizer that has")
    return tokenizer


def make_tokenizer(name, path, texts):
    """The tokenizer `name`, a bpe:<size> trained on texts or one found, also written to `path`."""
    if name.startswith("bpe:"):
        path.write_bytes(train_bpe(name, texts))
        return load_tokenizer(path)
    found = fetch_tokenizer(name)
    tokenizer = load_tokenizer(found)
    shutil.copyfile(found, path)
    return tokenizer


def vocabulary(tokenizer):
    """(one more than the greatest id, the separator's id)."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return 1 + max(ids, default=0), tokenizer.token_to_id(SEPARATOR)


# ---------------- Encoding: by tiktoken where it gives the very ids of `tokenizers`


def tiktoken_form(tokenizer):
    """(encoding, ids by rank) of a byte-level BPE in tiktoken's terms, None where it has none.

    tiktoken joins any two neighbours that make a token, best rank first. This is the merge list
    itself if each token is the product of one merge, of tokens ranked before it, and is what its
    own text gives. A byte without a token gets a rank too, of id -1, since tiktoken needs it.
    """
    import tiktoken

    spec = json.loads(tokenizer.to_str())
    model, splitter = spec["model"], spec["pre_tokenizer"]
    options = [model[key] for key in model if key not in ("type", "vocab", "merges")]
    plain = model["type"] == "BPE" and splitter in SPLITTERS and not spec["normalizer"]
    if not plain or any(options) or not all(token["special"] for token in spec["added_tokens"]):
        return None
    byte_of = {chr(byte): byte for byte in range(256) if chr(byte).isprintable() and byte != 32}
    other = [byte for byte in range(256) if chr(byte) not in byte_of]
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(other)}
    ids = {char: model["vocab"].get(char, -1) for char in byte_of}  # in the order of rank
    for left, right in model["merges"]:
        token = left + right
        reached = [part.value for part in tokenizer.model.tokenize(token)] == [token]
        if left not in ids or right not in ids or token in ids or not reached:
            return None
        ids[token] = model["vocab"][token]
    ranks = {bytes(byte_of[char] for char in token): rank for rank, token in enumerate(ids)}
    pattern = PATTERNS[SPLITTERS.index(splitter)]
    encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return encoding, np.array(list(ids.values()), dtype=np.int32)


def make_encoder(tokenizer):
    """(function from text to its ids (n,), whether it is tiktoken that does the work)."""

    def slow(text):
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return np.array(ids, dtype=np.int32)

    def fast(text):
        try:
            ids = id_of_rank[encoding.encode_to_numpy(text)]
        except ValueError:  # its expression gives up on blanks without end
            return slow(text)
        return slow(text) if (ids < 0).any() else ids

    form = tiktoken_form(tokenizer)
    if form is None:
        return slow, False
    encoding, id_of_rank = form
    same = all(np.array_equal(fast(text), slow(text)) for text in PROBE)
    return (fast, True) if same else (slow, False)
