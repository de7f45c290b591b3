"""How does a representation form on an input that never moves?

    python studies/formation.py                  a smoke of about a minute
    python studies/formation.py --size cpu       an hour on one core
    python studies/formation.py --size gpu       some minutes on a large GPU
    python studies/formation.py --redraw --out studies/results    only the picture

Trains a small model for each interface and seed, with the seed's initial backbone and batches, and
looks at its residual, the input (depth 0) and what leaves each block, at six moments.

*What can be read there.* Linear probes of the current id: its bits, the bits of its own fixed code,
whether it is rarer than each decile of the ids at hand, and five classes of its text. A probe is a
ridge regression on -1 and 1. It learns on one half of the ids and is scored on the other, then the
reverse, so that it cannot memorise ids. The score is AUC, the share of pairs of a true and a false
id that it puts in the right order: 0.5 is chance. The control gives each id the labels of another
id of its half; it must score 0.5. (What is uncorrelated over all ids scores a little less: a
correlation by chance in one half is the reverse in the other.) Of each id there is one position, of
held-out text.

*What it does*, in the trained model. By how much the held-out loss rises without a block; and
whether the prediction goes to a donor: at the last position of a window the residual of one depth
is replaced by that of another window, so that depth 0 is another token in the same context, and at
the last depth the prediction is the donor's by construction. It is nearer if KL(donor | it) is
below KL(own | it). It follows if its likeliest token is the donor's, where that is not the own one.
At depth 0 both tell how much depends on the last token.

What it cannot show: a linear probe tells what can be read, not what is used, and to it a parity of
bits is unreadable, so that the bits of the id are not in gf2 or signs. BPE ids begin with the
bytes in order, and go on in order of merging: in binary16 digits and punctuation are neighbours,
high bits tell of frequency, and low ones are nearly arbitrary, so that no model has a reason to
show them. Some classes have few ids (ten digits, some seventy keywords), and few labels are harder
to learn in more dimensions. 0s and 1s begin 35 times larger than a learned table: what blocks add
is smaller beside them, and the residual carries them along. Models are small and early in their
training, at a learning rate that was not tuned. Intervals are Student's over seeds, which also draw
a code's matrix. A finished run is one file under --out/runs and is not made again.
"""

import keyword
import string
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from codes import binary_codes
from model import INPUT_LAYERS, LinearCodeInput, Transformer
from nanocodes.batches import read_windows, validation_windows
from nanocodes.command import refusals
from nanocodes.device import autocast, pick_device, pick_dtype
from nanocodes.files import read_json, write_json
from nanocodes.held_out import COUNTED_TOKENS, DECILES, token_counts
from nanocodes.pictures import GREY, draw_curve, label_curves, looks_of, new_figure, save_figure
from nanocodes.report import table
from nanocodes.shards import open_shards
from nanocodes.tokenizer import load_tokenizer
from studies.common import (
    SIZES,
    add_redraw_option,
    add_seeds_option,
    fit,
    in_words,
    interfaces,
    interval,
    make_config,
    make_study_parser,
    output_folder,
    read_runs_of,
    seeds_of,
    setting_of,
    write_results,
)

# What this study changes of the sizes. All held-out windows of eval_windows are probed.
CHANGES = {
    "smoke": {"max_updates": 64},
    "cpu": {"eval_windows": 256},
    "gpu": {"eval_windows": 256},
}
HALVINGS = (5, 3, 2, 1, 0)  # moments beside the start: after 1/32, 1/8, 1/4, 1/2 and all updates
RIDGE = 1e-3  # added to the variance of each feature, which is 1

# ---------------- Questions: what the probes are asked


def has_digit(text):
    return any(character.isdigit() for character in text)


def is_punctuation(text):
    characters = set(text.strip(" "))
    return len(characters) > 0 and characters <= set(string.punctuation)


