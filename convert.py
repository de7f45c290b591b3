"""A checkpoint as a stock Hugging Face Llama folder, and the way back.

    python convert.py to-hf out/gf2 hf/gf2
    python convert.py from-hf HuggingFaceTB/SmolLM2-135M out/smollm2-135m

The blocks are Llama's and the rotary layout is Hugging Face's, so only names differ. A fixed code
is written out as an embedding table, and would come back as a learned one.
"""

import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model import ModelConfig, Transformer, load_checkpoint
from nanocodes.checkpoint import find_checkpoint
from nanocodes.command import make_parser, refusals
from nanocodes.files import read_json, write_json
from nanocodes.tokenizer import SEPARATOR, load_tokenizer, tokenizer_path, vocabulary

# ---------------- Names: ours -> Hugging Face's

# The parts of a weight's name that differ.
PARTS = {
    "input": "model.embed_tokens",
    "blocks": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}

FIELDS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}

# What a Llama's config says of the parts that do not vary here.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


def hf_name(name):
    """blocks.3.attention.q_proj.weight -> model.layers.3.self_attn.q_proj.weight"""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


@contextmanager
def new_folder(path):
    """A folder beside `path` for the body to fill; once it is whole, it takes that name.

    Raises ValueError if `path` is in use.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ValueError(f"{path} is not empty; name a new folder")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---------------- To Hugging Face

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SEPARATOR,
    "eos_token": SEPARATOR,
}

README_OF_A_FIXED_CODE = """\
`model.embed_tokens.weight` holds no parameters: it is a view of the fixed code of every
token id, repeated to the model's width, and is not tied to the head.
"""


def hf_config(config, separator):
    """The config.json of the LlamaForCausalLM with this ModelConfig, as a dict."""
    fields = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    others = {
        "bos_token_id": separator,
        "eos_token_id": separator,
        "num_key_value_heads": config.n_kv_heads or config.n_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    }
    return FIXED | fields | others


def hf_state(model):
    """The weights of a Transformer under Llama's names, with the input layer as a table."""
    state = {hf_name(name): weight for name, weight in model.state_dict().items()}
    state["model.embed_tokens.weight"] = model.input.table().detach()  # (V, d_model)
    return state


