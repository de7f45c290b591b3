"""What several test files share, each thing once: tokenizers, data and run folders, refusals,
scripts and ranks. Changes to files, for the tests that read strangers' files, are in fuzzing.py.
"""

import hashlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
SEPARATOR = "<|endoftext|>"

# ---------------- Sizes

# A model that computes in a millisecond, as keyword arguments of ModelConfig.
TINY_MODEL = dict(vocab_size=300, d_model=32, n_layers=2, n_heads=2, d_ff=48, max_seq_len=64)

# A run of eight updates, as keyword arguments of train.py's Config; it lacks data and out_dir.
TINY_RUN = dict(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=2,
    d_ff=64,
    max_seq_len=16,
    max_updates=8,
    targets_per_update=4 * 16,
    micro_batch=2,
    lr=1e-2,
    min_lr=1e-3,
    warmup_updates=2,
    eval_interval=4,
    save_interval=3,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)


def tiny_config(**changes):
    """The ModelConfig of TINY_MODEL with changes."""
    from model import ModelConfig

    return ModelConfig(**TINY_MODEL | changes)


def as_options(config):
    """The fields of a config as a command line's --key=value."""
    values = asdict(config).items()
    return [f"--{name}={'none' if value is None else value}" for name, value in values]


# ---------------- Models


def lively(model, seed=0, gain=1.0):
    """Redraw all weights, large enough that every part shows in the logits; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, gain / parameter.shape[1] ** 0.5, generator=generator)
    return model


def random_ids(*shape, vocab_size, seed=0, least=1):
    """Ids from `least` up, int64 of this shape; by default without the separator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, vocab_size, shape, generator=generator)


def assert_close(actual, expected, tolerance):
    """Assert that tensors agree to a tolerance, both relative and absolute."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same(one, other):
    """Assert that two dicts of tensors and plain values are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


# ---------------- Tokenizers


def byte_tokenizer(special=(SEPARATOR,)):
    """A byte-level BPE of 258 ids and the special tokens, which come first; it merges "the"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *letters, "th", "the"]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


# A text to train a BPE on: digits, contractions, blanks of all kinds, several scripts.
TEXT = (
    "The 3 cats' 12 mice weren't  there in 2024; they'll   come\n\n    def f(x):\n\treturn x\n" * 5
    + "naïve café 漢字かな 🐈‍⬛ ½ ٣ \u3000 \x85 — “quoted”\r\n"
)


def trained_tokenizer(digits=True, every_byte=True, size=400, **options):
    """A BPE trained on TEXT, of SmolLM2's family or, without `digits`, of GPT-2's. Without
    `every_byte` it knows only the bytes of TEXT."""
    tokenizer = Tokenizer(models.BPE(**options))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    apart = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR, "<|im_start|>"],
        initial_alphabet=byte_level.alphabet() if every_byte else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def edited_tokenizer(edit, **options):
    """A trained_tokenizer whose tokenizer.json is changed by `edit(spec)`."""
    spec = json.loads(trained_tokenizer(**options).to_str())
    edit(spec)
    return Tokenizer.from_str(json.dumps(spec))


# ---------------- Data folders


def write_documents(path, texts):
    """A .jsonl of documents, one a row; returns its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_data(
    folder, train, val=((3, 0),), *, vocab_size=300, tokenizer="{}", bytes_per_token=3, **meta
):
    """A data folder as prepare.py writes it; returns its path.

    `train` and `val` are lists of shards, each a row of ids. `meta` lies over meta.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    splits = {}
    for split, shards in {"train": train, "val": val}.items():
        entries = []
        for number, ids in enumerate(shards):
            data = np.asarray(ids).astype("<u2").tobytes()
            name = f"{split}_{number:05d}.bin"
            (folder / name).write_bytes(data)
            entry = {"file": name, "tokens": len(ids), "max_id": int(max(ids))}
            entries.append(entry | {"sha256": hashlib.sha256(data).hexdigest()})
        tokens = sum(len(ids) for ids in shards)
        counts = {"documents": 1, "tokens": tokens, "bytes": bytes_per_token * tokens}
        splits[split] = counts | {"shards": entries}
    values = {
        "vocab_size": vocab_size,
        "separator": 0,
        "tokenizer": "bpe:300",
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "sources": [{"source": "stdlib", "share": 1.0}],
        "splits": splits,
    }
    edit_json(folder / "meta.json", values | meta)
    return folder


def write_random_data(folder, train_tokens, val_tokens, *, vocab_size=300, seed=0, **options):
    """A data folder of two shards of random ids; options are those of write_data."""
    generator = np.random.default_rng(seed)
    train = generator.integers(0, vocab_size, train_tokens)
    val = generator.integers(0, vocab_size, val_tokens)
    return write_data(folder, [train], [val], vocab_size=vocab_size, **options)


def verify_data(folder):
    """Compare every sha256 of a data folder. Raises ValueError."""
    from nanocodes.shards import SPLITS, open_shards

    for split in SPLITS:
        open_shards(folder, split, verify=True)


# ---------------- JSON files


def read_json_file(path):
    """The value in a JSON file, read without the project's own reader."""
    return json.loads(Path(path).read_text())