CLASSES = {  # of a token's text
    "space first": lambda text: text.startswith(" "),
    "letters": lambda text: text.strip(" ").isalpha(),
    "digits": has_digit,
    "punctuation": is_punctuation,
    "keyword": lambda text: keyword.iskeyword(text.strip(" ")),
}
COLUMNS = (
    "low bits",
    "high bits",
    "own code",
    "frequency",
    *CLASSES,
    "classes",  # the mean of the five
    "control",
    "effective rank",
    "anisotropy",
)


@dataclass
class Questions:
    """What is asked of every residual: L yes/no labels of n distinct ids, at a position of each.

    All models of a seed have the same but for the labels "own code".
    """

    positions: torch.Tensor  # (n,) int64, a random place of each id among those of ids (B, T)
    half: torch.Tensor  # (n,) bool, which half of the ids an id is in
    labels: torch.Tensor  # (n, L) bool; no label is constant in a half
    control: torch.Tensor  # (n, L) bool, the labels of another id of the same half
    names: np.ndarray  # (L,) str, the group that a label belongs to


def label_groups(model, config, ids):
    """name -> labels of ids (n,), bool (n, how many labels the group has)."""
    tokenizer = load_tokenizer(Path(config.data) / "tokenizer.json")
    texts = [tokenizer.decode([i]) for i in ids]
    groups = {name: np.array([[test(text)] for text in texts]) for name, test in CLASSES.items()}
    bits = binary_codes(ids, (config.vocab_size - 1).bit_length()) == 1  # all that vary
    groups["low bits"], groups["high bits"] = np.array_split(bits, 2, axis=1)
    train = open_shards(config.data, "train")
    counts = token_counts(train, 0, min(train.tokens, COUNTED_TOKENS))[ids]
    quantiles = np.quantile(counts, np.arange(1, DECILES) / DECILES)
    groups["frequency"] = counts[:, None] < quantiles
    if isinstance(model.input, LinearCodeInput):
        codes = model.input.values(torch.from_numpy(ids).to(model.input.matrix.device)[None])[0]
        groups["own code"] = codes.cpu().numpy() > 0
    return groups


def make_questions(model, config, ids):
    """The Questions about ids (B, T), an array; random choices depend on config.seed alone."""
    generator = np.random.default_rng(config.seed)
    order = generator.permutation(ids.size)
    present, first = np.unique(ids.flat[order], return_index=True)  # (n,) each
    groups = label_groups(model, config, present)
    labels = np.hstack(list(groups.values()))
    names = np.repeat(list(groups), [group.shape[1] for group in groups.values()])

    half = generator.permutation(len(present)) % 2 == 0
    others = np.arange(len(present))
    varies = np.ones(len(names), dtype=bool)
    for side in (half, ~half):
        others[side] = generator.permutation(others[side])
        varies &= labels[side].any(axis=0) & ~labels[side].all(axis=0)
    labels = labels[:, varies]
    return Questions(
        positions=torch.from_numpy(order[first]),
        half=torch.from_numpy(half),
        labels=torch.from_numpy(labels),
        control=torch.from_numpy(labels[others]),
        names=names[varies],
    )


# ---------------- What can be read in a residual


@torch.no_grad()
def residuals(model, ids):
    """The residual of ids (B, T) at each depth, a list of (B, T, d_model).

    The mask of `model.hidden` is for the backward pass: positions that it makes 0 are 0 by
    themselves.
    """
    T = ids.shape[1]
    depths = [model.input(ids)]
    for block in model.blocks:
        depths.append(block(depths[-1], model.cos[:T], model.sin[:T]))
    return depths


def auc(values, labels):
    """AUC (L,) of values (n, L) for labels (n, L): the share of pairs of a true and a false row
    in which the true one has the greater value; equal ones count half."""
    columns = values.T.contiguous()  # (L, n)
    ordered = columns.sort(dim=1).values
    below = torch.searchsorted(ordered, columns, right=False)
    up_to = torch.searchsorted(ordered, columns, right=True)
    ranks = (below + up_to + 1).T / 2  # (n, L), from 1, the mean of equal ones
    trues = labels.sum(dim=0)
    pairs = trues * (len(values) - trues)
    return ((ranks * labels).sum(dim=0) - trues * (trues + 1) / 2) / pairs


