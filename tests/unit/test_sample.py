"""Text from a checkpoint: python -m pytest tests/unit/test_sample.py"""

import pytest
import torch
from helpers import byte_tokenizer, refused_main, refused_script, write_run

import sample
from model import ModelConfig

EMOJI = "\N{PARTY POPPER}"
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
PADDED = ("<pad>", "<|endoftext|>")


def text(model, tokenizer, prompt="def", new=20, temperature=0.8, top_k=200, seed=1):
    pieces = sample.stream_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=new,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return "".join(pieces)


class Script:
    """A stand-in for the Transformer that generates given ids."""

    def __init__(self, ids):
        self.ids = ids
        self.config = ModelConfig(max_seq_len=64)
        self.head = torch.nn.Linear(1, 1)

    def generate(self, prompt_ids, max_new_tokens, *others):
        self.prompt_ids = prompt_ids.tolist()
        yield from (torch.tensor([i]) for i in self.ids[:max_new_tokens])


# ---------------- The text


def test_greedy_text_is_that_of_generate(tmp_path, capsys):
    model = write_run(tmp_path)
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer.encode("def main").ids])
    chosen = [i.item() for i in model.generate(ids, 20, temperature=0)]
    assert 0 not in chosen
    expected = tokenizer.decode(chosen, skip_special_tokens=False)
    arguments = ["--prompt", "def main", "--temperature", "0", "--max_new_tokens", "20"]
    sample.main([str(tmp_path), *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    streamed = printed.out.removeprefix("def main").removesuffix("\n")
    assert expected.startswith(streamed) and len(streamed) > 5
    assert set(expected[len(streamed) :]) <= {UNREADABLE}


def test_seed_decides_the_text(tmp_path):
    model = write_run(tmp_path)
    tokenizer = byte_tokenizer()
    assert text(model, tokenizer, seed=1) == text(model, tokenizer, seed=1)
    assert text(model, tokenizer, seed=1) != text(model, tokenizer, seed=2)
    assert text(model, tokenizer, top_k=1, seed=1) == text(model, tokenizer, temperature=0, seed=2)


def test_characters_of_several_tokens_come_out_unbroken():
    tokenizer = byte_tokenizer()
    said = f"é {EMOJI} 日本 hello"
    ids = tokenizer.encode(said).ids
    assert len(ids) > len(said)
    options = dict(max_new_tokens=60, temperature=0, top_k=1, seed=0)
    pieces = list(sample.stream_text(Script(ids), tokenizer, "日", **options))
    assert pieces[0] == "日" and len(pieces) == len(ids) + 1
    assert "".join(pieces[1:]) == said
    assert not any(UNREADABLE in piece for piece in pieces)


def test_unfinished_last_character_is_left_out():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ab" + EMOJI).ids
    assert text(Script(ids[:-1]), tokenizer, prompt="") == "ab"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows():
    tokenizer = byte_tokenizer()
    broken = tokenizer.encode(EMOJI).ids[:1] + tokenizer.encode("go on").ids
    assert text(Script(broken), tokenizer, prompt="") == UNREADABLE + "go on"


def test_text_ends_at_the_separator():
    tokenizer = byte_tokenizer(PADDED)
    a, b = tokenizer.encode("ab").ids
    assert text(Script([a, 1, b]), tokenizer, prompt="") == "a"
    assert text(Script([a, 0, b]), tokenizer, prompt="") == "a<pad>b"


def test_empty_prompt_starts_from_the_separator():
    tokenizer = byte_tokenizer(PADDED)
    model = Script([])
    assert text(model, tokenizer, prompt="") == "" and model.prompt_ids == [[1]]
    assert text(model, tokenizer, prompt="d") == "d" and model.prompt_ids != [[1]]


# ---------------- Folders


def test_step_folder_is_enough_with_its_own_or_its_runs_tokenizer(tmp_path, capsys):
    write_run(tmp_path)
    step = tmp_path / "step_00000003"
    arguments = ["--prompt", "def", "--max_new_tokens", "3"]
    sample.main([str(step), *arguments])
    (tmp_path / "tokenizer.json").rename(step / "tokenizer.json")
    sample.main([str(step), *arguments])
    sample.main([str(tmp_path), *arguments])
    first, *others = capsys.readouterr().out.split("def")[1:]
    assert others == [first, first]


# ---------------- Refusals


def test_context_may_be_filled_but_no_more(tmp_path):
    model = write_run(tmp_path, max_seq_len=8)
    tokenizer = byte_tokenizer()
    assert len(tokenizer.encode("xyz").ids) == 3
    assert text(model, tokenizer, prompt="xyz", new=5).startswith("xyz")
    with pytest.raises(ValueError, match="3 tokens of prompt and 6 new ones .* max_seq_len 8"):
        text(model, tokenizer, prompt="xyz", new=6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_new_tokens", "64"], "do not fit in max_seq_len 64"),
        (["--max_new_tokens", "0"], "at least 1"),
        (["--temperature", "-0.5"], "temperature -0.5"),
        (["--temperature", "nan"], "temperature nan"),
        (["--top_k", "0"], "top_k 0"),
        (["--device", "abacus"], "device abacus"),
    ],
)
def test_options_are_refused_in_one_sentence(tmp_path, capsys, arguments, words):
    write_run(tmp_path)
    given = ["--prompt", "x", "--max_new_tokens", 8]
    assert words in refused_main(capsys, sample.main, tmp_path, *given, *arguments)


def test_missing_run_is_refused(tmp_path):
    assert "holds no checkpoint" in refused_script("sample.py", tmp_path / "nothing")


def test_tokenizers_that_do_not_fit_are_refused(tmp_path, capsys):
    write_run(tmp_path, vocab_size=200)
    assert "use a tokenizer of at most 200" in refused_main(capsys, sample.main, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused_main(capsys, sample.main, tmp_path)
