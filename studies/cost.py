"""What does the input table cost, and what does a fixed code allow that the table does not?

    python studies/cost.py                a smoke of about a minute
    python studies/cost.py --size cpu     five minutes on two cores with nothing beside
    python studies/cost.py --size gpu     configs/smoke.py and small.py; --size paper takes 120 GB
    python studies/cost.py --size cpu --redraw       only the picture, from the cost.json in --out

Counted without running, for three shapes (configs/smoke.py, configs/small.py, the paper's):
parameters, and the bytes that follow. Weights, gradients and AdamW's two moments are float32. A
checkpoint holds weights and moments; ranks exchange the gradients once an update. A fixed code is
in none of these. It is computed from the ids: what memory holds of it are the numbers of its
matrix, K x 16, and of its offset, float32, whatever V is.

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
gradient of w needs the same ones as a table's, and the code itself is a product of K x 16 for each
id, which the shares of products leave out, as the model's FLOPs do. As q, k and v before rotation
depend on the id alone, a table of V rows can also hold them for inference, whether the input is
fixed or learned. Neither can save more than what this one layer costs. All that is for one machine
and batch.
"""

import itertools
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import Transformer
from nanocodes.command import refusals
from nanocodes.config import read_values
from nanocodes.device import autocast, pick_device, pick_dtype
from nanocodes.files import locked, read_json, write_json
from nanocodes.pictures import GREY, colour_of, new_figure, save_figure
from nanocodes.plan import flops_per_target, parameter_counts
from nanocodes.report import table
from studies.common import (
    ROOT,
    add_redraw_option,
    check_keys,
    interfaces,
    make_study_parser,
    output_folder,
    read_runs,
    write_results,
)
from studies.turns import (
    Program,
    circumstances,
    interleave,
    median_and_quartiles,
    timed,
    training_turn,
    wait_for,
)
from train import Config, make_optimizer

SHAPES = ("smoke", "small", "paper")

# What each size measures: the shapes, each with its changes, in so many rounds.
SIZES = {
    "smoke": {
        "rounds": 3,
        "new_tokens": 16,
        "shapes": {"smoke": {"micro_batch": 4, "targets_per_update": 1024}},
    },
    "cpu": {
        "rounds": 9,
        "new_tokens": 64,
        "shapes": {
            "smoke": {},
            "small": {"max_seq_len": 512, "micro_batch": 1, "targets_per_update": 1024},
        },
    },
    "gpu": {"rounds": 7, "new_tokens": 64, "shapes": {"smoke": {}, "small": {}}},
    "paper": {
        "rounds": 5,
        "new_tokens": 64,
        "shapes": {"paper": {"micro_batch": 4, "targets_per_update": 32_768}},
    },
}


def recipe(shape):
    """What a shape changes of train.py's defaults, which are the paper's, as a dict."""
    if shape == "paper":
        return {}
    return read_values(Config, [ROOT / "configs" / f"{shape}.py"], {})


# ---------------- Folding


def first_projections(model):
    """The matrices that make q, k and v in the first block."""
    attention = model.blocks[0].attention
    return attention.q_proj, attention.k_proj, attention.v_proj


def plain_qkv(model, x):
    """q, k and v of the first block before rotation, from its input (..., d_model)."""
    h = model.blocks[0].attention_norm(x)
    return [projection(h) for projection in first_projections(model)]


def fold(model):
    """M: the first norm's weight and projections as one matrix on a code, (q + k + v, K)."""
    weights = [projection.weight for projection in first_projections(model)]
    W = torch.cat(weights) * model.blocks[0].attention_norm.weight  # (q + k + v, d_model)
    return W.unflatten(1, (model.input.tiles, -1)).sum(dim=1)


def folded_qkv(folded, codes, eps):
    """q, k and v side by side (..., q + k + v), from codes (..., K) that are not tiled."""
    return F.linear(F.rms_norm(codes, codes.shape[-1:], eps=eps), folded)


# ---------------- Counting


def count(config):
    """Parameters, bytes, and shares of products, {figure: number}, of a model without weights."""
    with torch.device("meta"):
        model = Transformer(config)
    counts = parameter_counts(model)
    total = sum(counts.values())
    code_bytes = sum(buffer.nbytes for buffer in model.input.buffers())
    width = config.d_model // model.input.tiles  # K
    layer = sum(projection.weight.numel() for projection in first_projections(model))
    products = flops_per_target(model) / 6  # of a forward pass, for each position
    return {
        **counts,
        "parameters": total,
        "input's share": counts["input"] / total,
        "checkpoint": 12 * total,
        "moments": 8 * total,
        "exchanged": 4 * total,
        "code": code_bytes,
        "state": 16 * total + code_bytes,
        "K": width,
        "layer, of a pass": layer / products,
        "folding saves": layer * (1 - width / config.d_model) / products,
        "all q, k and v": 4 * config.vocab_size * layer // config.d_model,
    }


