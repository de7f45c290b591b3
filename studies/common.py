"""What several studies share: a training loop, intervals over seeds, run records and options.

A study trains models at several seeds. Each finished run is one JSON file, its *record*, in a
folder runs/, and is not made again; reports are made from all records. Importing this module runs
nothing. Each study puts the project's root on sys.path before it imports from here.
"""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from codes import SIGNS_WIDTHS
from nanocodes.command import make_parser
from nanocodes.files import read_json, sha256, write_json, write_whole
from nanocodes.shards import open_shards, read_meta
from train import MAY_CHANGE, Config, accumulate_gradients, learning_rate, make_optimizer

ROOT = Path(__file__).resolve().parent.parent  # of the project

# ---------------- Configs

CPU_SIZE = {
    "d_model": 128,
    "n_layers": 4,
    "n_heads": 4,
    "d_ff": 512,
    "max_seq_len": 256,
    "max_updates": 512,
    "targets_per_update": 4096,
    "micro_batch": 16,
    "lr": 2e-3,
    "warmup_updates": 40,
    "eval_windows": 0,  # of the loss at the end; 0 means all
}
SMOKE_CHANGES = {
    "d_model": 64,
    "n_layers": 2,
    "d_ff": 192,
    "max_seq_len": 64,
    "max_updates": 8,
    "targets_per_update": 1024,
    "warmup_updates": 2,
    "eval_windows": 64,
}
GPU_CHANGES = {
    "d_model": 512,
    "n_layers": 8,
    "n_heads": 8,
    "d_ff": 2048,
    "max_seq_len": 512,
    "max_updates": 256,
    "targets_per_update": 32_768,
    "micro_batch": 64,
    "lr": 1e-3,
}
# What geometry.py and formation.py change of train.py's defaults.
SIZES = {
    "smoke": CPU_SIZE | SMOKE_CHANGES,
    "cpu": CPU_SIZE,
    "cpu-wide": CPU_SIZE | {"d_model": 256, "d_ff": 1024, "lr": 1e-3},
    "gpu": CPU_SIZE | GPU_CHANGES,
}


def interfaces(d_model):
    """The names of the paper's three input layers, and of the widest signs that fit d_model."""
    widths = [width for width in SIGNS_WIDTHS if d_model % width == 0]
    return ["learned", "binary16", "gf2", f"signs{max(widths)}"]


def dtype_name(dtype):
    """torch.bfloat16 -> "bfloat16", as a config has it."""
    return str(dtype).removeprefix("torch.")


def make_config(values, data, dtype, **changes):
    """The Config of these values, a dict, and of changes over them, on a data folder.

    Its vocab_size is that of the data, and min_lr is a tenth of lr.
    """
    values = values | {"data": str(data), "vocab_size": read_meta(data)["vocab_size"]} | changes
    return Config(**values, min_lr=values["lr"] / 10, dtype=dtype_name(dtype))


def seeds_of(seed):
    """The fields of a Config in which the runs of two seeds differ."""
    # Ten apart, since a table is drawn from init_seed + 1.
    return {"seed": seed, "init_seed": 10 * seed}


def setting_of(config, varied):
    """All that decides a run but the fields in `varied`: those of the Config that a resume must
    not change, and the sha256 of the data. A dict, as records hold it."""
    setting = {
        name: value
        for name, value in asdict(config).items()
        if name not in MAY_CHANGE and name not in varied
    }
    return setting | {"data_sha256": sha256(Path(config.data) / "meta.json")}


# ---------------- Training


def fit(model, config, dtype):
    """Train a Transformer in place, as train.py does on one rank, with products of this dtype;
    yields the number of updates made, after each.

    Raises ValueError where the loss or the gradient is not finite.
    """
    data = open_shards(config.data, "train")
    optimizer = make_optimizer(model, config)
    torch.compiler.reset()  # else it would stop compiling after some models
    compiled = torch.compile(model) if config.compile else model
    for update in range(config.max_updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, update)
        loss = accumulate_gradients(compiled, data, config, update, rank=0, world=1, dtype=dtype)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        if not math.isfinite(loss + norm):
            raise ValueError(f"update {update + 1} has loss {loss} and norm {norm}; lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield update + 1


# ---------------- Intervals over seeds

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 1 to 9 degrees


def interval(values):
    """The mean of some values, and half the width of its 95 % t-interval, in their unit.

    {"mean": float, "half": float}, as JSON holds it; "half" is None where there is one value.
    """
    n = len(values)
    half = None
    if n > 1:
        t = T_975[min(n - 1, len(T_975)) - 1]  # from 11 values on that of ten: a little too wide
        half = t * float(np.std(values, ddof=1)) / n**0.5
    return {"mean": float(np.mean(values)), "half": half}


def in_words(found, form="+.4f"):
    """An interval as text, such as +0.1237 ± 0.0229. `form` is that of the mean."""
    mean = f"{found['mean']:{form}}"
    if found["half"] is None:
        return mean
    return f"{mean} ± {found['half']:{form.lstrip('+')}}"


# ---------------- Records and results


def check_keys(path, record, keys):
    """Raise ValueError where the record of a finished run lacks one of these keys, a set, which
    a report takes of it."""
    lacking = keys - record.keys()
    if lacking:
        raise ValueError(f"{path} does not hold {min(lacking)}; remove it to make it again")


def read_runs(folder, keys, is_ours, mismatch):
    """The records of all finished runs in a folder, a list of dicts.

    Raises ValueError if one lacks a key in `keys`, a set, or if is_ours(record) is false, where
    `mismatch` says why that is: "of another size or other data".
    """
    records = []
    for path in sorted(Path(folder).glob("*.json")):
        record = read_json(path)
        if not is_ours(record):
            raise ValueError(f"{path} is {mismatch}; choose another --out")
        check_keys(path, record, keys)
        records.append(record)
    return records


def read_runs_of(folder, keys, setting):
    """The records in a folder, all of which must have this setting: see read_runs."""
    return read_runs(
        folder,
        keys,
        is_ours=lambda record: record.get("setting") == setting,
        mismatch="of another size or other data",
    )


def write_results(out, study, values, text):
    """Write what a study found to the folder `out`: values as <study>.json, text as <study>.md."""
    write_json(out / f"{study}.json", values)
    write_whole(out / f"{study}.md", text.encode())


# ---------------- Options


def make_study_parser(doc, sizes):
    """A parser with --size and --out, which output_folder reads."""
    parser = make_parser(doc)
    parser.add_argument("--size", default="smoke", choices=sizes)
    parser.add_argument("--out", metavar="DIR", help="default out/<study>-<size>")
    return parser


def add_seeds_option(parser):
    """Give a parser --seeds, a list of int."""
    parser.add_argument(
        "--seeds",
        nargs="*",
        type=int,
        default=[0, 1, 2],
        help="default 0 1 2; with none it only reports",
    )


def add_redraw_option(parser, study):
    """Give a parser --redraw, for the picture alone."""
    parser.add_argument(
        "--redraw",
        action="store_true",
        help=f"only draw {study}.png, from the {study}.json in --out",
    )


def output_folder(args, study):
    """The folder that --out names, or its default."""
    return Path(args.out or f"out/{study}-{args.size}")
