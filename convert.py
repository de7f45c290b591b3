"""A checkpoint as a stock Hugging Face Llama folder, and the way back.

    python convert.py to-hf out/gf2 hf/gf2
    python convert.py from-hf HuggingFaceTB/SmolLM2-135M out/smollm2-135m

The blocks are Llama's and the rotary layout is Hugging Face's, so only names differ. A fixed code
is written out as an embedding table, and would come back as a learned one.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from device import refusals
from model import ModelConfig, Transformer, find_checkpoint, load_checkpoint
from shards import read_json, write_json
from tokenizer import SEPARATOR, load_tokenizer, tokenizer_path, vocabulary

# Ours: Hugging Face's, for the parts of a weight's name that differ, and for the config.
PARTS = {"input": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm",
         "head": "lm_head", "attention": "self_attn", "attention_norm": "input_layernorm",
         "mlp_norm": "post_attention_layernorm"}
FIELDS = {"vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings",
          "d_model": "hidden_size", "d_ff": "intermediate_size", "n_layers": "num_hidden_layers",
          "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
          "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta"}
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
         "quantization_config": None, "partial_rotary_factor": 1.0}
FLOATS = ("F64", "F32", "F16", "BF16")
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast",
             "bos_token": SEPARATOR, "eos_token": SEPARATOR}
VIEW = """`model.embed_tokens.weight` holds no parameters: it is a view of the fixed code of every
token id, repeated to the model's width, and is not tied to the head.\n"""


def hf_name(name):
    """blocks.3.attention.q_proj.weight -> model.layers.3.self_attn.q_proj.weight"""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


def partial_folder(path):
    """A new folder beside `path`, to take its name when whole. ValueError if `path` is in use."""
    if path.is_file() or path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; name a new folder")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    return partial


def to_hf(run, folder):
    """Write the checkpoint of a run or step folder as a LlamaForCausalLM. Raises ValueError."""
    model, step = load_checkpoint(run), find_checkpoint(run)
    config, tokenizer = model.config, tokenizer_path(step)
    _, separator = vocabulary(load_tokenizer(tokenizer, config.vocab_size))
    ids = {"bos_token_id": separator, "eos_token_id": separator}
    hf = FIXED | {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()} | ids
    hf["num_key_value_heads"] = config.n_kv_heads or config.n_heads
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    hf |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    state = {hf_name(name): weight for name, weight in model.state_dict().items()}
    state["model.embed_tokens.weight"] = model.input.weight.detach().repeat(1, model.input.tiles)
    partial = partial_folder(folder)
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer, partial / "tokenizer.json")
    for name, value in ("config", hf), ("generation_config", ids), ("tokenizer_config", TOKENIZER):
        write_json(partial / f"{name}.json", value)
    if config.input_layer != "learned":
        (partial / "README.md").write_text(VIEW)
    partial.replace(folder)


def is_hf(folder):
    """Whether a folder holds a model in Hugging Face's format."""
    return (config := Path(folder) / "config.json").is_file() and "model_type" in read_json(config)


def fetch_hf(repo):
    """The Path of a Hugging Face repository's model, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(repo, allow_patterns=["*.json", "model*.safetensors"]))
    except (ValueError, OSError):
        raise ValueError(f"{repo} is no folder, nor can the hub give it; check both") from None


def load_hf(folder):
    """The Transformer of a Llama folder, float32, eval mode. Raises ValueError on what differs."""
    try:
        hf = {"rope_theta": 10_000.0} | read_json(folder / "config.json")
        hf |= (hf.get("rope_parameters") or {}) | (hf.get("rope_scaling") or {})
        head_dim = hf["hidden_size"] // max(hf["num_attention_heads"], 1)
        fixed = FIXED | {"rope_type": "default", "type": "default", "head_dim": head_dim}
        if refused := [key for key in fixed if hf.get(key) not in (None, fixed[key])]:
            raise ValueError("it has " + ", ".join(f"{key} {hf[key]}" for key in refused))
        with torch.device("meta"):
            model = Transformer(ModelConfig(**{ours: hf[FIELDS[ours]] for ours in FIELDS}))
        sources = {name: hf_name(name) for name in model.state_dict()}
        if hf.get("tie_word_embeddings"):
            sources["head.weight"] = sources["input.weight"]  # copied below, so they come apart
        files = ["model.safetensors"]
        if not (folder / files[0]).is_file():
            files = read_json(folder / "model.safetensors.index.json")["weight_map"].values()
        # Only names count, so that an index cannot lead out of the folder.
        opened = [safe_open(folder / Path(file).name, "pt") for file in sorted(set(files))]
        slices = {name: file.get_slice(name) for file in opened for name in file.keys()}
        due = {sources[name]: list(p.shape) for name, p in model.named_parameters()}
        have = {name: s.get_shape() for name, s in slices.items() if s.get_dtype() in FLOATS}
        for name in sorted(have | due):
            if have.get(name) != due.get(name):
                raise ValueError(f"{name} as floats has {have.get(name)}, not {due.get(name)}")
    except Exception as error:  # what a stranger's file may raise has no end
        raise ValueError(f"{folder} is no Llama that fits here ({error}); use another") from None
    state = {name: slices[sources[name]][:].to(torch.float32, copy=True) for name in sources}
    model.load_state_dict(state, assign=True)
    return model.eval()


def from_hf(source, run):
    """Write a Hugging Face Llama, a folder or a repository, as a run folder. Raises ValueError."""
    folder = source if source.is_dir() else fetch_hf(str(source))
    model = load_hf(folder)
    load_tokenizer(folder / "tokenizer.json", model.config.vocab_size)
    partial = partial_folder(run)
    (step := partial / "step_00000000").mkdir()
    shutil.copyfile(folder / "tokenizer.json", partial / "tokenizer.json")
    save_file(model.state_dict(), step / "model.safetensors")
    for place in (partial, step):
        write_json(place / "config.json", vars(model.config))
    write_json(step / "state.json", {"update": 0, "targets": 0})
    partial.replace(run)


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("way", choices=("to-hf", "from-hf"))
    parser.add_argument("source", type=Path, help="a run or step folder; a Llama folder or repo")
    parser.add_argument("target", type=Path, help="a folder, new or empty")
    args = parser.parse_args(argv)
    with refusals(parser):
        (to_hf if args.way == "to-hf" else from_hf)(args.source, args.target.resolve())


if __name__ == "__main__":
    main()
