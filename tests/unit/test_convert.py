"""To Hugging Face's format and back: python -m pytest tests/unit/test_convert.py"""

import dataclasses
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import edit_json, names_in, read_json_file, write_llama, write_run
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import convert
from codes import code_table
from model import load_checkpoint

V = 300
INPUTS = [
    dict(input_layer="learned"),
    dict(input_layer="learned", n_kv_heads=2),
    dict(input_layer="binary16"),
    dict(input_layer="gf2", n_kv_heads=1, code_offset=7),
    dict(input_layer="signs32"),
]


def write_small_run(folder, **changes):
    """A run of one checkpoint whose settings differ from the defaults; returns its model."""
    sizes = dict(d_model=64, n_heads=4, d_ff=96, max_seq_len=32)
    return write_run(folder, **sizes | dict(rope_theta=5000.0, norm_eps=1e-4) | changes)


def assert_same_logits(llama, model):
    ids = torch.randint(1, V, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = llama(ids).logits
        ours = model(ids)[0]
    assert ours.std() > 0.1
    assert (theirs - ours).abs().max() <= 1e-4


# ---------------- To Hugging Face, and there and back


@pytest.mark.parametrize("changes", INPUTS)
def test_transformers_gives_the_same_logits(tmp_path, changes):
    model = write_small_run(tmp_path / "run", **changes)
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    assert type(llama) is LlamaForCausalLM and llama.dtype == torch.float32
    assert_same_logits(llama, model)


@pytest.mark.parametrize("changes", INPUTS)
def test_there_and_back_gives_the_same_weights(tmp_path, changes):
    model = write_small_run(tmp_path / "run", **changes)
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    convert.from_hf(tmp_path / "hf", tmp_path / "back")
    back = load_checkpoint(tmp_path / "back")
    n_kv_heads = model.config.n_kv_heads or 4
    changed = dict(input_layer="learned", code_offset=0, n_kv_heads=n_kv_heads)
    assert back.config == dataclasses.replace(model.config, **changed)
    state = back.state_dict()
    table = state.pop("input.weight")
    if changes["input_layer"] == "learned":
        assert torch.equal(table, model.input.weight)
    else:
        offset = changes.get("code_offset", 0)
        code = code_table(changes["input_layer"], V, offset=offset)
        assert torch.equal(table, torch.from_numpy(code).repeat(1, 64 // code.shape[1]))
    assert state.keys() == model.state_dict().keys() - {"input.weight"}
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in state.items())


def test_exported_folder_is_complete(tmp_path):
    write_small_run(tmp_path / "run", input_layer="gf2")
    (tmp_path / "hf").mkdir()
    convert.to_hf(tmp_path / "run" / "step_00000003", tmp_path / "hf")
    assert names_in(tmp_path) == {"run", "hf"}
    assert names_in(tmp_path / "hf") == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_json_file(tmp_path / "hf" / "config.json")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["tie_word_embeddings"] is False
    assert "holds no parameters" in (tmp_path / "hf" / "README.md").read_text()
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(weights["model.embed_tokens.weight"].unique().tolist()) == {0.0, 1.0}


def test_exported_tokenizer_is_the_same_and_has_its_ends(tmp_path):
    write_small_run(tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    ours = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = " hello, it 's 12 . é日\n\n  <|endoftext|>x"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(ours.encode(text).ids) == text
    assert theirs.bos_token_id == theirs.eos_token_id == ours.token_to_id("<|endoftext|>") == 0


# ---------------- From Hugging Face


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_llama_of_transformers_is_read(tmp_path, tied, max_shard_size):
    llama = write_llama(tmp_path / "llama", max_shard_size, tie_word_embeddings=tied)
    assert (tmp_path / "llama" / "model.safetensors").exists() == (max_shard_size == "1GB")
    model = convert.load_hf(tmp_path / "llama")
    assert not model.training and model.config.n_kv_heads == 2 and model.config.rope_theta == 5000
    assert_same_logits(llama, model)
    assert torch.equal(model.head.weight, model.input.weight) == tied
    assert model.head.weight.data_ptr() != model.input.weight.data_ptr()
    convert.from_hf(tmp_path / "llama", tmp_path / "run")
    again = load_checkpoint(tmp_path / "run").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


def test_run_from_a_llama_is_laid_out_as_any_other(tmp_path):
    write_llama(tmp_path / "llama")
    convert.from_hf(tmp_path / "llama", tmp_path / "run")
    step = tmp_path / "run" / "step_00000000"
    state = read_json_file(step / "state.json")
    assert state["update"] == state["targets"] == 0
    assert (step / "config.json").read_text() == (tmp_path / "run" / "config.json").read_text()
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert tokenizer == (tmp_path / "llama" / "tokenizer.json").read_bytes()
    assert names_in(tmp_path) == {"run", "llama"}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        (dict(rope_parameters=..., rope_theta=700.0), 700),
        (dict(rope_parameters=..., rope_theta=700.0, rope_scaling=None), 700),
        (dict(rope_parameters=..., rope_theta=700.0, rope_scaling={"type": "default"}), 700),
        (dict(rope_parameters={"rope_theta": 700.0}, rope_theta=...), 700),
        (dict(rope_parameters={"rope_theta": 700.0}, rope_theta=900.0), 700),
        (dict(rope_parameters=..., rope_theta=...), 10_000),
    ],
)
def test_theta_is_found_where_transformers_finds_it(tmp_path, changes, theta):
    write_llama(tmp_path)
    edit_json(tmp_path / "config.json", changes)
    model = convert.load_hf(tmp_path)
    assert model.config.rope_theta == theta
    assert_same_logits(LlamaForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(tmp_path, dtype):
    llama = write_llama(tmp_path)
    llama.to(dtype).save_pretrained(tmp_path)
    model = convert.load_hf(tmp_path)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.head.weight, llama.lm_head.weight.float())


def test_the_two_formats_are_told_apart(tmp_path):
    write_small_run(tmp_path / "run")
    write_llama(tmp_path / "llama")
    assert convert.is_hf(tmp_path / "llama")
    assert not convert.is_hf(tmp_path / "run")
    assert not convert.is_hf(tmp_path / "run" / "step_00000003")
    assert not convert.is_hf(tmp_path / "none")


def test_repository_is_fetched_without_pickles(tmp_path, monkeypatch):
    write_llama(tmp_path / "llama")
    requested = []

    def snapshot_download(repo, allow_patterns):
        requested.append((repo, allow_patterns))
        return str(tmp_path / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    convert.from_hf(Path("someone/llama"), tmp_path / "run")
    assert requested == [("someone/llama", ["*.json", "model*.safetensors"])]
    assert load_checkpoint(tmp_path / "run").config.vocab_size == V