def ridge_outputs(x, labels, learn):
    """What ridge regressions on labels (n, L) as -1 and 1, fitted on the rows `learn` (n,) of
    x (n, d_model), say of all rows: (n, L)."""
    features = (x - x[learn].mean(dim=0)) / x[learn].std(dim=0).clamp(min=1e-9)
    known = features[learn]
    targets = 2 * labels[learn].to(x) - 1
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    gram = known.T @ known + RIDGE * len(known) * identity
    return features @ torch.cholesky_solve(known.T @ targets, torch.linalg.cholesky(gram))


def probe(x, labels, half):
    """AUC (L,) of linear probes for labels (n, L) from x (n, d_model), learned on the rows in one
    half (n,) and scored on those in the other; the mean of both directions."""
    scores = []
    for learn in (half, ~half):
        outputs = ridge_outputs(x, labels, learn)
        scores.append(auc(outputs[~learn], labels[~learn]))
    return sum(scores) / len(scores)


def effective_rank(x):
    """exp of the entropy of the normalised squared singular values of x (n, d_model), centred."""
    squares = torch.linalg.eigvalsh(torch.cov(x.T)).clamp(min=0)
    return torch.special.entr(squares / squares.sum()).sum().exp().item()


def anisotropy(x):
    """The mean cosine over all pairs of rows of x (n, d_model)."""
    n = len(x)
    total = F.normalize(x, dim=1).sum(dim=0)
    return (total.square().sum().item() - n) / (n * (n - 1))


def measure(model, ids, questions):
    """name -> its value at each depth: of those of COLUMNS that the model has, for ids (B, T)."""
    # One probe for both, since they share the costly part.
    labels = torch.cat((questions.labels, questions.control), dim=1)
    depths = []
    for x in residuals(model, ids):
        x = x.flatten(0, 1)[questions.positions.to(x.device)].cpu().double()  # (n, d_model)
        scores, control = probe(x, labels, questions.half).chunk(2)
        values = {
            name: scores[questions.names == name].mean().item()
            for name in dict.fromkeys(questions.names.tolist())
        }
        values["classes"] = float(np.mean([values[name] for name in CLASSES if name in values]))
        values["control"] = control.mean().item()
        values["effective rank"] = effective_rank(x)
        values["anisotropy"] = anisotropy(x)
        depths.append(values)
    return {name: [values[name] for values in depths] for name in depths[0]}


# ---------------- What a residual does


@torch.no_grad()
def loss_without_blocks(model, ids, targets):
    """Nats per token, and a list of by how much they rise without each block."""
    blocks = model.blocks
    nats = model.losses(ids, targets).mean().item()
    rises = []
    for i in range(len(blocks)):
        model.blocks = blocks[:i] + blocks[i + 1 :]
        rises.append(model.losses(ids, targets).mean().item() - nats)
    model.blocks = blocks
    return nats, rises


@torch.no_grad()
def substitute(model, ids):
    """Log-probabilities of what follows rows of ids (B, T): the own ones, (B, V), and those with
    the residual of each depth, at the last position, replaced by that of a donor, the row before:
    (n_layers + 1, B, V)."""
    T = ids.shape[1]
    depths = residuals(model, ids)

    def predict(last):  # (B, d_model)
        return model.head(model.norm(last)).double().log_softmax(dim=-1)

    own = predict(depths[-1][:, -1].clone())
    replaced = []
    for depth, x in enumerate(depths):
        x[:, -1] = x[:, -1].roll(1, dims=0)
        for block in model.blocks[depth:]:
            x = block(x, model.cos[:T], model.sin[:T])
        replaced.append(predict(x[:, -1]))
    return own, torch.stack(replaced)


