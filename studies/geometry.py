"""Fixedness, geometry or scale: what in a fixed code costs loss? And how wide must a code be?

    python studies/geometry.py                            a smoke of about a minute
    python studies/geometry.py --size cpu                 some four hours on one core
    python studies/geometry.py --size cpu --arms later    learning rates, shuffled ids, a tied head
    python studies/geometry.py --size cpu --seeds         no more runs, only the report
    python studies/geometry.py --redraw --out studies/results     only the picture

A learned table differs from binary16 in four things at once: it is trained, its rows span d_model
dimensions and not 16, they begin at RMS 0.02 and not about 0.7, and they say nothing of the order
of ids. Each *arm* of `make_arms` changes few of these; *-0.7 and *-small change the scale. All
arms of a seed have the same initial backbone, bit for bit, the same batches and the same held-out
windows. A *gap* is the held-out loss of an arm minus that of `learned` at the same seed; its 95 %
interval is Student's over seeds.

A *wide* code is gf2 with more bits: code'(t) = A code(t) with a random A of K x 16 bits and full
column rank, so that no two ids share a code for any K >= 16. At K = 16 it is gf2, and at
K = d_model nothing is tiled. It stores 16 K bits. The arms *-signs write 0 and 1 as -1 and 1; the
arms signs-* write those of a wide code as -0.02 and 0.02: the code `signs` of codes.py.

All rows of a table of 0s and 1s share a direction, their mean, which a model can use at once as a
bias. The arms *-shifted give that to gaussian rows, with the mean and the RMS of fair bits.

With fewer than 2^15 + 1 ids the highest bits of binary16 are constant zeros. A matrix mixes them
in without harm and spreads the others over all K bits of a code; that of gf2-live mixes only the
others. BPE ids are in order of merging: high bits tell of frequency, until mixed or shuffled.

What a size can show is which change moves the loss of a small model early in its training, beyond
the noise of seeds. It cannot show that a gap lasts over billions of tokens and 24 blocks. An
interval that holds 0 is no proof of equality, and of 20 intervals one misses on average. Nor is a
gap proof of geometry while tuning could close it: AdamW's step on a table does not grow with the
table, so that a larger one turns more slowly; look at the arms @lr2 and @lr0.5.

A finished run is one file under --out/runs and is not made again, so that the same command goes on
after an interruption. geometry.json, .md and .png are made anew from all runs after each seed.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from codes import (
    LinearCode,
    binary_codes,
    ids_from_codes,
    invertible_matrix,
    linear_code,
    random_matrix,
)
from model import TableInput, Transformer
from nanocodes.batches import read_windows, validation_windows
from nanocodes.checkpoint import backbone_hash
from nanocodes.command import refusals
from nanocodes.device import autocast, pick_device, pick_dtype
from nanocodes.files import read_json, write_json
from nanocodes.held_out import HeldOutLoss, held_out_loss, held_out_sum, open_held_out
from nanocodes.pictures import (
    GREY,
    Look,
    colour_of,
    draw_curve,
    label_curves,
    looks_of,
    new_figure,
    plain_numbers,
    save_figure,
)
from nanocodes.plan import parameter_counts
from nanocodes.report import table
from studies.common import (
    SIZES,
    add_redraw_option,
    add_seeds_option,
    fit,
    in_words,
    interval,
    make_config,
    make_study_parser,
    output_folder,
    read_runs_of,
    seeds_of,
    setting_of,
    write_results,
)

BITS = 16  # of an id
SMALL_RMS = 0.02  # of a learned table at its start
CODE_RMS = 0.5**0.5  # of 0s and 1s in equal number
POWERS = [2**i for i in range(5, 17)]  # the widths of wide codes, as far as d_model
CURVE_WINDOWS = 64  # held-out windows of the loss while training

# ---------------- Codes: Config -> LinearCode. The seed draws another matrix for each run


def binary16(config):
    return linear_code("binary16")


def wide(config, width):
    """gf2 of this many bits."""
    return LinearCode(random_matrix(width, BITS, config.seed))


def gf2_offset(config):
    """gf2 with b = A code(V), so that the zero code falls on V, the first number that is no id."""
    code = wide(config, BITS)
    return replace(code, offset=int(ids_from_codes(code.bits(config.vocab_size))))


def live_bits(config):
    """How many bits vary among the ids."""
    return (config.vocab_size - 1).bit_length()


def gf2_live(config):
    """gf2 on the bits that vary among the ids; the constant zeros above them stay."""
    live = live_bits(config)
    matrix = invertible_matrix(live, config.seed)
    return LinearCode(np.pad(matrix, ((0, BITS - live), (0, 0))))


# ---------------- Tables: Config -> the numbers of all ids, (V, K)


def gaussian(config, rms, width=None):
    """N(0, rms) of so many numbers an id, by default d_model; float32 (V, K).

    With rms 0.02 and the default width it is, bit for bit, the learned table at its start.
    """
    generator = torch.Generator().manual_seed(config.init_seed + 1)
    values = torch.empty(config.vocab_size, width or config.d_model)
    return values.normal_(0, rms, generator=generator)


def shifted(config):
    """Gaussian, with the mean and the standard deviation of fair bits: 1/2 and 1/2."""
    return gaussian(config, rms=0.5) + 0.5


def shuffled(config):
    """binary16 with the ids in random order. Id 0 stays, the separator with the zero code."""
    order = 1 + np.random.default_rng(config.seed).permutation(config.vocab_size - 1)
    return binary_codes(np.concatenate([[0], order]))


def coded(config, code, low=0.0, high=1.0):
    """A code, a function from a Config to a LinearCode, with `low` and `high` for 0 and 1."""
    written = replace(code(config), low=low, high=high)
    return written.values(np.arange(config.vocab_size))


# ---------------- Arms


@dataclass
class Arm:
    """One input of a model, and what else differs from the arm `learned`."""

    values: Callable  # Config -> the numbers of all ids, (V, K)
    stored_bits: int = 0  # that a fixed input needs beside the program; 0 for a trained one
    trained: bool = False
    tied: bool = False  # the head is the table
    changes: dict = field(default_factory=dict)  # of the Config


def code_widths(config):
    """The numbers of bits of the wide codes that a model can read."""
    return [width for width in POWERS if width <= config.d_model]


def gaussian_arms(config):
    """name -> Arm: tables without structure, trained and fixed, by scale, centre and width."""
    numbers = config.vocab_size * config.d_model
    large = partial(gaussian, rms=CODE_RMS)
    narrow = partial(gaussian, rms=CODE_RMS, width=BITS)
    return {
        "learned": Arm(partial(gaussian, rms=SMALL_RMS), trained=True),
        "learned-0.7": Arm(large, trained=True),
        "gaussian": Arm(partial(gaussian, rms=SMALL_RMS), stored_bits=32 * numbers),
        "gaussian-0.7": Arm(large, stored_bits=32 * numbers),
        "learned-shifted": Arm(shifted, trained=True),
        "gaussian-shifted": Arm(shifted, stored_bits=32 * numbers),
        "learned-16": Arm(narrow, trained=True),
        "gaussian-16": Arm(narrow, stored_bits=32 * config.vocab_size * BITS),
    }


def code_arms(config):
    """name -> Arm: fixed codes, by matrix, width and the two numbers that stand for a bit."""
    widest_code = partial(wide, width=config.d_model)
    widest_bits = BITS * config.d_model
    small = SMALL_RMS / CODE_RMS  # the 1 with which fair bits have the RMS of a learned table
    arms = {
        "binary16": Arm(partial(coded, code=binary16)),
        "gf2": Arm(partial(coded, code=partial(wide, width=BITS)), stored_bits=BITS * BITS),
        "gf2-live": Arm(partial(coded, code=gf2_live), stored_bits=live_bits(config) ** 2),
        "binary16-signs": Arm(partial(coded, code=binary16, low=-1, high=1)),
    }
    for width in code_widths(config):
        code = partial(wide, width=width)
        arms[f"wide-{width}"] = Arm(partial(coded, code=code), stored_bits=BITS * width)
    arms["wide-signs"] = Arm(
        partial(coded, code=widest_code, low=-1, high=1), stored_bits=widest_bits
    )
    for width in (BITS, *code_widths(config)):
        signs = partial(coded, code=partial(wide, width=width), low=-SMALL_RMS, high=SMALL_RMS)
        arms[f"signs-{width}"] = Arm(signs, stored_bits=BITS * width)
    arms["binary16-small"] = Arm(partial(coded, code=binary16, high=small))
    arms["wide-small"] = Arm(partial(coded, code=widest_code, high=small), stored_bits=widest_bits)
    return arms


def make_arms(config):
    """(main arms, later arms), each name -> Arm in the order in which they are run."""
    main = gaussian_arms(config) | code_arms(config)
    # The table's parameters given to the MLPs, where a unit of d_ff has 3 d_model in each block.
    units = round(config.vocab_size / (3 * config.n_layers))
    matched = replace(main["binary16"], changes={"d_ff": config.d_ff + units})
    later = {"binary16-matched": matched}
    for factor in (2, 0.5):
        rates = {"lr": factor * config.lr, "min_lr": factor * config.min_lr}
        for name, arm in main.items():
            later[f"{name}@lr{factor}"] = replace(arm, changes=rates)
    later["binary16-shuffled"] = Arm(shuffled, stored_bits=BITS * config.vocab_size)
    later["gf2-offset"] = Arm(partial(coded, code=gf2_offset), stored_bits=BITS * BITS + BITS)
    later["learned-tied"] = replace(main["learned"], tied=True)
    return main, later


def make_model(arm, config):
    """(the Transformer of an arm, the hash of its backbone before a head is tied)."""
    layer = TableInput(arm.values(config), config.d_model, trainable=arm.trained)
    model = Transformer(config, input_layer=layer)
    backbone = backbone_hash(model)
    if arm.tied:
        model.head.weight = layer.weight
    return model, backbone


# ---------------- One run


@dataclass
class Run:
    """The record of a finished run, as its file holds it."""

    arm: str
    seed: int
    setting: dict  # see setting_of
    held_out: HeldOutLoss
    decile_targets: list  # held-out targets in each decile
    curve: list  # of [targets seen, nats per token on CURVE_WINDOWS windows]
    rms: list  # see residual_rms, before and after the training
    parameters: dict  # how many the input, the backbone and the head have
    input_bits: int  # that a fixed input stores
    input_width: int  # K
    zero_id: int | None  # the id whose numbers are all 0
    backbone_hash: str  # of the initial weights
    torch: str  # version
    seconds: float


@torch.no_grad()
def residual_rms(model, ids):
    """The RMS of the residual over all positions of ids (B, T), a list: of the input, and after
    each block."""
    values = []

    def note(module, arguments, x):  # (B, T, d_model)
        values.append(x.float().square().mean().sqrt().item())

    hooks = [module.register_forward_hook(note) for module in (model.input, *model.blocks)]
    model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return values


def loss_on(model, val, windows, config, dtype):
    """Nats per token of a model on some windows of a split."""
    device = model.head.weight.device

    def nats(ids, targets):
        with autocast(device, dtype):
            return model.losses(ids, targets).sum()

    length = config.max_seq_len
    total = held_out_sum(nats, val, windows, length, config.micro_batch, device)
    return total.item() / (len(windows) * length)


def run_arm(name, arm, config, setting, device, dtype):
    """Train one arm and measure it on the way; returns its Run."""
    started = time.perf_counter()
    length, batch = config.max_seq_len, config.micro_batch
    held_out = open_held_out(config.data, length, config.eval_windows)
    curve_windows = validation_windows(held_out.val, length, CURVE_WINDOWS)
    ids, _ = read_windows(held_out.val, curve_windows[:batch], length)
    ids = ids.to(device)  # (B, T), of which the residual is measured

    model, backbone = make_model(arm, config)
    model.to(device).train()
    rms_before = residual_rms(model, ids)
    moments = {config.max_updates >> i for i in range(8)}  # the last update, half of that, ...
    curve = []
    for updates in fit(model, config, dtype):
        if updates in moments:
            loss = loss_on(model, held_out.val, curve_windows, config, dtype)
            curve.append([updates * config.targets_per_update, loss])
    with autocast(device, dtype):
        loss = held_out_loss(model, held_out, batch * length)

    return Run(
        arm=name,
        seed=config.seed,
        setting=setting,
        held_out=loss,
        decile_targets=held_out.decile_targets,
        curve=curve,
        rms=[rms_before, residual_rms(model, ids)],
        parameters=parameter_counts(model),
        input_bits=arm.stored_bits,
        input_width=model.input.weight.shape[1],
        zero_id=model.input.zero_id,
        backbone_hash=backbone,
        torch=torch.__version__,
        seconds=time.perf_counter() - started,
    )


def read_arm_runs(folder, setting):
    """The Runs in a folder. Raises ValueError where one is of another size or of other data, or
    lacks a field."""
    names = {field.name for field in fields(Run)}
    runs = []
    for record in read_runs_of(folder, names, setting):
        values = {name: record[name] for name in names}
        runs.append(Run(**values | {"held_out": HeldOutLoss(**record["held_out"])}))
    return runs


# ---------------- Over seeds


@dataclass
class Summary:
    """An arm over its seeds, as geometry.json holds it. A gap is an interval: see interval."""

    seeds: list
    nats: float  # held-out loss per token, the mean
    gap: dict
    curve: list  # of gaps, each with "targets", those seen
    deciles: list  # of gaps, each with "decile", from 1
    rms: list  # see residual_rms, before and after the training
    parameters: dict
    input_bits: int
    input_width: int


def gaps(losses, losses_of_learned):
    """Losses (seeds, n) of an arm and of learned -> n intervals of their differences."""
    differences = np.subtract(losses, losses_of_learned).T
    return [interval(values) for values in differences.tolist()]


def summarise_arm(runs, learned_runs):
    """The Summary of the runs of an arm, beside those of learned at the same seeds."""
    first = runs[0]
    targets_seen = [targets for targets, _ in first.curve]
    deciles = [i for i, targets in enumerate(first.decile_targets) if targets]

    def gaps_in(losses_of):
        """Gaps of the list of losses that losses_of(run) takes of a run."""
        return gaps([losses_of(run) for run in runs], [losses_of(run) for run in learned_runs])

    curve = gaps_in(lambda run: [loss for _, loss in run.curve])
    by_decile = gaps_in(lambda run: [run.held_out.deciles[i] for i in deciles])
    return Summary(
        seeds=[run.seed for run in runs],
        nats=float(np.mean([run.held_out.nats_per_token for run in runs])),
        gap=gaps_in(lambda run: [run.held_out.nats_per_token])[0],
        curve=[{"targets": n} | gap for n, gap in zip(targets_seen, curve, strict=True)],
        deciles=[{"decile": i + 1} | gap for i, gap in zip(deciles, by_decile, strict=True)],
        rms=np.mean([run.rms for run in runs], axis=0).tolist(),
        parameters=first.parameters,
        input_bits=first.input_bits,
        input_width=first.input_width,
    )


def check_backbones(run, learned):
    """Raise ValueError if two runs of one seed and shape began with different backbones."""
    same_shape = run.parameters["backbone"] == learned.parameters["backbone"]
    if same_shape and run.backbone_hash != learned.backbone_hash:
        raise ValueError(f"{run.arm} and learned began with other backbones; make them again")


def summarise(runs, names):
    """name -> Summary, in the order of names, of all arms that have a seed with learned.

    Raises ValueError if there is no run of learned, or if backbones of one seed differ.
    """
    learned = {run.seed: run for run in runs if run.arm == "learned"}
    if not learned:
        raise ValueError("there is no run of learned, to which all gaps are; give --seeds")
    arms = {}
    for name in names:
        of_arm = {run.seed: run for run in runs if run.arm == name and run.seed in learned}
        seeds = sorted(of_arm)
        for seed in seeds:
            check_backbones(of_arm[seed], learned[seed])
        if seeds:
            arms[name] = summarise_arm(
                [of_arm[seed] for seed in seeds], [learned[seed] for seed in seeds]
            )
    return arms


# ---------------- Report


def gaps_part(arms):
    header = [
        "arm",
        "seeds",
        "nats per token",
        "gap",
        "trained input parameters",
        "bits of a fixed input",
        "width",
        "input RMS at first",
        "at last",
    ]
    rows = []
    for name, arm in arms.items():
        rms_at_first, rms_at_last = arm.rms
        rows.append(
            [
                name,
                str(len(arm.seeds)),
                f"{arm.nats:.4f}",
                in_words(arm.gap),
                f"{arm.parameters['input']:,}",
                f"{arm.input_bits:,}",
                str(arm.input_width),
                f"{rms_at_first[0]:.3f}",
                f"{rms_at_last[0]:.3f}",
            ]
        )
    return table(header, rows)


def curves_part(arms):
    header = ["arm", *(f"{gap['targets']:,}" for gap in arms["learned"].curve)]
    return table(header, [[name, *map(in_words, arm.curve)] for name, arm in arms.items()])


def deciles_part(arms):
    header = ["arm", *(str(gap["decile"]) for gap in arms["learned"].deciles)]
    return table(header, [[name, *map(in_words, arm.deciles)] for name, arm in arms.items()])


def rms_part(arms, n_layers):
    rows = [[name, *(f"{rms:.2f}" for rms in arm.rms[1])] for name, arm in arms.items()]
    return table(["arm", "input", *map(str, range(1, n_layers + 1))], rows)


def report(arms, setting):
    """All tables, as Markdown, each with a sentence on it."""
    parts = [
        f"{setting['n_layers']} blocks of width {setting['d_model']}, V {setting['vocab_size']:,}, "
        f"{arms['learned'].curve[-1]['targets']:,} targets, peak learning rate {setting['lr']}. A "
        "gap is the held-out loss in nats per token minus that of `learned` at the same seeds, ± "
        "half of its 95 % t-interval over seeds.",
        gaps_part(arms),
        f"Gap against targets seen, on {CURVE_WINDOWS} held-out windows.",
        curves_part(arms),
        "Gap by token frequency: ten groups of targets, from frequent ids to rare ones.",
        deciles_part(arms),
        "RMS of the residual after training: of the input, then after each block.",
        rms_part(arms, setting["n_layers"]),
    ]
    return "\n\n".join(parts) + "\n"


# ---------------- Picture

GAP_UNIT = "nats per token above learned"


def layer_of(arm_name):
    """The input layer whose colour an arm has: a wide code is gf2 with more bits."""
    if arm_name.startswith("gaussian"):
        return "gaussian"
    return arm_name.replace("wide", "gf2")


def draw_gaps(axes, arms):
    """The gap of every arm, from top to bottom."""
    for place, (name, arm) in enumerate(arms.items()):
        colour = colour_of(layer_of(name))
        filled = len(arm.seeds) > 1
        axes.errorbar(
            arm.gap["mean"],
            place,
            xerr=arm.gap["half"],
            color=colour,
            marker="o",
            markersize=5,
            markerfacecolor=colour if filled else "white",
            capsize=3,
        )
    axes.set_yticks(range(len(arms)), arms)
    for label in axes.get_yticklabels():
        label.set_color(colour_of(layer_of(label.get_text())))
    axes.invert_yaxis()
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.grid(False, axis="y")
    axes.set(
        xlabel=GAP_UNIT,
        title="Gap, 95 % interval over seeds (hollow: one seed)",
    )


def draw_widths(axes, arms):
    """The gap of codes against their width, for both ways to write a bit; tables beside them."""
    series = {
        "0 and 1": ["gf2", *(f"wide-{width}" for width in POWERS)],
        "-0.02 and 0.02": [f"signs-{width}" for width in (BITS, *POWERS)],
    }
    for label, names in series.items():
        codes = [arms[name] for name in names if name in arms]
        if not codes:
            continue
        widths = [arm.input_width for arm in codes]
        means = [arm.gap["mean"] for arm in codes]
        halves = [arm.gap["half"] or math.nan for arm in codes]
        colour = colour_of(layer_of(names[0]))
        axes.errorbar(widths, means, yerr=halves, color=colour, linestyle="", capsize=3)
        draw_curve(axes, widths, means, Look(colour, "-"), label)
    for name, line_style in {"learned": "-", "gaussian": "--", "gaussian-0.7": ":"}.items():
        if name in arms:
            gap = arms[name].gap["mean"]
            axes.axhline(gap, color=colour_of(layer_of(name)), linestyle=line_style, label=name)
    axes.set_xscale("log", base=2)
    plain_numbers(axes.xaxis)
    axes.set(
        xlabel="K, bits of a fixed code",
        ylabel=GAP_UNIT,
        title="Gap against the width of a code",
    )
    label_curves(axes)


def draw_training(axes, arms):
    """The gap of some arms against the targets seen."""
    widest = arms["learned"].input_width
    names = ["binary16", "gf2", f"wide-{widest}", "signs-16", f"signs-{widest}"]
    names = [name for name in ["learned", *names, "learned-0.7", "gaussian"] if name in arms]
    looks = looks_of([layer_of(name) for name in names])
    for name, look in zip(names, looks, strict=True):
        targets = [gap["targets"] for gap in arms[name].curve]
        draw_curve(axes, targets, [gap["mean"] for gap in arms[name].curve], look, name)
    axes.set_xscale("log")
    axes.set(xlabel="targets seen", ylabel=GAP_UNIT, title="Gap while training")
    label_curves(axes)


def draw(arms, path):
    """The gap of every arm; the gap against the width of a code; gaps while training."""
    figure, (left, middle, right) = new_figure(panels=3, width=5.2, height=max(5, 0.23 * len(arms)))
    draw_gaps(left, arms)
    draw_widths(middle, arms)
    draw_training(right, arms)
    save_figure(figure, path)


# ---------------- The sweep


def write_report(out, setting, names):
    """geometry.json, .md and .png from all runs under `out`; returns the Markdown."""
    arms = summarise(read_arm_runs(out / "runs", setting), names)
    text = report(arms, setting)
    summaries = {name: asdict(arm) for name, arm in arms.items()}
    write_results(out, "geometry", {"setting": setting, "arms": summaries}, text)
    draw(arms, out / "geometry.png")
    return text


def redraw(out):
    """geometry.png from geometry.json in the same folder."""
    arms = read_json(out / "geometry.json")["arms"]
    draw({name: Summary(**values) for name, values in arms.items()}, out / "geometry.png")


def chosen_arms(words, main, later):
    """The names of learned and of the arms that these words name: main, later, or a name."""
    groups = {"main": main, "later": later}
    names = []
    for word in ["learned", *words]:
        names += groups.get(word, [word])
    for name in names:
        if name not in main | later:
            every = ", ".join(main | later)
            raise ValueError(f"there is no arm {name}; take main, later or of {every}")
    return list(dict.fromkeys(names))


def sweep(args):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    out = output_folder(args, "geometry")
    device = pick_device()
    dtype, _ = pick_dtype("auto", device)
    changes = {"compile": args.compile}
    if args.lr is not None:
        changes["lr"] = args.lr
    if args.updates is not None:
        changes["max_updates"] = args.updates
    base = make_config(SIZES[args.size], args.data, dtype, **changes)
    setting = setting_of(base, varied=("seed", "init_seed"))
    main, later = make_arms(base)
    arms = main | later
    names = chosen_arms(args.arms, main, later)

    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    finished = {(run.arm, run.seed) for run in read_arm_runs(folder, setting)}
    # Seed by seed, so that a sweep that is cut off has compared all arms at the first ones.
    for seed in dict.fromkeys(args.seeds):
        for name in names:
            if (name, seed) in finished:
                continue
            arm = arms[name]
            config = replace(base, **seeds_of(seed), **arm.changes)
            run = run_arm(name, arm, config, setting, device, dtype)
            write_json(folder / f"{name}-seed{seed}.json", asdict(run))
            nats = run.held_out.nats_per_token
            print(f"{name} seed {seed}: {nats:.4f} nats, {run.seconds:.0f} s", flush=True)
        write_report(out, setting, arms)
    text = write_report(out, setting, arms)
    print(f"{text}\nWrote geometry.json, geometry.md and geometry.png to {out}")


def main(argv=None):
    parser = make_study_parser(__doc__, SIZES)
    parser.add_argument("--arms", nargs="+", default=["main"], help="main, later, or names")
    add_seeds_option(parser)
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    parser.add_argument("--updates", type=int, help="instead of the size's")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the size's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    add_redraw_option(parser, "geometry")
    args = parser.parse_args(argv)
    with refusals(parser):
        if args.redraw:
            redraw(output_folder(args, "geometry"))
        else:
            sweep(args)


if __name__ == "__main__":
    main()
