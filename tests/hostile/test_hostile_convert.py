"""Folders of others that convert.py refuses, and what it leaves alone.

python -m pytest tests/hostile/test_hostile_convert.py
"""

import shutil

import huggingface_hub.constants
import pytest
from helpers import (
    byte_tokenizer,
    edit_json,
    names_in,
    read_json_file,
    refused_main,
    refused_script,
    write_llama,
    write_run,
)
from safetensors.torch import load_file, save_file

import convert

# ---------------- Folders


def test_folder_in_use_is_refused_and_left_alone(tmp_path, capsys):
    write_run(tmp_path / "run")
    write_llama(tmp_path / "llama")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("mine")
    for direction, source in (("to-hf", "run"), ("from-hf", "llama")):
        arguments = [direction, tmp_path / source, tmp_path / "used"]
        assert "is not empty" in refused_main(capsys, convert.main, *arguments)
    assert names_in(tmp_path / "used") == {"note"}
    assert names_in(tmp_path) == {"run", "llama", "used"}


def test_folder_of_the_users_beside_the_target_is_left_alone(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "thesis.txt").write_text("precious")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf.partial" / "thesis.txt").read_text() == "precious"
    assert (tmp_path / "hf" / "config.json").is_file()


def test_missing_run_or_separator_is_refused(tmp_path, capsys):
    error = refused_script("convert.py", "to-hf", tmp_path / "none", tmp_path / "hf")
    assert "holds no checkpoint" in error
    write_run(tmp_path / "run", tokenizer=byte_tokenizer(special=("<pad>",)))
    with pytest.raises(ValueError, match=r"has no special token <\|endoftext\|>"):
        convert.to_hf(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "run" / "tokenizer.json").unlink()
    arguments = ["to-hf", tmp_path / "run", tmp_path / "hf"]
    assert "tokenizer.json" in refused_main(capsys, convert.main, *arguments)
    assert not (tmp_path / "hf").exists()


def test_model_without_its_tokenizer_is_no_run(tmp_path):
    write_run(tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        convert.from_hf(tmp_path / "hf", tmp_path / "back")
    assert names_in(tmp_path) == {"run", "hf"}


def test_repository_out_of_reach_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for repository in ("someone/llama", "a/b/c"):
        arguments = ["from-hf", repository, tmp_path / "run"]
        assert repository in refused_main(capsys, convert.main, *arguments)


# ---------------- Models that do not fit


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
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
def test_config_that_does_not_fit_is_refused_by_name(llama, tmp_path, changes, words):
    folder = shutil.copytree(llama, tmp_path / "llama")
    edit_json(folder / "config.json", changes)
    with pytest.raises(ValueError, match=words):
        convert.load_hf(folder)


def test_tensors_are_neither_dropped_nor_invented(tmp_path):
    write_llama(tmp_path, attention_bias=True)
    edit_json(tmp_path / "config.json", dict(attention_bias=False))
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


def test_index_cannot_lead_out_of_the_folder(tmp_path, capsys):
    write_llama(tmp_path / "llama", max_shard_size="60KB")
    index = tmp_path / "llama" / "model.safetensors.index.json"
    files = read_json_file(index)["weight_map"]
    shutil.copy(tmp_path / "llama" / files["lm_head.weight"], tmp_path / "outside.safetensors")
    files["lm_head.weight"] = "../outside.safetensors"
    edit_json(index, dict(weight_map=files))
    arguments = ["from-hf", tmp_path / "llama", tmp_path / "run"]
    assert "outside.safetensors" in refused_main(capsys, convert.main, *arguments)
    assert not (tmp_path / "run").exists()


def test_damaged_and_pickled_weights_are_refused(llama, tmp_path, capsys):
    folder = shutil.copytree(llama, tmp_path / "llama")
    weights = folder / "model.safetensors"
    arguments = ["from-hf", folder, tmp_path / "run"]
    weights.write_bytes(weights.read_bytes()[:-100])
    error = refused_main(capsys, convert.main, *arguments)
    assert "is no Llama that fits here" in error
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "safetensors" in refused_main(capsys, convert.main, *arguments)