# ---------------- Measuring


def watch(layer, seconds, device):
    """Make an input layer add its time to seconds["input forward"] and ["input backward"]."""

    def add(sign, part):
        wait_for(device)
        seconds[part] += sign * time.perf_counter()

    def before_forward(layer, inputs):
        add(-1, "input forward")

    def after_forward(layer, inputs, x):
        add(+1, "input forward")
        if x.requires_grad:
            x.register_hook(lambda _: add(-1, "input backward"))

    layer.register_forward_pre_hook(before_forward)
    layer.register_forward_hook(after_forward)
    for parameter in layer.parameters():  # a table's only one; a code has none
        parameter.register_post_accumulate_grad_hook(lambda _: add(+1, "input backward"))


def make_training(config):
    """The function of a turn of training: see training_turn, and the seconds of the input layer."""
    device = pick_device(config.device)
    model = Transformer(config).to(device).train()
    seconds = {}
    watch(model.input, seconds, device)
    take_training_turn = training_turn(model, model, make_optimizer(model, config), config, steps=1)

    def take_turn():
        seconds.update({"input forward": 0.0, "input backward": 0.0})
        measured = take_training_turn()
        torch.cuda.empty_cache()  # for the next program, from the first turn on
        return measured | seconds

    return take_turn


CALLS = {"plain": 10, "folded": 10, "tabulated": 10, "pass": 1}  # of each way in a turn


def make_inference(config, new_tokens):
    """The function of a turn of inference: the seconds of a forward pass, of three ways to make
    q, k and v, and of a decoded token."""
    device = pick_device(config.device)
    dtype, _ = pick_dtype(config.dtype, device)
    model = Transformer(config).to(device).eval().requires_grad_(False)
    shape = (2, config.micro_batch, config.max_seq_len)
    ids, targets = torch.randint(1, config.vocab_size, shape, device=device)  # (B, T) each
    x = model.input(ids)
    folded = fold(model)
    width = folded.shape[1]  # K
    codes = x[..., :width]
    every_code = model.input.table()[:, :width]
    every_qkv = folded_qkv(folded, every_code, config.norm_eps).to(dtype)  # (V, q + k + v)
    ways = {
        "plain": lambda: plain_qkv(model, x),
        "folded": lambda: folded_qkv(folded, codes, config.norm_eps),
        "tabulated": lambda: F.embedding(ids, every_qkv),
        "pass": lambda: model.losses(ids, targets),
    }

    def call_often(name):
        for _ in range(CALLS[name]):
            with autocast(device, dtype):  # casts its weights anew, as a forward pass does
                ways[name]()

    def decode():
        return list(model.generate(ids[:1, :1], new_tokens, temperature=0))

    def take_turn():
        seconds = {}
        for name, calls in CALLS.items():
            seconds[name] = timed(partial(call_often, name), device)[0] / calls
        seconds["token"] = timed(decode, device)[0] / new_tokens
        return seconds

    return take_turn


PARTS = ("training", "inference")  # of what is measured


def measure(shape, part, size):
    """{interface: {what its turns measured: a value for each round}} of a shape at a size."""
    values = recipe(shape) | size["shapes"][shape]
    programs = {}
    for name in interfaces(Config(**values).d_model):
        config = Config(**values | {"input_layer": name, "device": "auto", "dtype": "auto"})
        if part == "training":
            make = partial(make_training, config)
        else:
            make = partial(make_inference, config, size["new_tokens"])
        programs[name] = Program(make)
    measured = interleave(programs, size["rounds"], "auto")
    return {
        name: {key: turns.tolist() for key, turns in program.items()}
        for name, program in measured.items()
    }


# ---------------- Figures: {interface: {figure: a count, or an array of a value for each round}}

# The figures that are also given relative to learned's.
RELATIVE = (
    "parameters",
    "checkpoint",
    "moments",
    "state",
    "peak memory",
    "step",
    "full update",
    "token",
)


