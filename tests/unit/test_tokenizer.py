"""Tokenizers trained, found and checked: python -m pytest tests/unit/test_tokenizer.py"""

import pytest
from helpers import SEPARATOR, TEXT, refused, trained_tokenizer

from nanocodes.tokenizer import load_tokenizer, tokenizer_path, train_bpe, vocabulary


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokenizer.json"


def test_a_bpe_is_trained_alike_each_time(path):
    trained = train_bpe("bpe:300", [TEXT] * 3)
    assert trained == train_bpe("bpe:300", iter([TEXT] * 3))
    path.write_bytes(trained)
    tokenizer = load_tokenizer(path)
    size, separator = vocabulary(tokenizer)
    assert separator == 0 and 257 < size <= 300
    assert len(tokenizer.encode("2024").ids) == 4


def test_added_tokens_count_in_the_vocabulary(path):
    tokenizer = trained_tokenizer(size=300)
    tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
    tokenizer.save(str(path))
    assert vocabulary(load_tokenizer(path)) == (302, 0)


def test_the_separators_characters_in_a_text_are_ordinary_ones(path):
    trained_tokenizer().save(str(path))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(f"a{SEPARATOR}b").ids
    assert 0 not in ids and tokenizer.decode(ids) == f"a{SEPARATOR}b"


def test_a_tokenizer_larger_than_the_model_is_refused(path):
    trained_tokenizer(size=300).save(str(path))
    assert vocabulary(load_tokenizer(path, 300))[0] == 300
    refused(lambda: load_tokenizer(path, 299), "has 300 ids; use a tokenizer of at most 299")


def test_the_tokenizer_of_a_step_is_in_it_or_beside_it(tmp_path):
    step = tmp_path / "run" / "step_00000001"
    step.mkdir(parents=True)
    refused(lambda: tokenizer_path(step), step, "has no tokenizer.json")
    beside = tmp_path / "run" / "tokenizer.json"
    beside.write_text("{}")
    assert tokenizer_path(step) == beside.resolve()
    inside = step / "tokenizer.json"
    inside.write_text("{}")
    assert tokenizer_path(step) == inside
