"""What does the input table cost, and what does a fixed code allow that the table does not?

    python studies/cost.py                a smoke of about a minute
    python studies/cost.py --size cpu     five minutes on two cores with nothing beside
    python studies/cost.py --size gpu     configs/smoke.py and small.py; --size paper takes 120 GB

Counted without running, for three shapes (configs/smoke.py, configs/small.py, the paper's):
parameters, and the bytes that follow. Weights, gradients and AdamW's two moments are float32. A
checkpoint holds weights and moments; ranks exchange the gradients once an update. A fixed code is
in none of these. Memory holds it as float32 (V, K), though its bits would take a 32nd of that.

Measured, for the shapes of a size: a training step and its parts, peak memory, decoding of one row
in float32, a forward pass, and its first norm and projections. Each interface has its own process,
and in each round all take a turn; a ratio is of two turns of one round, and is shown as a median
with its quartiles. binary16 and gf2 compute the same, so that what differs between them is noise.
All codes with a zero code also multiply the residual by a mask after each block, which learned does
not. Steps are train.py's, not compiled, on ids drawn uniformly. `input backward` is from the
gradient's arrival at the input layer until the table's gradient has it; on a GPU learned waits for
the device there, which the codes do not. On a CPU, memory is that of the process, some 0.4 GB of
libraries included.

A size may make fewer targets in an update than the recipe, of fewer and shorter rows. Clipping and
AdamW then weigh more than they should, and attention less. `full update` is computed: forward and
backward as often as the recipe asks, clipping and AdamW once. That still overstates the table,
whose backward pass costs nearly the same for a few rows as for many. What is counted is always of
the whole shape.

Folding: a tiled code c of K numbers meets RMSNorm, of weight w, and then three matrices, stacked
to W. The mean square of the tiles is that of c, so that exactly

    W RMSNorm(tile(c)) = M c / sqrt(mean(c^2) + eps),    M = sum over tiles of W_tile diag(w_tile)

and K numbers in place of d_model are multiplied. M is linear in W, so that this serves in training
too; that is not measured. Unfolded, a fixed input spares a training step no product at all: the
gradient of w needs the same ones as a table's. As q, k and v before rotation depend on the id
alone, a table of V rows can also hold them for inference, whether the input is fixed or learned.
Neither can save more than what this one layer costs. All that is for one machine and batch.
"""

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench
from geometry import check_keys

import shards
from codes import CODES
from device import hold, pick_device, pick_dtype, refusals
from evaluate import COLOURS, table
from model import Transformer
from train import Config, read_config_file

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SHAPES = ("smoke", "small", "paper")
SIZES = {  # the shapes that a size measures, each with its changes
    "smoke": dict(rounds=3, new_tokens=16,
                  shapes={"smoke": dict(micro_batch=4, targets_per_update=1024)}),
    "cpu": dict(rounds=9, new_tokens=64,
                shapes={"smoke": {}, "small": dict(max_seq_len=512, micro_batch=1,
                                                   targets_per_update=1024)}),
    "gpu": dict(rounds=7, new_tokens=64, shapes={"smoke": {}, "small": {}}),
    "paper": dict(rounds=5, new_tokens=64,
                  shapes={"paper": dict(micro_batch=4, targets_per_update=32_768)}),
}  # fmt: skip


def recipe(shape):
    """What a shape changes of train.py's defaults, which are the paper's."""
    return {} if shape == "paper" else read_config_file(CONFIGS / f"{shape}.py")


def interfaces(d_model):
    """The paper's three, and the widest code that fits."""
    widths = [int(name.removeprefix("signs")) for name in CODES if name.startswith("signs")]
    return ["learned", "binary16", "gf2", f"signs{max(K for K in widths if d_model % K == 0)}"]


