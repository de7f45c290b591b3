"""Tokenizers: files in the format of Hugging Face's `tokenizers`, found, trained and checked.

A tokenizer is a tokenizer.json with at most 65,536 ids, so that an id fits into two bytes, and
with the special token SEPARATOR, which ends every document. Where that token's characters stand
in a text, they are ordinary characters.
"""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
MOST_IDS = 65_536


def probe_texts():
    """Texts in which two ways to cut text into words would differ, if they ever did: words,
    numbers and contractions of many scripts, runs of blanks, and a sample of all characters."""
    texts = ["I'll we'LL 1's x'y", "  12 3½²Ⅷ٣  4", f"{SEPARATOR}<|im_start|>", "👩‍👩‍👧 漢字かな"]
    for blank in " \t\n\r\u3000":
        texts += [f"a{blank * n}b{blank * n}1" for n in range(1, 40)]
    # All of Latin, then every 31st and, past the surrogates, every 257th character.
    numbers = [*range(0x300), *range(0x300, 0xD800, 31), *range(0xE000, 0x110000, 257)]
    texts += [f"a{c}b {c}1{c}{c} .{c}" for c in map(chr, numbers)]
    return texts


PROBE = probe_texts()

# ---------------- Checking


def vocabulary(tokenizer):
    """(one more than the greatest id, the separator's id or None)."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return 1 + max(ids, default=0), tokenizer.token_to_id(SEPARATOR)


def load_tokenizer(path, most=MOST_IDS):
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


def tokenizer_path(step):
    """The tokenizer.json of a step folder: in it or, as train.py writes it, beside it."""
    inside = Path(step) / "tokenizer.json"
    beside = Path(step).resolve().parent / "tokenizer.json"
    for path in (inside, beside):
        if path.is_file():
            return path
    raise ValueError(f"{step} has no tokenizer.json; copy it there from the run's data")


# ---------------- Making


def train_bpe(name, texts):
    """The bytes of a tokenizer.json of SmolLM2's family, "bpe:<size>", trained on texts."""
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or not 257 <= int(size) <= MOST_IDS:
        raise ValueError(f"{name} has no size from 257 to {MOST_IDS}; write bpe:8192")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[SEPARATOR],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def find_tokenizer(name):
    """The path of a tokenizer.json: a path itself, smollm2 for SmolLM2's, or a name on the hub."""
    if Path(name).is_file():
        return Path(name)
    from huggingface_hub import hf_hub_download

    repository = "HuggingFaceTB/SmolLM2-1.7B" if name == "smollm2" else name
    try:
        return Path(hf_hub_download(repository, "tokenizer.json"))
    except (ValueError, OSError) as error:
        raise ValueError(f"no tokenizer {name} on disk or hub ({error!r}); give a path") from None


def make_tokenizer(name, path, texts):
    """The tokenizer `name`, a bpe:<size> trained on texts or one found, also written to `path`."""
    if name.startswith("bpe:"):
        path.write_bytes(train_bpe(name, texts))
        return load_tokenizer(path)
    found = find_tokenizer(name)
    tokenizer = load_tokenizer(found)
    shutil.copyfile(found, path)
    return tokenizer