def to_hf(run, folder):
    """Write the checkpoint of a run or step folder as a LlamaForCausalLM. Raises ValueError."""
    model = load_checkpoint(run)
    tokenizer = tokenizer_path(find_checkpoint(run))
    _, separator = vocabulary(load_tokenizer(tokenizer, model.config.vocab_size))
    ends = {"bos_token_id": separator, "eos_token_id": separator}

    with new_folder(folder) as partial:
        save_file(hf_state(model), partial / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(tokenizer, partial / "tokenizer.json")
        write_json(partial / "config.json", hf_config(model.config, separator))
        write_json(partial / "generation_config.json", ends)
        write_json(partial / "tokenizer_config.json", TOKENIZER_CONFIG)
        if model.config.input_layer != "learned":
            (partial / "README.md").write_text(README_OF_A_FIXED_CODE)


# ---------------- Finding a Hugging Face model


def is_hf(folder):
    """Whether a folder holds a model in Hugging Face's format."""
    config = Path(folder) / "config.json"
    return config.is_file() and "model_type" in read_json(config)


def fetch_hf(repo):
    """The Path of a Hugging Face repository's model, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=["*.json", "model*.safetensors"]))
    except (ValueError, OSError):
        raise ValueError(f"{repo} is no folder, nor can the hub give it; check both") from None


# ---------------- Reading a Hugging Face model


def read_hf_config(folder):
    """The config.json of a Hugging Face folder, with the rotary settings among the others."""
    hf = {"rope_theta": 10_000.0} | read_json(folder / "config.json")
    # Versions of transformers differ in where they write them.
    rotary = (hf.get("rope_parameters") or {}) | (hf.get("rope_scaling") or {})
    return hf | rotary


def refuse_others(hf, expected):
    """Raise ValueError if a config sets one of these keys to another value than expected."""
    others = [f"{key} {hf[key]}" for key in expected if hf.get(key) not in (None, expected[key])]
    if others:
        raise ValueError("it has " + ", ".join(others))


def our_config(hf):
    """The ModelConfig of a Llama's config. Raises ValueError if the model is another one."""
    refuse_others(hf, FIXED | {"rope_type": "default", "type": "default"})
    missing = [theirs for theirs in FIELDS.values() if theirs not in hf]
    if missing:
        raise ValueError("its config.json lacks " + ", ".join(missing))
    config = ModelConfig(**{ours: hf[theirs] for ours, theirs in FIELDS.items()})
    refuse_others(hf, {"head_dim": config.d_model // config.n_heads})
    return config


def weight_files(folder):
    """The .safetensors files of a Hugging Face folder: one, or those that its index names."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = read_json(folder / "model.safetensors.index.json")
    # Only the name of a file counts, so that an index cannot lead out of the folder.
    names = {Path(file).name for file in index["weight_map"].values()}
    return [folder / name for name in sorted(names)]


def open_tensors(files):
    """Name -> tensor on disk, of all tensors in .safetensors files: none is read yet."""
    tensors = {}
    for path in files:
        file = safe_open(path, "pt")
        tensors |= {name: file.get_slice(name) for name in file.keys()}
    return tensors


def check_tensors(tensors, shapes):
    """Raise ValueError unless the tensors of floats have exactly these names and shapes."""
    found = {
        name: tensor.get_shape()
        for name, tensor in tensors.items()
        if tensor.get_dtype() in ("F64", "F32", "F16", "BF16")
    }
    for name in sorted(found | shapes):
        if found.get(name) != shapes.get(name):
            raise ValueError(f"{name} as floats has {found.get(name)}, not {shapes.get(name)}")


def load_hf(folder):
    """The Transformer of a Llama folder, float32, eval mode. Raises ValueError on what differs."""
    try:
        hf = read_hf_config(folder)
        with torch.device("meta"):  # takes no memory before the shapes are compared
            model = Transformer(our_config(hf))
        sources = {name: hf_name(name) for name in model.state_dict()}
        if hf.get("tie_word_embeddings"):
            sources["head.weight"] = sources["input.weight"]
        tensors = open_tensors(weight_files(folder))
        shapes = {sources[name]: list(p.shape) for name, p in model.named_parameters()}
        check_tensors(tensors, shapes)
    except Exception as error:  # there is no end to what a stranger's file may raise
        raise ValueError(f"{folder} is no Llama that fits here ({error}); use another") from None
    # Each weight is a copy of its own, so that a tied head comes apart from the input.
    state = {
        name: tensors[source][:].to(torch.float32, copy=True) for name, source in sources.items()
    }
    model.load_state_dict(state, assign=True)
    return model.eval()


# ---------------- From Hugging Face


def from_hf(source, run):
    """Write a Hugging Face Llama, a folder or a repository, as a run folder. Raises ValueError."""
    folder = source if source.is_dir() else fetch_hf(str(source))
    model = load_hf(folder)
    load_tokenizer(folder / "tokenizer.json", model.config.vocab_size)

    with new_folder(run) as partial:
        step = partial / "step_00000000"
        step.mkdir()
        shutil.copyfile(folder / "tokenizer.json", partial / "tokenizer.json")
        save_file(model.state_dict(), step / "model.safetensors")
        for place in (partial, step):
            write_json(place / "config.json", asdict(model.config))
        write_json(step / "state.json", {"update": 0, "targets": 0})


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("direction", choices=("to-hf", "from-hf"))
    parser.add_argument("source", type=Path, help="a run or step folder; a Llama folder or repo")
    parser.add_argument("target", type=Path, help="a folder, new or empty")
    args = parser.parse_args(argv)

    with refusals(parser):
        convert = to_hf if args.direction == "to-hf" else from_hf
        convert(args.source, args.target.resolve())


if __name__ == "__main__":
    main()