@dataclass
class DonorShares:
    """How far predictions go to a donor, for each depth."""

    nearer: list  # the share of rows that are nearer to the donor's prediction than to their own
    can: int  # rows whose likeliest token is not the donor's
    follows: list | None  # the share of these that take the donor's; None where there are none


def donor_shares(own, replaced):
    """The DonorShares of what `substitute` returns."""
    donor = own.roll(1, dims=0)  # (B, V)
    to_own = (own.exp() * (own - replaced)).sum(dim=-1)  # KL divergences, (n_layers + 1, B)
    to_donor = (donor.exp() * (donor - replaced)).sum(dim=-1)
    differ = own.argmax(dim=-1) != donor.argmax(dim=-1)  # (B,)
    follows = None
    if differ.any():  # early in a training it may be none
        takes = replaced.argmax(dim=-1) == donor.argmax(dim=-1)
        follows = takes[:, differ].double().mean(dim=1).tolist()
    return DonorShares(
        nearer=(to_donor < to_own).double().mean(dim=1).tolist(),
        can=differ.sum().item(),
        follows=follows,
    )


# ---------------- One run


@dataclass
class Run:
    """The record of a finished run, as its file holds it."""

    interface: str  # its input layer
    seed: int
    setting: dict  # see setting_of
    updates: list  # made at each moment
    moments: list  # of what `measure` returns
    ids: int  # distinct ones that are probed
    nats: float  # held-out loss per token
    rises: list  # of that loss, without each block
    nearer: list  # see DonorShares
    can: int
    follows: list | None
    seconds: float
    torch: str  # version


def make_run(config, setting, device, dtype):
    """Train one model and measure it on the way; returns its Run."""
    started = time.perf_counter()
    val = open_shards(config.data, "val")
    windows = validation_windows(val, config.max_seq_len, config.eval_windows)
    ids, targets = read_windows(val, windows, config.max_seq_len)
    model = Transformer(config).to(device).train()
    questions = make_questions(model, config, ids.numpy())
    ids = ids.to(device)
    targets = targets.to(device)

    updates = sorted({0, *(config.max_updates >> halvings for halvings in HALVINGS)})
    moments = [measure(model, ids, questions)]
    for done in fit(model, config, dtype):
        if done in updates:
            moments.append(measure(model, ids, questions))
    with autocast(device, dtype):
        nats, rises = loss_without_blocks(model, ids, targets)
    shares = donor_shares(*substitute(model, ids))
    return Run(
        interface=config.input_layer,
        seed=config.seed,
        setting=setting,
        updates=updates,
        moments=moments,
        ids=len(questions.half),
        nats=nats,
        rises=rises,
        nearer=shares.nearer,
        can=shares.can,
        follows=shares.follows,
        seconds=time.perf_counter() - started,
        torch=torch.__version__,
    )


def read_formation_runs(folder, setting):
    """The Runs in a folder. Raises ValueError where one is of another size or of other data, or
    lacks a field."""
    names = {field.name for field in fields(Run)}
    records = read_runs_of(folder, names, setting)
    return [Run(**{name: record[name] for name in names}) for record in records]


# ---------------- Over seeds


@dataclass(kw_only=True)
class Summary:
    """An interface over its seeds, as formation.json holds it: intervals in place of numbers."""

    moments: list
    ids: dict
    nats: dict
    rises: list
    nearer: list
    can: dict
    follows: list | None = None  # left out where a seed has none
    updates: list
    seeds: int  # how many


MEASURED = ("moments", "ids", "nats", "rises", "nearer", "can", "follows")


def over_seeds(values):
    """Values of each seed -> the same shape with intervals; a key that a seed lacks is left out."""
    if isinstance(values[0], dict):
        keys = [key for key in values[0] if all(value.get(key) is not None for value in values)]
        return {key: over_seeds([value[key] for value in values]) for key in keys}
    if isinstance(values[0], list):
        return [over_seeds(list(place)) for place in zip(*values, strict=True)]
    return interval(values)


