"""To Hugging Face's format and back: python -m pytest tests/test_convert.py"""
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import convert
from codes import code_table
from model import ModelConfig, Transformer, load_checkpoint

ROOT = Path(__file__).parent.parent
V = 300


def write_tokenizer(path, special="<|endoftext|>"):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello hello world"], trainer)
    tokenizer.save(str(path))


def write_run(folder, **options):
    """A run of one checkpoint whose logits are well apart from 0."""
    shape = dict(vocab_size=V, d_model=64, n_layers=2, n_heads=4, d_ff=96, max_seq_len=32)
    model = Transformer(ModelConfig(**shape | dict(rope_theta=5000.0, norm_eps=1e-4) | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter)).mul_(3 if parameter.dim() == 2 else 1)
    step = folder / "step_00000003"
    step.mkdir(parents=True)
    save_file(model.state_dict(), step / "model.safetensors")
    (step / "config.json").write_text(json.dumps(dataclasses.asdict(model.config)))
    write_tokenizer(folder / "tokenizer.json")
    return model.eval()


def write_llama(folder, shards="1GB", **options):
    """A LlamaForCausalLM as transformers itself writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(**dict(
        vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=32, rms_norm_eps=1e-4,
        initializer_range=0.1, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    ) | options)
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(folder, max_shard_size=shards)
    write_tokenizer(folder / "tokenizer.json")
    return llama


def edit(folder, name="config.json", **changes):
    path = folder / name
    value = json.loads(path.read_text()) | changes
    kept = {key: item for key, item in value.items() if item is not ...}
    path.write_text(json.dumps(kept))


def assert_same_logits(llama, model):
    ids = torch.randint(1, V, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = llama(ids).logits, model(ids)[0]
    assert ours.std() > 0.1
    assert (theirs - ours).abs().max() <= 1e-4


def refused(*arguments, **environment):
    command = [sys.executable, "convert.py", *map(str, arguments)]
    settings = dict(cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)
    done = subprocess.run(command, **settings)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


INTERFACES = [
    dict(input_layer="learned"),
    dict(input_layer="learned", n_kv_heads=2),
    dict(input_layer="binary16"),
    dict(input_layer="gf2", n_kv_heads=1, code_offset=7),
    dict(input_layer="signs32"),
]


@pytest.mark.parametrize("options", INTERFACES)
def test_transformers_gives_the_same_logits(tmp_path, options):
    model = write_run(tmp_path / "run", **options)
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    assert type(llama) is LlamaForCausalLM and llama.dtype == torch.float32
    assert_same_logits(llama, model)


@pytest.mark.parametrize("options", INTERFACES)
def test_there_and_back_gives_the_same_weights(tmp_path, options):
    model = write_run(tmp_path / "run", **options)
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    convert.from_hf(tmp_path / "hf", tmp_path / "back")
    back = load_checkpoint(tmp_path / "back")
    expected = dataclasses.replace(
        model.config, input_layer="learned", code_offset=0, n_kv_heads=model.config.n_kv_heads or 4
    )
    assert back.config == expected
    state = back.state_dict()
    table = state.pop("input.weight")
    if options["input_layer"] == "learned":
        assert torch.equal(table, model.input.weight)
    else:
        offset = options.get("code_offset", 0)
        code = code_table(options["input_layer"], V, offset=offset)
        assert torch.equal(table, torch.from_numpy(code).repeat(1, 64 // code.shape[1]))
    assert state.keys() == model.state_dict().keys() - {"input.weight"}
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in state.items())


def test_the_exported_folder_is_whole(tmp_path):
    write_run(tmp_path / "run", input_layer="gf2")
    (tmp_path / "hf").mkdir()
    convert.to_hf(tmp_path / "run" / "step_00000003", tmp_path / "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "README.md",
        "tokenizer.json", "tokenizer_config.json",
    }
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["tie_word_embeddings"] is False
    assert "holds no parameters" in (tmp_path / "hf" / "README.md").read_text()
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(weights["model.embed_tokens.weight"].unique().tolist()) == {0.0, 1.0}


def test_the_exported_tokenizer_is_the_same_and_has_its_ends(tmp_path):
    write_run(tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    ours = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = " hello, it 's 12 . é日\n\n  <|endoftext|>x"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(ours.encode(text).ids) == text
    assert theirs.bos_token_id == theirs.eos_token_id == ours.token_to_id("<|endoftext|>") == 0


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    write_run(tmp_path / "run")
    write_llama(tmp_path / "llama")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("mine")
    for way, source in ("to-hf", "run"), ("from-hf", "llama"):
        assert "is not empty" in refused(way, tmp_path / source, tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["note"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "llama", "used"}


def test_a_missing_run_or_separator_is_refused(tmp_path):
    assert "holds no checkpoint" in refused("to-hf", tmp_path / "none", tmp_path / "hf")
    write_run(tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "tokenizer.json", special="<pad>")
    with pytest.raises(ValueError, match=r"has no special token <\|endoftext\|>"):
        convert.to_hf(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("to-hf", tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", ["1GB", "60KB"])
def test_a_llama_of_transformers_is_read(tmp_path, tied, shards):
    llama = write_llama(tmp_path / "llama", shards, tie_word_embeddings=tied)
    assert (tmp_path / "llama" / "model.safetensors").exists() == (shards == "1GB")
    model = convert.load_hf(tmp_path / "llama")
    assert not model.training and model.config.n_kv_heads == 2 and model.config.rope_theta == 5000
    assert_same_logits(llama, model)
    assert torch.equal(model.head.weight, model.input.weight) == tied
    assert model.head.weight.data_ptr() != model.input.weight.data_ptr()
    convert.from_hf(tmp_path / "llama", tmp_path / "run")
    again = load_checkpoint(tmp_path / "run").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


def test_a_run_from_a_llama_is_laid_out_as_any_other(tmp_path):
    write_llama(tmp_path / "llama")
    convert.from_hf(tmp_path / "llama", tmp_path / "run")
    step = tmp_path / "run" / "step_00000000"
    state = json.loads((step / "state.json").read_text())
    assert state["update"] == state["targets"] == 0
    assert (step / "config.json").read_text() == (tmp_path / "run" / "config.json").read_text()
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert tokenizer == (tmp_path / "llama" / "tokenizer.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "llama"}


@pytest.mark.parametrize(
    "changes, theta",
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
    edit(tmp_path, **changes)
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


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(model_type="mistral"), "model_type mistral"),
        (dict(hidden_act="gelu"), "hidden_act gelu"),
        (dict(attention_bias=True), "attention_bias True"),
        (dict(mlp_bias=True), "mlp_bias True"),
        (dict(head_dim=32), "head_dim 32"),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "type linear"),
        (dict(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}), "rope_type llama3"),
        (dict(hidden_size=...), "hidden_size"),
        (dict(num_hidden_layers=1), r"layers.1.input_layernorm.weight as .* \[64\], not None"),
        (dict(num_hidden_layers=3), r"layers.2.input_layernorm.weight as .* None, not \[64\]"),
        (dict(vocab_size=301), r"lm_head.weight as floats has \[300, 64\], .* \[301, 64\]"),
        (dict(tie_word_embeddings=True), r"lm_head.weight as floats has \[300, 64\], .* None"),
        (dict(num_attention_heads=5, head_dim=...), "n_heads"),
        (dict(vocab_size="many"), "fits here"),
    ],
)
def test_configs_that_do_not_fit_are_refused_by_name(tmp_path, changes, said):
    write_llama(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        convert.load_hf(tmp_path)


def test_tensors_are_neither_dropped_nor_invented(tmp_path):
    write_llama(tmp_path, attention_bias=True)
    edit(tmp_path, attention_bias=False)
    with pytest.raises(ValueError, match="self_attn.k_proj.bias as floats has .* None"):
        convert.load_hf(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if not name.endswith("bias")}
    save_file(weights, tmp_path / "model.safetensors")
    convert.load_hf(tmp_path)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight as floats has None"):
        convert.load_hf(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path):
    write_llama(tmp_path / "llama", "60KB")
    index = tmp_path / "llama" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shutil.copy(tmp_path / "llama" / names["lm_head.weight"], tmp_path / "outside.safetensors")
    names["lm_head.weight"] = "../outside.safetensors"
    edit(tmp_path / "llama", index.name, weight_map=names)
    said = refused("from-hf", tmp_path / "llama", tmp_path / "run")
    assert "outside.safetensors" in said
    assert not (tmp_path / "run").exists()


def test_damaged_and_pickled_weights_are_refused(tmp_path):
    write_llama(tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "is no Llama that fits here" in refused("from-hf", tmp_path / "llama", tmp_path / "run")
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "safetensors" in refused("from-hf", tmp_path / "llama", tmp_path / "run")


def test_the_two_formats_are_told_apart(tmp_path):
    write_run(tmp_path / "run")
    write_llama(tmp_path / "llama")
    assert convert.is_hf(tmp_path / "llama")
    assert not convert.is_hf(tmp_path / "run")
    assert not convert.is_hf(tmp_path / "run" / "step_00000003")
    assert not convert.is_hf(tmp_path / "none")


def test_a_repository_is_fetched_without_pickles(tmp_path, monkeypatch):
    write_llama(tmp_path / "llama")
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(tmp_path / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    convert.from_hf(Path("someone/llama"), tmp_path / "run")
    assert asked == [("someone/llama", ["*.json", "model*.safetensors"])]
    assert load_checkpoint(tmp_path / "run").config.vocab_size == V


def test_a_repository_out_of_reach_is_refused(tmp_path):
    offline = dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert refused("from-hf", "someone/llama", tmp_path / "run", **offline)
    assert "a/b/c" in refused("from-hf", "a/b/c", tmp_path / "run", **offline)


def test_a_folder_of_the_users_beside_the_target_is_left_alone(tmp_path):
    write_run(tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "thesis.txt").write_text("precious")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf.partial" / "thesis.txt").read_text() == "precious"
    assert (tmp_path / "hf" / "config.json").is_file()


def test_a_model_without_its_tokenizer_is_no_run(tmp_path):
    write_run(tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "tokenizer.json")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        convert.from_hf(tmp_path / "hf", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("back")] == []