def count(config):
    """Parameters, bytes, and shares of products, from a model without weights."""
    with torch.device("meta"):
        model = Transformer(config)
    parts, (V, K) = model.parameter_counts(), model.input.weight.shape
    total, fixed = sum(parts.values()), not parts["input"]
    layer = sum(matrix.weight.numel() for matrix in first_projections(model))
    products, code = model.flops_per_target() / 6, fixed * 4 * V * K
    return {
        **parts, "parameters": total, "input's share": parts["input"] / total,
        "checkpoint": 12 * total, "moments": 8 * total, "exchanged": 4 * total,
        "code": code, "state": 16 * total + code,
        "K": K, "layer, of a pass": layer / products,
        "folding saves": layer * (1 - K / config.d_model) / products,
        "all q, k and v": 4 * V * layer // config.d_model,
    }  # fmt: skip


# ---------------- Folding


def first_projections(model):
    """The matrices that make q, k and v in the first block."""
    attention = model.blocks[0].attention
    return attention.q_proj, attention.k_proj, attention.v_proj


def plain_qkv(model, x):
    """q, k and v of the first block before rotation, from its input (..., d_model)."""
    h = model.blocks[0].attention_norm(x)
    return [matrix(h) for matrix in first_projections(model)]


def fold(model):
    """M: the first norm's weight and projections as one matrix on a code, (q + k + v, K)."""
    W = torch.cat([matrix.weight for matrix in first_projections(model)])  # (q + k + v, d_model)
    W = W * model.blocks[0].attention_norm.weight
    return W.unflatten(1, (model.input.tiles, -1)).sum(dim=1)


def folded_qkv(folded, codes, eps):
    """q, k and v side by side (..., q + k + v), from codes (..., K) that are not tiled."""
    return F.linear(F.rms_norm(codes, codes.shape[-1:], eps=eps), folded)


# ---------------- Measuring: makers of turns, as bench.interleave wants them


def make_config(words, args):
    """The config of the interface words[0]; from now on bench knows this shape too."""
    bench.SHAPES[args.shape] = args.values | dict(input_layer=words[0])
    return bench.make_config(args)


def watch(layer, spent, device):
    """Make an input layer add its seconds to spent["input forward"] and ["input backward"]."""

    def add(sign, part):
        bench.wait_for(device)
        spent[part] += sign * time.perf_counter()

    def after_forward(layer, ids, x):
        add(+1, "input forward")
        if x.requires_grad:
            x.register_hook(lambda _: add(-1, "input backward"))

    layer.register_forward_pre_hook(lambda *_: add(-1, "input forward"))
    layer.register_forward_hook(after_forward)
    if isinstance(layer.weight, nn.Parameter):
        layer.weight.register_post_accumulate_grad_hook(lambda _: add(+1, "input backward"))


def training(words, args):
    """A turn is one of bench.training, with the seconds of the input layer."""
    make_config(words, args)
    make_model, device, spent = bench.make_model, pick_device(args.device), {}

    def make_watched(*arguments):
        watch((model := make_model(*arguments)).input, spent, device)
        return model

    with patch.object(bench, "make_model", make_watched):
        turn = bench.training(words, args)

    def watched():
        spent.update({"input forward": 0.0, "input backward": 0.0})
        found = turn()
        torch.cuda.empty_cache()  # for the next program, from the first turn on
        return found | spent

    return watched


def inference(words, args):
    """A turn is the seconds of a forward pass, of three ways to make q, k and v, and of a token."""
    config, device = make_config(words, args), pick_device(args.device)
    dtype, _ = pick_dtype(args.dtype, device)
    model = Transformer(config).to(device).eval().requires_grad_(False)
    shape = 2, config.micro_batch, config.max_seq_len
    ids, targets = torch.randint(1, config.vocab_size, shape, device=device)  # (B, T) each
    x, folded, eps = model.input(ids), fold(model), config.norm_eps
    codes = x[..., : folded.shape[1]]
    every = folded_qkv(folded, model.input.weight, eps).to(dtype)  # (V, q + k + v)
    ways = {  # with the number of calls in a turn
        "plain": (10, lambda: plain_qkv(model, x)),
        "folded": (10, lambda: folded_qkv(folded, codes, eps)),
        "tabulated": (10, lambda: F.embedding(ids, every)),
        "pass": (1, lambda: model.losses(ids, targets)),
    }

    def several(calls, way):
        for _ in range(calls):  # each casts its weights anew, as a forward pass does
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                way()

    def decode():
        return list(model.generate(ids[:1, :1], args.new_tokens, temperature=0))

    def turn():
        found = {name: bench.timed(partial(several, calls, way), device)[0] / calls
                 for name, (calls, way) in ways.items()}  # fmt: skip
        return found | {"token": bench.timed(decode, device)[0] / args.new_tokens}

    return turn