def summarise(runs):
    """name of an interface -> Summary, in the order of INPUT_LAYERS.

    Raises ValueError where there is no run.
    """
    if not runs:
        raise ValueError("there is no run to report; give --seeds")
    summaries = {}
    for name in INPUT_LAYERS:
        of_name = [run for run in runs if run.interface == name]
        if of_name:
            measured = over_seeds([{key: getattr(run, key) for key in MEASURED} for run in of_name])
            summaries[name] = Summary(**measured, updates=of_name[0].updates, seeds=len(of_name))
    return summaries


# ---------------- Report

say = partial(in_words, form=".3f")


def depths_part(summaries, depths):
    """A row for each interface and depth, after training."""
    rows = []
    for name, summary in summaries.items():
        last = summary.moments[-1]
        for depth in depths:
            cells = [say(last[what][depth]) if what in last else "" for what in COLUMNS]
            rows.append([name, str(summary.seeds), str(depth), *cells])
    return table(["interface", "seeds", "depth", *COLUMNS], rows)


def donor_row(name, what, rows_counted, shares):
    """A row of effects_part: shares at each depth, and from which on all are above a half."""
    low = [depth for depth, share in enumerate(shares) if share["mean"] <= 0.5]
    first = max(low, default=-1) + 1
    return [name, f"{what}, of {rows_counted:.0f}", str(first), *map(say, shares)]


def effects_part(summaries, depths, windows):
    """What blocks and residuals do: three rows for each interface."""
    rows = []
    for name, summary in summaries.items():
        what = f"rise of {say(summary.nats)} nats without block"
        rows.append([name, what, "", "", *map(say, summary.rises)])
        rows.append(donor_row(name, "nearer", windows, summary.nearer))
        if summary.follows is not None:
            rows.append(donor_row(name, "follows", summary.can["mean"], summary.follows))
    return table(["interface", "what", "half from depth", *map(str, depths)], rows)


def report(summaries, setting):
    """All tables, as Markdown, each with a sentence on it."""
    depths = range(setting["n_layers"] + 1)
    targets = setting["max_updates"] * setting["targets_per_update"]
    ids = min(summary.ids["mean"] for summary in summaries.values())
    parts = [
        f"{setting['n_layers']} blocks of width {setting['d_model']}, V {setting['vocab_size']:,}, "
        f"{targets:,} targets: mean over seeds ± half of its 95 % t-interval. At each depth, where "
        "0 is the input: AUC of linear probes; the effective rank, exp of the entropy of "
        "normalised squared singular values; and the anisotropy, the mean cosine of all pairs; of "
        f"{ids:,.0f} ids.",
        depths_part(summaries, depths),
        "By how much the loss rises without each block, counted from 1; and with a donor's "
        "residual at each depth, counted from 0, the share of windows whose prediction is nearer "
        "to the donor's, or follows it, and from which depth on that is more than half.",
        effects_part(summaries, depths, setting["eval_windows"]),
    ]
    return "\n\n".join(parts) + "\n"


# ---------------- Picture


def draw_intervals(axes, xs, intervals, look, label):
    """A curve of means, and a band of their intervals where there are several seeds."""
    means = np.array([found["mean"] for found in intervals])
    halves = np.array([found["half"] or 0.0 for found in intervals])
    axes.fill_between(xs, means - halves, means + halves, color=look.colour, alpha=0.12, lw=0)
    draw_curve(axes, xs, means, look, label)


def draw_by_depth(axes, summaries, looks, what):
    """One of COLUMNS against depth, after training."""
    for (name, summary), look in zip(summaries.items(), looks, strict=True):
        intervals = summary.moments[-1].get(what)
        if intervals:
            draw_intervals(axes, range(len(intervals)), intervals, look, name)
    depths = len(next(iter(summaries.values())).nearer)
    axes.set_xticks(range(depths), ["input", *map(str, range(1, depths))])
    axes.set_xlabel("after block")