def edit_json(path, changes):
    """Lay changes over a JSON object's file, made if need be; a value of ... drops its key."""
    before = read_json_file(path) if path.exists() else {}
    after = {key: value for key, value in (before | changes).items() if value is not ...}
    path.write_text(json.dumps(after))


# ---------------- Run folders


def write_run(folder, tokenizer=None, update=3, data="", metrics=(), **changes):
    """A run of one checkpoint with lively weights, as train.py writes it; returns its model.

    `changes` are over TINY_MODEL, `metrics` the lines of metrics.jsonl.
    """
    from model import Transformer

    model = lively(Transformer(tiny_config(**changes)))
    step = folder / f"step_{update:08d}"
    step.mkdir(parents=True)
    save_file(model.state_dict(), step / "model.safetensors")
    for place in (folder, step):
        edit_json(place / "config.json", asdict(model.config) | {"data": str(data)})
    edit_json(step / "state.json", {"update": update, "targets": 64 * update})
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    if metrics:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    return model.eval()


def read_state(step):
    """All that a step folder holds of the training, flat: name -> tensor or plain value."""
    training = torch.load(step / "training_state.pt", weights_only=True)
    weights = load_file(step / "model.safetensors")
    state = {f"weight {name}": value for name, value in weights.items()}
    for number, values in training["state"].items():
        state |= {f"{number} {name}": value for name, value in values.items()}
    return state | {"groups": repr(training["param_groups"])}


def timeless_metrics(run):
    """The lines of a run's metrics.jsonl as dicts, less what depends on the clock."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in m.items() if k not in ("targets_per_s", "mfu")} for m in lines]


# ---------------- Refusals


def refused(action, *words):
    """Assert that action() raises a ValueError of one sentence with these words; returns it."""
    with pytest.raises(ValueError) as caught:
        action()
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence
    for word in words:
        assert str(word) in sentence
    return sentence


def refused_main(capsys, main, *arguments):
    """Assert that a script's main refuses its arguments: exit status 2, one sentence on stderr.
    Returns the sentence."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and error.endswith("\n") and "Traceback" not in error
    return error


# ---------------- Scripts and ranks as processes of their own


def run_script(*arguments, ranks=0, timeout=120, **environment):
    """Run a script of the project to its end, under torchrun if ranks > 0. Returns what
    subprocess.run returns, with text in stdout and stderr."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def refused_script(*arguments, **environment):
    """Assert that a script refuses its arguments in one sentence on stderr; returns it."""
    ran = run_script(*arguments, **environment)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr
    return ran.stderr


# One process imports torch for all that tests start by it: it forks them when asked.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train", "pytest", "hypothesis", "matplotlib.figure"])


def as_rank(rank, world, port, log, function, *arguments):
    """In a process of its own: be one rank of torchrun, with stdout and stderr in files."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for number, name in ((1, log + ".out"), (2, log)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    finally:
        if dist.is_initialized():
            print("the process group was not destroyed", file=sys.stderr)


def run_ranks(world, folder, function, *arguments):
    """Run function(*arguments) on so many ranks to their end; returns their exit statuses and
    what each wrote to stderr. The function is one at a module's top level; it joins the ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = [folder / f"rank_{rank}_of_{world}" for rank in range(world)]
    ranks = [
        processes.Process(target=as_rank, args=(rank, world, port, str(log), function, *arguments))
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    exit_statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return exit_statuses, [log.read_text() for log in logs]


# ---------------- Folders of others


def names_in(folder):
    """The names of the files and folders in a folder."""
    return {path.name for path in folder.iterdir()}


def write_llama(folder, max_shard_size="1GB", **changes):
    """A LlamaForCausalLM as transformers itself writes it, with a tokenizer; returns the model."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would lie among what a script writes to stderr
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=32,
        rms_norm_eps=1e-4,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    llama = LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()
    llama.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return llama