def training_figures(turns, repeats):
    """The figures of a training step; a full update has `repeats` times its targets."""
    once = turns["clip"] + turns["optimizer"]
    figures = {
        "step": turns["seconds"],
        "clip": turns["clip"],
        "AdamW": turns["optimizer"],
        "full update": repeats * (turns["seconds"] - once) + once,
        "peak memory": turns["peak_bytes"],
    }
    for way in ("forward", "backward"):
        figures[f"input {way}"] = turns[f"input {way}"]
        figures[f"other {way}"] = turns[way] - turns[f"input {way}"]
    return figures


def inference_figures(turns):
    """The figures of a forward pass and of decoding."""
    figures = turns | {"plain / folded": turns["plain"] / turns["folded"]}
    for way in ("folded", "tabulated"):
        figures[f"saved: {way}"] = (turns["plain"] - turns[way]) / turns["pass"]
    return figures


def as_arrays(turns):
    return {key: np.array(values) for key, values in turns.items()}


def summarise(shape, changes, measured):
    """The figures of each interface. `measured` is {part: what `measure` returned}, for the parts
    that are made, at these changes to the shape."""
    values = recipe(shape)
    config = Config(**values)
    repeats = config.targets_per_update / Config(**values | changes).targets_per_update
    found = {}
    for name in interfaces(config.d_model):
        figures = count(Config(**values | {"input_layer": name}))
        if "training" in measured:
            figures |= training_figures(as_arrays(measured["training"][name]), repeats)
        if "inference" in measured:
            figures |= inference_figures(as_arrays(measured["inference"][name]))
        found[name] = figures
    learned = found["learned"]
    for figures in found.values():
        for key in RELATIVE:
            if key in figures:
                figures[f"{key} / learned"] = figures[key] / learned[key]
    return found


# ---------------- Report


def with_commas(value):
    return f"{value:,}"


def percent(value):
    return f"{value:.2%}"


def megabytes(value):
    """The median of some bytes, in MB."""
    return f"{np.median(value) / 1e6:,.1f}"


def milliseconds(values):
    """The median of some seconds, in ms."""
    return f"{1e3 * np.median(values):,.2f}"


def quartiles(values):
    return median_and_quartiles(values, digits=3)


@dataclass
class Table:
    """A table of the report: a row for each interface."""

    title: str
    columns: dict  # figure -> the function that writes it


TABLES = [
    Table(
        "Parameters; megabytes, of which weights, gradients, moments and code are all the state. "
        "A code is given in bytes: its input layer holds a matrix and an offset, and no table.",
        {
            "input": with_commas,
            "backbone": with_commas,
            "head": with_commas,
            "parameters": with_commas,
            "input's share": percent,
            "checkpoint": megabytes,
            "moments": megabytes,
            "exchanged": megabytes,
            "code": with_commas,
            "state": megabytes,
        },
    ),
    Table(
        "A training step: milliseconds, and megabytes of memory.",
        {
            "step / learned": quartiles,
            "full update / learned": quartiles,
            "step": milliseconds,
            "input forward": milliseconds,
            "other forward": milliseconds,
            "input backward": milliseconds,
            "other backward": milliseconds,
            "clip": milliseconds,
            "AdamW": milliseconds,
            "peak memory": megabytes,
        },
    ),
    Table(
        "Milliseconds of a decoded token, of a forward pass without gradients, and of its first "
        "norm and projections, made in three ways; the shares of that pass that the latter two "
        "save.",
        {
            "token / learned": quartiles,
            "token": milliseconds,
            "pass": milliseconds,
            "plain": milliseconds,
            "folded": milliseconds,
            "tabulated": milliseconds,
            "plain / folded": quartiles,
            "saved: folded": quartiles,
            "saved: tabulated": quartiles,
        },
    ),
    Table(
        "Counted of that layer: its share of the products of a forward pass, and how much of "
        "these folding saves; megabytes of tabulated q, k and v.",
        {
            "K": with_commas,
            "layer, of a pass": percent,
            "folding saves": percent,
            "all q, k and v": megabytes,
        },
    ),
]


def report(shape, found, changes):
    """The tables of a shape, as Markdown; what is not measured is left out."""
    batch = ", ".join(f"{key} {value:,}" for key, value in changes.items())
    yield f"## {shape}" + (f", measured with {batch}" if batch else "")
    for part in TABLES:
        if part.columns.keys() <= found["learned"].keys():
            rows = []
            for name, figures in found.items():
                cells = [write(figures[key]) for key, write in part.columns.items()]
                rows.append([name, *cells])
            yield f"{part.title}\n\n{table(['interface', *part.columns], rows)}"