PARTS = {"training": training, "inference": inference}


def measure(shape, part, size):
    """interface -> what its turns measured -> a value for each round."""
    values = recipe(shape) | size["shapes"][shape]
    args = argparse.Namespace(
        shape=shape, values=values, rounds=size["rounds"], new_tokens=size["new_tokens"], steps=1,
        device="auto", dtype="auto", d_ff=None, micro_batch=None)  # fmt: skip
    programs = dict.fromkeys(interfaces(Config(**values).d_model), PARTS[part])
    return {name: {key: turns.tolist() for key, turns in program.items()}
            for name, program in bench.interleave(programs, args).items()}  # fmt: skip


# ---------------- Report


def megabytes(value):
    return f"{np.median(value) / 1e6:,.1f}"


def ms(seconds):
    return f"{1e3 * np.median(seconds):,.2f}"


whole, percent, quartiles = "{:,}".format, "{:.2%}".format, partial(bench.middle, digits=3)
TABLES = {  # what is said -> figure -> how it is written
    "Parameters; megabytes, of which weights, gradients, moments and code are all the state.": {
        **dict.fromkeys(("input", "backbone", "head", "parameters"), whole),
        "input's share": percent,
        **dict.fromkeys(("checkpoint", "moments", "exchanged", "code", "state"), megabytes)},
    "A training step: milliseconds, and megabytes of memory.": {
        **dict.fromkeys(("step / learned", "full update / learned"), quartiles),
        **dict.fromkeys(("step", "input forward", "other forward", "input backward",
                         "other backward", "clip", "AdamW"), ms), "peak memory": megabytes},
    "Milliseconds of a decoded token, of a forward pass without gradients, and of its first norm "
    "and projections, made in three ways; the shares of that pass that the latter two save.": {
        "token / learned": quartiles,
        **dict.fromkeys(("token", "pass", "plain", "folded", "tabulated"), ms),
        **dict.fromkeys(("plain / folded", "saved: folded", "saved: tabulated"), quartiles)},
    "Counted of that layer: its share of the products of a forward pass, and how much of these "
    "folding saves; megabytes of tabulated q, k and v.": {
        "K": whole, "layer, of a pass": percent, "folding saves": percent,
        "all q, k and v": megabytes},
}  # fmt: skip
BARS = ("parameters", "checkpoint", "moments", "state",
        "peak memory", "step", "full update", "token")  # fmt: skip


def summarise(shape, changes, runs):
    """interface -> its figures: counts, and what was measured as arrays, a value for each round.
    runs is part -> what `measure` returned, for the parts that are made."""
    values, found = recipe(shape), {}
    config = Config(**values)
    repeats = config.targets_per_update / Config(**values | changes).targets_per_update
    for name in interfaces(config.d_model):
        found[name] = figures = count(Config(**values | dict(input_layer=name)))
        turns = {part: {key: np.array(turn) for key, turn in made[name].items()}
                 for part, made in runs.items()}  # fmt: skip
        if step := turns.get("training"):
            once = step["clip"] + step["optimizer"]
            figures |= {"step": step["seconds"], "clip": step["clip"], "AdamW": step["optimizer"],
                        "full update": repeats * (step["seconds"] - once) + once,
                        "peak memory": step["peak_bytes"]}  # fmt: skip
            for way in ("forward", "backward"):
                figures[f"input {way}"] = step[f"input {way}"]
                figures[f"other {way}"] = step[way] - step[f"input {way}"]
        if seen := turns.get("inference"):
            figures |= seen | {"plain / folded": seen["plain"] / seen["folded"]}
            for way in ("folded", "tabulated"):
                figures[f"saved: {way}"] = (seen["plain"] - seen[way]) / seen["pass"]
        figures |= {f"{key} / learned": figures[key] / found["learned"][key]
                    for key in BARS if key in figures}  # fmt: skip
    return found


