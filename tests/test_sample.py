"""Text from a checkpoint: python -m pytest tests/test_sample.py"""
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import sample
from model import ModelConfig, Transformer

ROOT = Path(__file__).parent.parent
EMOJI = "\N{PARTY POPPER}"


def byte_tokenizer(special=("<|endoftext|>",), text="hello world, def main():"):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    return tokenizer


def write_run(folder, tokenizer=None, **options):
    shape = dict(vocab_size=300, d_model=32, n_layers=2, n_heads=2, d_ff=48, max_seq_len=64)
    model = Transformer(ModelConfig(**shape | options))
    step = folder / "step_00000003"
    step.mkdir(parents=True)
    save_file(model.state_dict(), step / "model.safetensors")
    (step / "config.json").write_text(json.dumps(dataclasses.asdict(model.config)))
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    return model.eval()


def text(model, tokenizer, prompt="def", new=20, temperature=0.8, top_k=200, seed=1):
    return "".join(sample.stream_text(model, tokenizer, prompt, new, temperature, top_k, seed))


class Script:
    """A stand-in for the Transformer that generates given ids."""

    def __init__(self, ids):
        self.ids, self.config, self.head = ids, ModelConfig(max_seq_len=64), torch.nn.Linear(1, 1)

    def generate(self, prompt_ids, max_new_tokens, *rest):
        self.prompt_ids = prompt_ids.tolist()
        yield from (torch.tensor([i]) for i in self.ids[:max_new_tokens])


def run_cli(*arguments):
    command = [sys.executable, "sample.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_greedy_text_is_that_of_generate(tmp_path):
    model, tokenizer = write_run(tmp_path), byte_tokenizer()
    ids = torch.tensor([tokenizer.encode("def main").ids])
    chosen = [i.item() for i in model.generate(ids, 20, temperature=0)]
    assert 0 not in chosen
    whole = tokenizer.decode(chosen, skip_special_tokens=False)
    done = run_cli(tmp_path, "--prompt", "def main", "--temperature", 0, "--max_new_tokens", 20)
    assert done.returncode == 0 and done.stderr == ""
    streamed = done.stdout.removeprefix("def main").removesuffix("\n")
    assert whole.startswith(streamed) and len(streamed) > 5
    assert set(whole[len(streamed):]) <= {"\N{REPLACEMENT CHARACTER}"}


def test_a_seed_decides_the_text(tmp_path):
    model, tokenizer = write_run(tmp_path), byte_tokenizer()
    assert text(model, tokenizer, seed=1) == text(model, tokenizer, seed=1)
    assert text(model, tokenizer, seed=1) != text(model, tokenizer, seed=2)
    assert text(model, tokenizer, top_k=1, seed=1) == text(model, tokenizer, temperature=0, seed=2)


def test_characters_of_several_tokens_come_out_whole():
    tokenizer = byte_tokenizer()
    said = f"é {EMOJI} 日本 hello"
    ids = tokenizer.encode(said).ids
    assert len(ids) > len(said)
    pieces = list(sample.stream_text(Script(ids), tokenizer, "日", 60, 0, 1, 0))
    assert pieces[0] == "日" and len(pieces) == len(ids) + 1
    assert "".join(pieces[1:]) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_unfinished_last_character_is_left_out():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ab" + EMOJI).ids
    assert text(Script(ids[:-1]), tokenizer, prompt="") == "ab"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows():
    tokenizer = byte_tokenizer()
    broken = tokenizer.encode(EMOJI).ids[:1] + tokenizer.encode("go on").ids
    assert text(Script(broken), tokenizer, prompt="") == "\N{REPLACEMENT CHARACTER}go on"


def test_the_text_ends_at_the_separator():
    tokenizer = byte_tokenizer(special=("<pad>", "<|endoftext|>"))
    a, b = tokenizer.encode("ab").ids
    assert text(Script([a, 1, b]), tokenizer, prompt="") == "a"
    assert text(Script([a, 0, b]), tokenizer, prompt="") == "a<pad>b"


def test_an_empty_prompt_starts_from_the_separator():
    tokenizer, model = byte_tokenizer(special=("<pad>", "<|endoftext|>")), Script([])
    assert text(model, tokenizer, prompt="") == "" and model.prompt_ids == [[1]]
    assert text(model, tokenizer, prompt="d") == "d" and model.prompt_ids != [[1]]


def test_the_context_may_be_filled_but_no_more(tmp_path):
    model, tokenizer = write_run(tmp_path, max_seq_len=8), byte_tokenizer()
    assert len(tokenizer.encode("xyz").ids) == 3
    assert text(model, tokenizer, prompt="xyz", new=5).startswith("xyz")
    with pytest.raises(ValueError, match="3 tokens of prompt and 6 new ones .* max_seq_len 8"):
        text(model, tokenizer, prompt="xyz", new=6)


def test_a_step_folder_is_enough_with_its_own_or_its_run_s_tokenizer(tmp_path, capsys):
    write_run(tmp_path)
    step = tmp_path / "step_00000003"
    arguments = ["--prompt", "def", "--max_new_tokens", "3"]
    sample.main([str(step), *arguments])
    (tmp_path / "tokenizer.json").rename(step / "tokenizer.json")
    sample.main([str(step), *arguments])
    sample.main([str(tmp_path), *arguments])
    first, *others = capsys.readouterr().out.split("def")[1:]
    assert others == [first, first]


def refused(*arguments):
    done = run_cli(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--max_new_tokens", "64"], "do not fit in max_seq_len 64"),
        (["--max_new_tokens", "0"], "at least 1"),
        (["--temperature", "-0.5"], "temperature -0.5"),
        (["--temperature", "nan"], "temperature nan"),
        (["--top_k", "0"], "top_k 0"),
        (["--device", "abacus"], "device abacus"),
    ],
)
def test_options_are_refused_in_one_sentence(tmp_path, arguments, said):
    write_run(tmp_path)
    assert said in refused(tmp_path, "--prompt", "x", "--max_new_tokens", 8, *arguments)


def test_a_missing_run_is_refused(tmp_path):
    assert "holds no checkpoint" in refused(tmp_path / "nothing")


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    write_run(tmp_path, vocab_size=200)
    assert "use a tokenizer of at most 200" in refused(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(tmp_path)