# ---------------- Picture

BAR_WIDTH = 0.2


def draw(shapes, path):
    """A panel a shape: each interface relative to learned, with quartiles where measured."""
    figure, panels = new_figure(panels=len(shapes), width=5.5, height=5.0)
    for axes, (shape, found) in zip(panels, shapes.items(), strict=True):
        draw_shape(axes, found)
        axes.set_title(shape)
    panels[0].set_ylabel("relative to learned")
    highest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, 1.1 * highest)  # with room for the legend
    save_figure(figure, path)


def draw_shape(axes, found):
    """A group of bars for each figure, a bar for each interface."""
    keys = [key for key in RELATIVE if key in found["learned"]]
    places = np.arange(len(keys))
    for i, (name, figures) in enumerate(found.items()):
        ratios = [np.percentile(figures[f"{key} / learned"], [25, 50, 75]) for key in keys]
        low, median, high = np.transpose(ratios)
        axes.bar(
            places + BAR_WIDTH * (i - (len(found) - 1) / 2),
            median,
            BAR_WIDTH,
            color=colour_of(name),
            label=name,
            yerr=[median - low, high - median],
            capsize=2,
        )
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xticks(places, keys, rotation=45, ha="right")
    axes.grid(False, axis="x")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")


# ---------------- The study


def read_measured(folder, setting):
    """{(shape, part): record} of all that is measured. Raises ValueError at another setting."""
    records = read_runs(
        folder,
        {"shape", "part", "turns", "circumstances"},
        is_ours=lambda record: record.get("setting") == setting,
        mismatch="of another size or machine",
    )
    return {(record["shape"], record["part"]): record for record in records}


def measure_missing(folder, size):
    """{(shape, part): record} of all parts of a size, measured where a record is missing."""
    now = circumstances()
    setting = {"size": size, "machine": now["machine"], "torch": now["torch"]}
    records = read_measured(folder, setting)
    for shape, part in itertools.product(size["shapes"], PARTS):
        if (shape, part) not in records:
            record = {"shape": shape, "part": part, "setting": setting, "circumstances": now}
            record["turns"] = measure(shape, part, size)
            records[shape, part] = record
            write_json(folder / f"{shape}-{part}.json", record)
            print(f"{shape}: {part} is measured", flush=True)
    return records


def study(out, size):
    """Measure what is missing, and write the report. Raises ValueError to refuse."""
    with locked(out):  # two at once would slow each other
        (out / "runs").mkdir(exist_ok=True)
        records = measure_missing(out / "runs", size)
    now = circumstances()
    dates = sorted({record["circumstances"]["date"] for record in records.values()})
    pages = [f"{now['machine']}, torch {now['torch']}, {' and '.join(dates)}."]
    shapes = {}
    for shape in SHAPES:
        measured = {
            part: records[shape, part]["turns"] for part in PARTS if (shape, part) in records
        }
        changes = size["shapes"].get(shape, {})
        shapes[shape] = summarise(shape, changes, measured)
        pages += report(shape, shapes[shape], changes)
    text = "\n\n".join(pages) + "\n"
    values = {
        "circumstances": {
            f"{shape}-{part}": record["circumstances"] for (shape, part), record in records.items()
        },
        "size": size,
        "shapes": {shape: as_lists(found) for shape, found in shapes.items()},
    }
    write_results(out, "cost", values, text)
    draw(shapes, out / "cost.png")
    print(f"{text}\nWrote cost.json, cost.md and cost.png to {out}")


def as_lists(found):
    """The figures of all interfaces as JSON has them."""
    return {
        name: {key: np.asarray(value).tolist() for key, value in figures.items()}
        for name, figures in found.items()
    }


def redraw(out):
    """Draw cost.png from the cost.json in `out`."""
    recorded = read_json(out / "cost.json")
    check_keys(out / "cost.json", recorded, {"shapes"})
    draw(recorded["shapes"], out / "cost.png")
    print(f"Wrote cost.png to {out}")


def main(argv=None):
    parser = make_study_parser(__doc__, SIZES)
    add_redraw_option(parser, "cost")
    args = parser.parse_args(argv)
    with refusals(parser):
        out = output_folder(args, "cost")
        if args.redraw:
            redraw(out)
        else:
            study(out, SIZES[args.size])


if __name__ == "__main__":
    main()
