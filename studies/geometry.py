"""Fixedness, geometry or scale: what in a fixed code costs loss? And how wide must a code be?

    python studies/geometry.py                            a smoke of about a minute
    python studies/geometry.py --size cpu                 some four hours on one core
    python studies/geometry.py --size cpu --arms later    learning rates, shuffled ids, a tied head
    python studies/geometry.py --size cpu --seeds         no more runs, only the report

A learned table differs from binary16 in four things at once: it is trained, its rows span d_model
dimensions and not 16, they begin at RMS 0.02 and not about 0.7, and they say nothing of the order
of ids. Each *arm* of `make_arms` changes few of these; *-0.7 and *-small change the scale. All arms
of a seed have the same initial backbone, bit for bit, the same batches and the same held-out
windows. A *gap* is the held-out loss of an arm minus that of `learned` at the same seed; its 95 %
interval is Student's over seeds.

A *wide* code is gf2 with more bits: code'(t) = A code(t) with a random A of K x 16 bits and full
column rank, so that no two ids share a code for any K >= 16. At K = 16 it is gf2, and at
K = d_model nothing is tiled. It stores 16 K bits. The arms *-signs write 0 and 1 as -1 and 1, the
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
after an interruption. geometry.json, .md and .png are made anew from all of them after each seed.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shards
from codes import binary_codes, gf2, invertible_matrix, recode
from device import pick_device, pick_dtype, refusals
from evaluate import COLOURS, COUNTED, DECILES, STYLES, deciles, held_out_loss, table, token_counts
from model import InputLayer, Transformer
from train import FREE, Config, accumulate_gradients, learning_rate, make_optimizer

CPU = dict(d_model=128, n_layers=4, n_heads=4, d_ff=512, max_seq_len=256, max_updates=512,
           targets_per_update=4096, micro_batch=16, lr=2e-3, warmup_updates=40, eval_windows=0)
SIZES = {  # eval_windows is of the loss at the end; 0 means all
    "smoke": CPU | dict(d_model=64, n_layers=2, d_ff=192, max_seq_len=64, max_updates=8,
                        targets_per_update=1024, warmup_updates=2, eval_windows=64),
    "cpu": CPU,
    "cpu-wide": CPU | dict(d_model=256, d_ff=1024, lr=1e-3),
    "gpu": CPU | dict(d_model=512, n_layers=8, n_heads=8, d_ff=2048, max_seq_len=512,
                      max_updates=256, targets_per_update=32_768, micro_batch=64, lr=1e-3),
}  # fmt: skip
CODE_RMS = 0.5**0.5  # of 0s and 1s in equal number
CURVE_WINDOWS = 64  # held-out windows of the curve
RUN = {"arm", "seed", "held_out", "decile_targets", "curve", "rms", "parameters", "input_bits",
       "input_width", "backbone_hash"}  # what the report takes of a run  # fmt: skip
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 1 to 9 degrees


# ---------------- Tables: config -> numbers (V, K), and the bits that a fixed one stores


def gaussian(config, rms, width=None):
    """N(0, rms); with rms 0.02 and full width bit for bit the table that Transformer draws."""
    generator = torch.Generator().manual_seed(config.init_seed + 1)
    values = torch.empty(config.vocab_size, width or config.d_model)
    return values.normal_(0, rms, generator=generator), 32 * values.numel()


def shifted(config):
    """Gaussian, with the mean and the standard deviation of fair bits: 1/2 and 1/2."""
    values, bits = gaussian(config, rms=0.5)
    return values + 0.5, bits


def binary16(config):
    return binary_codes(np.arange(config.vocab_size)), 0


def shuffled(config):
    """binary16 with the ids in random order. Id 0 stays, the separator with the zero code."""
    order = 1 + np.random.default_rng(config.seed).permutation(config.vocab_size - 1)
    return binary_codes(np.concatenate([[0], order])), 16 * config.vocab_size


def wide(config, width):
    """gf2 of this many bits, with another matrix for each seed."""
    return gf2(config.vocab_size, 16, config.seed, matrix=None, offset=0, K=width), 16 * width


def gf2_offset(config):
    """gf2 with b = A code(V), so that the zero code falls on V, the first number that is no id."""
    codes, bits = wide(config, 16)
    b = recode(binary_codes(config.vocab_size), invertible_matrix(16, config.seed))
    return codes ^ b, bits + 16


def gf2_live(config):
    """gf2 on the bits that vary among the ids; the constant zeros above them stay."""
    live = (config.vocab_size - 1).bit_length()
    matrix = invertible_matrix(live, config.seed)
    codes = recode(binary_codes(np.arange(config.vocab_size), live), matrix)
    return np.pad(codes, ((0, 0), (0, 16 - live))), matrix.size


def signs(config, of, rms=1.0):
    """-rms and rms in place of 0 and 1."""
    codes, bits = of(config)
    return rms * (2.0 * codes - 1), bits


def small(config, of):
    """A code of 0s and 1s times a number, so that fair bits have the RMS of a learned table."""
    codes, bits = of(config)
    return codes * (0.02 / CODE_RMS), bits


# ---------------- Arms


@dataclass
class Arm:
    table: Callable  # see above
    trained: bool = False
    tied: bool = False  # the head is the table
    changes: dict = field(default_factory=dict)  # of the config


def make_arms(config):
    """(main arms, later arms): name -> Arm, in the order in which they are run."""
    main = {
        "learned": Arm(partial(gaussian, rms=0.02), trained=True),
        "learned-0.7": Arm(partial(gaussian, rms=CODE_RMS), trained=True),
        "gaussian": Arm(partial(gaussian, rms=0.02)),
        "gaussian-0.7": Arm(partial(gaussian, rms=CODE_RMS)),
        "learned-shifted": Arm(shifted, trained=True),
        "gaussian-shifted": Arm(shifted),
        "learned-16": Arm(partial(gaussian, rms=CODE_RMS, width=16), trained=True),
        "gaussian-16": Arm(partial(gaussian, rms=CODE_RMS, width=16)),
        "binary16": Arm(binary16),
        "gf2": Arm(partial(wide, width=16)),
        "gf2-live": Arm(gf2_live),
        "binary16-signs": Arm(partial(signs, of=binary16)),
    }
    widths = [2**i for i in range(5, 17) if 2**i <= config.d_model]
    main |= {f"wide-{K}": Arm(partial(wide, width=K)) for K in widths}
    widest = partial(wide, width=config.d_model)
    main["wide-signs"] = Arm(partial(signs, of=widest))
    main |= {f"signs-{K}": Arm(partial(signs, of=partial(wide, width=K), rms=0.02))
             for K in (16, *widths)}  # fmt: skip
    main["binary16-small"] = Arm(partial(small, of=binary16))
    main["wide-small"] = Arm(partial(small, of=widest))
    # The table's parameters given to the MLPs, where a unit of d_ff has 3 d_model in each block.
    larger = dict(d_ff=config.d_ff + round(config.vocab_size / (3 * config.n_layers)))
    later = {"binary16-matched": Arm(binary16, changes=larger)}
    for factor in (2, 0.5):
        rates = dict(lr=factor * config.lr, min_lr=factor * config.min_lr)
        later |= {f"{name}@lr{factor}": replace(arm, changes=rates) for name, arm in main.items()}
    later["binary16-shuffled"] = Arm(shuffled)
    later["gf2-offset"] = Arm(gf2_offset)
    later["learned-tied"] = Arm(partial(gaussian, rms=0.02), trained=True, tied=True)
    return main, later


class Input(InputLayer):
    """An InputLayer of any table (V, K), fixed or trained, K a divisor of d_model."""

    def __init__(self, values, trained, d_model):
        nn.Module.__init__(self)  # in place of a table that a config names
        self.zero_id = None
        self.tiles = d_model // values.shape[1]
        if trained:
            self.weight = nn.Parameter(values)
        else:
            self.register_buffer("weight", values, persistent=False)
            self.zero_id = next(iter((values == 0).all(dim=1).nonzero().flatten().tolist()), None)


def make_model(arm, config):
    """(Transformer with the arm's input, sha256 of all its other weights, bits it stores)."""
    model = Transformer(config)
    values, bits = arm.table(config)
    model.input = Input(torch.as_tensor(values).float(), arm.trained, config.d_model)
    backbone = model.backbone_hash()
    if arm.tied:
        model.head.weight = model.input.weight
    return model, backbone, 0 if arm.trained else bits


# ---------------- One run


def fit(model, config, autocast):
    """Train in place, as train.py does on one rank; yields how many updates are made.
    Raises ValueError where the loss or the gradient is not finite."""
    data, optimizer = shards.open_shards(config.data, "train"), make_optimizer(model, config)
    torch.compiler.reset()  # else it would stop compiling after some models
    compiled = torch.compile(model) if config.compile else model
    for update in range(config.max_updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, update)
        loss = accumulate_gradients(compiled, data, config, update, 0, 1, autocast)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        if not math.isfinite(loss + norm):
            raise ValueError(f"update {update + 1} has loss {loss} and norm {norm}; lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield update + 1


@torch.no_grad()
def residual_rms(model, ids):
    """RMS of the residual over all positions of ids (B, T): of the input, and after each block."""
    found = []

    def note(module, arguments, x):  # (B, T, d_model)
        found.append(x.float().square().mean().sqrt().item())

    hooks = [module.register_forward_hook(note) for module in (model.input, *model.blocks)]
    model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return found


def open_held_out(config):
    """The validation split, its windows, the decile of each id, and how many targets there are."""
    train, val = (shards.open_shards(config.data, split) for split in shards.SPLITS)
    windows = shards.validation_windows(val, config.max_seq_len, config.eval_windows)
    _, targets = shards.read_windows(val, windows, config.max_seq_len)
    target_counts = np.bincount(targets.flatten(), minlength=config.vocab_size)
    decile = deciles(token_counts(train, 0, min(train.tokens, COUNTED)), target_counts)
    facts = dict(targets=targets.numel(), targets_per_window=config.max_seq_len)
    facts["decile_targets"] = np.bincount(decile, target_counts, DECILES).astype(int).tolist()
    return val, windows, torch.from_numpy(decile), facts


def run_arm(arm, config, device, dtype):
    """Train and measure one arm; returns what its file holds."""
    started = time.perf_counter()
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    length, batch, held_out = config.max_seq_len, config.micro_batch, open_held_out(config)
    val, some = held_out[0], shards.validation_windows(held_out[0], length, CURVE_WINDOWS)
    few = shards.read_windows(val, some[:batch], length)[0].to(device)  # ids (B, T)
    model, backbone, bits = make_model(arm, config)
    model.to(device).train()
    before, curve = residual_rms(model, few), []
    points = {config.max_updates >> i for i in range(8)}  # the last update, half of that, ...

    def nats(ids, targets):
        with autocast():
            return model.losses(ids, targets).sum()

    for done in fit(model, config, autocast):
        if done in points:
            total = shards.held_out_sum(nats, val, some, length, batch, device).item()
            curve.append([done * config.targets_per_update, total / (len(some) * length)])
    with autocast():
        loss = held_out_loss(model, *held_out, batch * length)
    return dict(held_out=loss, decile_targets=held_out[-1]["decile_targets"], curve=curve,
                rms=[before, residual_rms(model, few)], parameters=model.parameter_counts(),
                input_bits=bits, input_width=model.input.weight.shape[1],
                zero_id=model.input.zero_id, backbone_hash=backbone, torch=torch.__version__,
                seconds=time.perf_counter() - started)  # fmt: skip


# ---------------- Report


def interval(values):
    """Mean, and how far the 95 % t-interval reaches to each side: None where there is one value."""
    n = len(values)
    t = T_975[min(n - 1, len(T_975)) - 1]  # from 11 values on that of ten: a little too wide
    half = t * float(np.std(values, ddof=1)) / n**0.5 if n > 1 else None
    return dict(mean=float(np.mean(values)), half=half)


def check_keys(path, record, keys):
    """Raises ValueError where a finished run does not hold what a report takes of it."""
    if lacking := keys - record.keys():
        raise ValueError(f"{path} does not hold {min(lacking)}; remove it to make it again")


def read_runs(folder, setting, keys):
    """All finished runs. Raises ValueError where one is of another size or of other data, or does
    not hold these keys."""
    records = []
    for path in sorted(folder.glob("*.json")):
        records.append(record := shards.read_json(path))
        if record.get("setting") != setting:
            raise ValueError(f"{path} is of another size or other data; choose another --out")
        check_keys(path, record, keys)
    return records


def summarise(records, names):
    """name -> figures, and gaps to `learned` at the same seeds, in the order of names.
    Raises ValueError without learned, or if backbones of one shape and seed began unlike."""
    runs = {(record["arm"], record["seed"]): record for record in records}
    seeds, arms = sorted(seed for name, seed in runs if name == "learned"), {}
    if not seeds:
        raise ValueError("there is no run of learned, to which all gaps are; give --seeds")
    for name in names:
        pairs = [(runs[name, s], runs["learned", s]) for s in seeds if (name, s) in runs]
        if not pairs:
            continue
        for run, learned in pairs:
            same_shape = run["parameters"]["backbone"] == learned["parameters"]["backbone"]
            if same_shape and run["backbone_hash"] != learned["backbone_hash"]:
                raise ValueError(f"{name} and learned began with other backbones; make them again")

        def gap(measure, pairs=pairs):
            return interval([measure(run) - measure(learned) for run, learned in pairs])

        first = pairs[0][0]
        arms[name] = dict(
            seeds=[run["seed"] for run, _ in pairs],
            nats=float(np.mean([run["held_out"]["nats_per_token"] for run, _ in pairs])),
            gap=gap(lambda run: run["held_out"]["nats_per_token"]),
            curve=[dict(targets=targets, **gap(lambda run, i=i: run["curve"][i][1]))
                   for i, (targets, _) in enumerate(first["curve"])],
            deciles=[dict(decile=d + 1, **gap(lambda run, d=d: run["held_out"]["deciles"][d]))
                     for d, targets in enumerate(first["decile_targets"]) if targets],
            rms=np.mean([run["rms"] for run, _ in pairs], axis=0).tolist(),
            **{key: first[key] for key in ("parameters", "input_bits", "input_width")},
        )  # fmt: skip
    return arms


def in_words(found, form="+.4f"):
    """An interval as text."""
    half = "" if found["half"] is None else f" ± {found['half']:{form.lstrip('+')}}"
    return f"{found['mean']:{form}}{half}"


def report(arms, setting):
    """All tables, as Markdown."""
    learned = arms["learned"]
    yield (
        f"{setting['n_layers']} blocks of width {setting['d_model']}, V {setting['vocab_size']:,}, "
        f"{learned['curve'][-1]['targets']:,} targets, peak learning rate {setting['lr']}. A gap "
        "is the held-out loss in nats per token minus that of `learned` at the same seeds, ± half "
        "of its 95 % t-interval over seeds."
    )
    header = ["arm", "seeds", "nats per token", "gap", "trained input parameters",
              "bits of a fixed input", "width", "input RMS at first", "at last"]  # fmt: skip
    rows = []
    for name, arm in arms.items():
        rows.append([name, str(len(arm["seeds"])), f"{arm['nats']:.4f}", in_words(arm["gap"])])
        rows[-1] += [f"{arm['parameters']['input']:,}", f"{arm['input_bits']:,}"]
        rows[-1] += [str(arm["input_width"]), *(f"{rms[0]:.3f}" for rms in arm["rms"])]
    yield table(header, rows)
    yield f"Gap against targets seen, on {CURVE_WINDOWS} held-out windows."
    header = ["arm", *(f"{found['targets']:,}" for found in learned["curve"])]
    yield table(header, [[name, *map(in_words, arm["curve"])] for name, arm in arms.items()])
    yield "Gap by token frequency: ten groups of targets, from frequent ids to rare ones."
    header = ["arm", *(str(found["decile"]) for found in learned["deciles"])]
    yield table(header, [[name, *map(in_words, arm["deciles"])] for name, arm in arms.items()])
    yield "RMS of the residual after training: of the input, then after each block."
    rows = [[name, *(f"{rms:.2f}" for rms in arm["rms"][1])] for name, arm in arms.items()]
    yield table(["arm", "input", *map(str, range(1, setting["n_layers"] + 1))], rows)


def draw(arms, main_arms, path):
    """The gap of every arm; the loss against the width of a code; the gaps while training."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(20, max(5, 0.2 * len(arms))), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    dots = dict(marker="o", capsize=3, color=COLOURS[0])

    gaps = [(arm["gap"]["mean"], arm["gap"]["half"] or math.nan) for arm in arms.values()]
    means, halves = zip(*gaps, strict=True)
    left.errorbar(means, range(len(arms)), xerr=halves, linestyle="", **dots)
    left.set_yticks(range(len(arms)), arms)
    left.invert_yaxis()
    left.set(xlabel="nats per token above learned", title="Gap, 95 % interval over seeds")

    nats = {name: arms["learned"]["nats"] + arm["gap"]["mean"] for name, arm in arms.items()}
    for i, name in enumerate(("learned", "gaussian", "gaussian-0.7")):
        if name in nats:
            middle.axhline(nats[name], color=COLOURS[i + 4], linestyle=STYLES[i + 1], label=name)
    for i, (kind, label) in enumerate((("wide", "bits, 0 and 1"), ("signs", "bits, ±0.02"))):
        points = sorted((arm["input_width"], nats[name], arm["gap"]["half"] or math.nan)
                        for name, arm in arms.items()
                        if name.replace("gf2", "wide-16") == f"{kind}-{arm['input_width']}")
        if points:
            widths, losses, halves = zip(*points, strict=True)
            look = dots | dict(color=COLOURS[3 * i], linestyle=STYLES[i])
            middle.errorbar(widths, losses, yerr=halves, label=label, **look)
    middle.set_xscale("log", base=2)
    middle.xaxis.set_major_formatter(ScalarFormatter())
    middle.set(xlabel="K, bits of the code", ylabel="nats per token", title="Loss against width")

    for i, name in enumerate(name for name in arms if name in main_arms):
        curve = [(found["targets"], found["mean"]) for found in arms[name]["curve"]]
        look = dict(color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)], label=name)
        right.plot(*zip(*curve, strict=True), marker="o", markersize=3.5, **look)
    right.set(xscale="log", xlabel="targets seen", ylabel="nats per token above learned")
    right.set_title("Gap while training")

    for axis in (left, middle, right):
        axis.grid(True, which="both", alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    middle.legend(frameon=False)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


# ---------------- The sweep


def write_report(out, setting, main_arms, names):
    """geometry.json, .md and .png from all runs under `out`; returns the Markdown."""
    arms = summarise(read_runs(out / "runs", setting, RUN), names)
    text = "\n\n".join(report(arms, setting)) + "\n"
    shards.write_json(out / "geometry.json", dict(setting=setting, arms=arms))
    shards.write_whole(out / "geometry.md", text.encode())
    draw(arms, main_arms, out / "geometry.png")
    return text


def sweep(args):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    out, size = Path(args.out or f"out/geometry-{args.size}"), SIZES[args.size]
    dtype, _ = pick_dtype("auto", device := pick_device())
    lr = size["lr"] if args.lr is None else args.lr
    updates = size["max_updates"] if args.updates is None else args.updates
    size = size | dict(vocab_size=shards.read_meta(args.data)["vocab_size"], data=args.data)
    size |= dict(lr=lr, min_lr=lr / 10, max_updates=updates, compile=args.compile)
    base = Config(**size, dtype=str(dtype).removeprefix("torch."))
    # All that decides a run but its arm and seed.
    varied = ("seed", "init_seed", *FREE)
    setting = {key: value for key, value in asdict(base).items() if key not in varied}
    setting["data_sha256"] = shards.sha256(Path(args.data) / "meta.json")
    main_arms, later_arms = make_arms(base)
    every, groups = main_arms | later_arms, dict(main=main_arms, later=later_arms)
    names = [name for word in ["learned", *args.arms] for name in groups.get(word, [word])]
    if unknown := [name for name in names if name not in every]:
        raise ValueError(f"there is no arm {unknown[0]}; take main, later or of {', '.join(every)}")
    (out / "runs").mkdir(parents=True, exist_ok=True)
    made = {(record["arm"], record["seed"]) for record in read_runs(out / "runs", setting, RUN)}
    for seed in dict.fromkeys(args.seeds):  # one that is cut off has compared all at the first
        for name in dict.fromkeys(names):
            if (name, seed) in made:
                continue
            # Ten apart, since a table is drawn from init_seed + 1.
            config = replace(base, seed=seed, init_seed=10 * seed, **every[name].changes)
            record = dict(arm=name, seed=seed, setting=setting)
            record |= run_arm(every[name], config, device, dtype)
            shards.write_json(out / "runs" / f"{name}-seed{seed}.json", record)
            nats = record["held_out"]["nats_per_token"]
            print(f"{name} seed {seed}: {nats:.4f} nats, {record['seconds']:.0f} s", flush=True)
        write_report(out, setting, main_arms, every)
    text = write_report(out, setting, main_arms, every)
    print(f"{text}\nWrote geometry.json, geometry.md and geometry.png to {out}")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--size", default="smoke", choices=SIZES)
    parser.add_argument("--arms", nargs="+", default=["main"], help="main, later, or names")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2],
                        help="default 0 1 2; with none it only reports")
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    parser.add_argument("--updates", type=int, help="instead of the size's")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the size's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    parser.add_argument("--out", metavar="DIR", help="default out/geometry-<size>")
    args = parser.parse_args(argv)
    with refusals(parser):
        sweep(args)


if __name__ == "__main__":
    main()