def report(shape, found, changes):
    """The tables of a shape, as Markdown; what is not measured is left out."""
    batch = ", ".join(f"{key} {value:,}" for key, value in changes.items())
    yield f"## {shape}" + (f", measured with {batch}" if batch else "")
    for what, columns in TABLES.items():
        if columns.keys() <= found["learned"].keys():
            rows = [[name, *(write(figures[key]) for key, write in columns.items())]
                    for name, figures in found.items()]  # fmt: skip
            yield f"{what}\n\n{table(['interface', *columns], rows)}"


def draw(shapes, path):
    """A panel a shape: each interface relative to learned, with quartiles where measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(shapes), 4.8), layout="constrained")
    axes = figure.subplots(1, len(shapes), sharey=True)
    for axis, (shape, found) in zip(axes, shapes.items(), strict=True):
        keys = [key for key in BARS if key in found["learned"]]
        for i, (name, figures) in enumerate(found.items()):
            ratios = [np.percentile(figures[f"{key} / learned"], [25, 50, 75]) for key in keys]
            low, middle, high = np.transpose(ratios)
            axis.bar(np.arange(len(keys)) + 0.2 * (i - 1.5), middle, 0.2, color=COLOURS[i],
                     label=name, yerr=[middle - low, high - middle], capsize=2)  # fmt: skip
        axis.set_xticks(range(len(keys)), keys, rotation=45, ha="right")
        axis.set_title(shape)
        axis.grid(True, axis="y", alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
        axis.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    axes[0].set_ylabel("relative to learned")
    figure.savefig(path, dpi=150)


# ---------------- The study


def study(args):
    """Measure what is missing, and write the report. Raises ValueError to refuse."""
    out, size, found = Path(args.out or f"out/cost-{args.size}"), SIZES[args.size], {}
    now, runs, held = bench.circumstances(), {}, hold(out)  # two at once would slow each other
    setting = dict(size=size, machine=now["machine"], torch=now["torch"])
    (out / "runs").mkdir(exist_ok=True)
    for path in sorted((out / "runs").glob("*.json")):
        record = shards.read_json(path)
        if record.get("setting") != setting:
            raise ValueError(f"{path} is of another size or machine; choose another --out")
        check_keys(path, record, {"shape", "part", "turns", "circumstances"})
        runs[record["shape"], record["part"]] = record
    for shape, part in itertools.product(size["shapes"], PARTS):
        if (shape, part) not in runs:
            record = dict(shape=shape, part=part, setting=setting, circumstances=now)
            runs[shape, part] = record | dict(turns=measure(shape, part, size))
            shards.write_json(out / "runs" / f"{shape}-{part}.json", runs[shape, part])
            print(f"{shape}: {part} is measured", flush=True)
    held.close()
    dates = sorted({record["circumstances"]["date"] for record in runs.values()})
    pages = [f"{now['machine']}, torch {now['torch']}, {' and '.join(dates)}."]
    for shape in SHAPES:
        made = {part: runs[shape, part]["turns"] for part in PARTS if (shape, part) in runs}
        changes = size["shapes"].get(shape, {})
        found[shape] = summarise(shape, changes, made)
        pages += report(shape, found[shape], changes)
    text = "\n\n".join(pages) + "\n"
    figures = {shape: {name: {key: np.asarray(value).tolist() for key, value in figures.items()}
                       for name, figures in found[shape].items()} for shape in found}  # fmt: skip
    circumstances = {f"{shape}-{part}": record["circumstances"]
                     for (shape, part), record in runs.items()}  # fmt: skip
    figures = dict(circumstances=circumstances, size=size, shapes=figures)
    shards.write_json(out / "cost.json", figures)
    shards.write_whole(out / "cost.md", text.encode())
    draw(found, out / "cost.png")
    print(f"{text}\nWrote cost.json, cost.md and cost.png to {out}")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--size", default="smoke", choices=SIZES)
    parser.add_argument("--out", metavar="DIR", help="default out/cost-<size>")
    args = parser.parse_args(argv)
    with refusals(parser):
        study(args)


if __name__ == "__main__":
    main()