def draw_by_updates(axes, summaries, looks, what):
    """One of COLUMNS at the last depth against updates."""
    for (name, summary), look in zip(summaries.items(), looks, strict=True):
        intervals = [moment[what][-1] for moment in summary.moments]
        draw_intervals(axes, range(len(intervals)), intervals, look, name)
    updates = next(iter(summaries.values())).updates
    axes.set_xticks(range(len(updates)), updates)  # evenly apart, since most of it is early
    axes.set_xlabel("updates")


def finish_auc(axes):
    """Make an axis one of AUC."""
    axes.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":", label="chance")
    axes.set(ylim=(0.4, 1.04), ylabel="AUC of linear probes")


def draw(summaries, path):
    """Classes of text by depth and while training; then the own code and the rank by depth."""
    looks = looks_of(list(summaries))
    figure, (by_depth, by_updates, own_code, rank) = new_figure(panels=4, width=4.1, height=4.4)

    draw_by_depth(by_depth, summaries, looks, "classes")
    by_depth.set_title("Classes of text, trained model")
    finish_auc(by_depth)

    draw_by_updates(by_updates, summaries, looks, "classes")
    by_updates.set_title("Classes of text, after the last block")
    finish_auc(by_updates)

    draw_by_depth(own_code, summaries, looks, "own code")
    own_code.set_title("Bits of the own code, trained model")
    finish_auc(own_code)

    draw_by_depth(rank, summaries, looks, "effective rank")
    rank.set(title="Effective rank, trained model", ylabel="dimensions", ylim=(0, None))

    for axes in (by_depth, by_updates, own_code, rank):
        label_curves(axes)
    save_figure(figure, path)


# ---------------- The sweep


def as_json(summary):
    """A Summary as formation.json holds it."""
    return {key: value for key, value in asdict(summary).items() if value is not None}


def write_report(out, setting):
    """formation.json, .md and .png from all runs under `out`; returns the Markdown.

    Raises ValueError where there is no run.
    """
    summaries = summarise(read_formation_runs(out / "runs", setting))
    text = report(summaries, setting)
    values = {name: as_json(summary) for name, summary in summaries.items()}
    write_results(out, "formation", {"setting": setting, "interfaces": values}, text)
    draw(summaries, out / "formation.png")
    return text


def redraw(out):
    """formation.png from formation.json in the same folder."""
    values = read_json(out / "formation.json")["interfaces"]
    draw({name: Summary(**of_name) for name, of_name in values.items()}, out / "formation.png")


def sweep(args):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    out = output_folder(args, "formation")
    device = pick_device()
    dtype, _ = pick_dtype("auto", device)
    values = SIZES[args.size] | CHANGES[args.size]
    base = make_config(values, args.data, dtype, compile=False)
    setting = setting_of(base, varied=("input_layer", "seed", "init_seed", "code_seed"))

    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    finished = {(run.interface, run.seed) for run in read_formation_runs(folder, setting)}
    # Seed by seed, so that a sweep that is cut off has compared all interfaces at the first ones.
    for seed in dict.fromkeys(args.seeds):
        for name in interfaces(base.d_model):
            if (name, seed) in finished:
                continue
            config = replace(base, input_layer=name, code_seed=seed, **seeds_of(seed))
            run = make_run(config, setting, device, dtype)
            write_json(folder / f"{name}-seed{seed}.json", asdict(run))
            print(f"{name} seed {seed}: {run.nats:.4f} nats, {run.seconds:.0f} s", flush=True)
        write_report(out, setting)
    text = write_report(out, setting)
    print(f"{text}\nWrote formation.json, formation.md and formation.png to {out}")


def main(argv=None):
    parser = make_study_parser(__doc__, CHANGES)
    add_seeds_option(parser)
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    add_redraw_option(parser, "formation")
    args = parser.parse_args(argv)
    with refusals(parser):
        if args.redraw:
            redraw(output_folder(args, "formation"))
        else:
            sweep(args)


if __name__ == "__main__":
    main()
