"""How does a representation form on an input that never moves?

    python studies/formation.py                  a smoke of about a minute
    python studies/formation.py --size cpu       an hour on one core
    python studies/formation.py --size gpu       some minutes on a large GPU

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
At depth 0 both tell how much hangs on the last token.

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

import argparse
import keyword
import string
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cost import interfaces
from geometry import SIZES, fit, in_words, interval, read_runs

import shards
from codes import binary_codes
from device import pick_device, pick_dtype, refusals
from evaluate import COUNTED, DECILES, table, token_counts
from model import INPUT_LAYERS, Transformer
from tokenizer import load_tokenizer
from train import FREE, Config

CHANGES = dict(smoke=dict(max_updates=64), cpu=dict(eval_windows=256), gpu=dict(eval_windows=256))
MOMENTS = (5, 3, 2, 1, 0)  # beside the start: after 1/32, 1/8, 1/4, 1/2 and all of the updates
RIDGE = 1e-3  # added to the variance of each feature, which is 1
CLASSES = {  # of a token's text
    "space first": lambda text: text.startswith(" "),
    "letters": lambda text: text.strip(" ").isalpha(),
    "digits": lambda text: any(map(str.isdigit, text)),
    "punctuation": lambda text: set() < set(text.strip(" ")) <= set(string.punctuation),
    "keyword": lambda text: keyword.iskeyword(text.strip(" ")),
}
COLUMNS = ("low bits", "high bits", "own code", "frequency", *CLASSES, "classes", "control",
           "effective rank", "anisotropy")  # classes is the mean of the five  # fmt: skip
MEASURED = ("moments", "ids", "nats", "rises", "nearer", "can", "follows")
RUN = {"interface", "seed", "updates", *MEASURED}  # what the report takes of a run
PICTURED = (*COLUMNS[:4], "classes", "effective rank")


# ---------------- What a residual holds and does


def make_questions(model, config, ids):
    """What is asked of every residual of ids (W, T), the same but for "own code" in all models of a
    seed: a random position of each of n ids; the half (n,) of them that the id is in; (n, 2L) bool,
    L labels of the id, none constant in a half, and those of another in it; their L names."""
    train, generator = shards.open_shards(config.data, "train"), np.random.default_rng(config.seed)
    order = generator.permutation(ids.size)
    present, first = np.unique(ids.flat[order], return_index=True)
    tokenizer = load_tokenizer(Path(config.data) / "tokenizer.json")
    texts = [tokenizer.decode([i]) for i in present]
    labels = {name: np.array([[test(text)] for text in texts]) for name, test in CLASSES.items()}
    bits = binary_codes(present, (config.vocab_size - 1).bit_length()) == 1  # all that vary
    labels["low bits"], labels["high bits"] = np.array_split(bits, 2, axis=1)
    counts = token_counts(train, 0, min(train.tokens, COUNTED))[present]
    labels["frequency"] = counts[:, None] < np.quantile(counts, np.arange(1, DECILES) / DECILES)
    if config.input_layer != "learned":
        labels["own code"] = model.input.weight.cpu().numpy()[present] > 0
    names = np.repeat(list(labels), [group.shape[1] for group in labels.values()])
    labels, others = np.hstack(list(labels.values())), np.arange(len(present))
    half, varies = generator.permutation(len(present)) % 2 == 0, True
    for side in (half, ~half):
        others[side] = generator.permutation(others[side])
        varies &= labels[side].any(axis=0) & ~labels[side].all(axis=0)
    labels = np.hstack((labels[:, varies], labels[others][:, varies]))
    return *map(torch.from_numpy, (order[first], half, labels)), names[varies]


@torch.no_grad()
def residuals(model, ids):
    """The residual of ids (B, T) at each depth, (B, T, d_model). The mask of `model.hidden` is for
    the backward pass: positions that it makes 0 are 0 by themselves."""
    found, T = [model.input(ids)], ids.shape[1]
    for block in model.blocks:
        found.append(block(found[-1], model.cos[:T], model.sin[:T]))
    return found


def right_order(values, labels):
    """AUC (L,): the share of pairs of a true and a false row in which the true one has the greater
    of values (n, L); equal ones count half."""
    columns = values.T.contiguous()  # (L, n)
    ordered, trues = columns.sort(dim=1).values, labels.sum(dim=0)
    below, up_to = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    ranks = (below + up_to + 1).T / 2  # (n, L), from 1
    pairs = trues * (len(values) - trues)
    return ((ranks * labels).sum(dim=0) - trues * (trues + 1) / 2) / pairs


def probe(x, labels, half):
    """AUC (L,) of linear probes for labels (n, L) from x (n, d_model), learned on the positions in
    one half (n,) and scored on those in the other; the mean of both directions."""
    scores = []
    for learn in (half, ~half):
        features = (x - x[learn].mean(dim=0)) / x[learn].std(dim=0).clamp(min=1e-9)
        known, targets = features[learn], 2 * labels[learn].to(x) - 1
        gram = known.T @ known + RIDGE * len(known) * torch.eye(x.shape[1], dtype=x.dtype)
        output = features @ torch.cholesky_solve(known.T @ targets, torch.linalg.cholesky(gram))
        scores.append(right_order(output[~learn], labels[~learn]))
    return sum(scores) / len(scores)


def spread(x):
    """Effective rank of x (n, d_model), exp of the entropy of its normalised squared singular
    values after centring, and its anisotropy, the mean cosine over all pairs of rows."""
    squares = torch.linalg.eigvalsh(torch.cov(x.T)).clamp(min=0)
    rank = torch.special.entr(squares / squares.sum()).sum().exp().item()
    n, total = len(x), torch.nn.functional.normalize(x, dim=1).sum(dim=0)
    return rank, (total.square().sum().item() - n) / (n * (n - 1))


def measure(model, ids, positions, half, labels, names):
    """name -> its value at each depth: of those of COLUMNS that the model has, and "classes"."""
    depths = []
    for x in residuals(model, ids):
        x = x.flatten(0, 1)[positions.to(x.device)].cpu().double()  # (n, d_model)
        scores, control = probe(x, labels, half).chunk(2)
        found = {name: scores[names == name].mean().item() for name in set(names.tolist())}
        found["classes"] = float(np.mean([found[name] for name in CLASSES if name in found]))
        found["control"] = control.mean().item()
        found["effective rank"], found["anisotropy"] = spread(x)
        depths.append(found)
    return {name: [found[name] for found in depths] for name in depths[0]}


@torch.no_grad()
def skip_rises(model, ids, targets):
    """Nats per token, and by how much they rise without each block."""
    blocks, losses = model.blocks, [model.losses(ids, targets).mean().item()]
    for i in range(len(blocks)):
        model.blocks = blocks[:i] + blocks[i + 1 :]
        losses.append(model.losses(ids, targets).mean().item())
    model.blocks = blocks
    return losses[0], [loss - losses[0] for loss in losses[1:]]


@torch.no_grad()
def substitute(model, ids):
    """Log-probabilities of what follows rows of ids (B, T): own (B, V), and for each depth with the
    residual there, at the last position, replaced by that of its donor, the row before."""
    found, T = residuals(model, ids), ids.shape[1]
    ends = [found[-1][:, -1].clone()]
    for depth, x in enumerate(found):
        x[:, -1] = x[:, -1].roll(1, dims=0)
        for block in model.blocks[depth:]:
            x = block(x, model.cos[:T], model.sin[:T])
        ends.append(x[:, -1])
    own, *replaced = (model.head(model.norm(x)).double().log_softmax(dim=-1) for x in ends)
    return own, torch.stack(replaced)  # (B, V), (n_layers + 1, B, V)


def shares(own, replaced):
    """At each depth the share of rows that are nearer to the donor, and the share that follow it
    among those that can: None where there are none, as early in a training."""
    donor = own.roll(1, dims=0)
    to_own, to_donor = ((p.exp() * (p - replaced)).sum(dim=-1) for p in (own, donor))
    differ = own.argmax(dim=-1) != donor.argmax(dim=-1)
    follows = (replaced.argmax(dim=-1) == donor.argmax(dim=-1))[:, differ].double().mean(dim=1)
    return dict(nearer=(to_donor < to_own).double().mean(dim=1).tolist(), can=differ.sum().item(),
                follows=follows.tolist() if differ.any() else None)  # fmt: skip


def run(config, device, dtype):
    """Train one model and measure it on the way; returns what its file holds."""
    started, moments = time.perf_counter(), {config.max_updates >> i for i in MOMENTS}
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    val = shards.open_shards(config.data, "val")
    windows = shards.validation_windows(val, config.max_seq_len, config.eval_windows)
    ids, targets = (x.to(device) for x in shards.read_windows(val, windows, config.max_seq_len))
    model = Transformer(config).to(device).train()
    questions = make_questions(model, config, ids.cpu().numpy())
    found = [measure(model, ids, *questions)]
    found += [measure(model, ids, *questions)
              for done in fit(model, config, autocast) if done in moments]  # fmt: skip
    with autocast():
        nats, rises = skip_rises(model, ids, targets)
    return dict(updates=sorted({0, *moments}), moments=found, ids=len(questions[1]), nats=nats,
                rises=rises, **shares(*substitute(model, ids)),
                seconds=time.perf_counter() - started, torch=torch.__version__)  # fmt: skip


# ---------------- Report and sweep


def over_seeds(values):
    """Values of each seed -> the same shape with intervals; a key that a seed lacks is left out."""
    if isinstance(values[0], dict):
        keys = [key for key in values[0] if all(value.get(key) is not None for value in values)]
        return {key: over_seeds([value[key] for value in values]) for key in keys}
    if isinstance(values[0], list):
        return [over_seeds(list(place)) for place in zip(*values, strict=True)]
    return interval(values)


def report(results, setting):
    """All tables, as Markdown."""
    depths, rows, causes = range(setting["n_layers"] + 1), [], []
    say = partial(in_words, form=".3f")
    for name, found in results.items():
        last = found["moments"][-1]
        for depth in depths:
            cells = [say(last[what][depth]) if what in last else "" for what in COLUMNS]
            rows.append([name, str(found["seeds"]), str(depth), *cells])
        causes.append([name, f"rise of {say(found['nats'])} nats without block", "", ""])
        causes[-1] += map(say, found["rises"])
        for what in ("nearer", "follows"):
            if what in found:
                of = found["can"]["mean"] if what == "follows" else setting["eval_windows"]
                low = [depth for depth in depths if found[what][depth]["mean"] <= 0.5]
                causes.append([name, f"{what}, of {of:.0f}", str(max(low, default=-1) + 1)])
                causes[-1] += map(say, found[what])
    ids = min(found["ids"]["mean"] for found in results.values())
    yield (
        f"{setting['n_layers']} blocks of width {setting['d_model']}, V {setting['vocab_size']:,}, "
        f"{setting['max_updates'] * setting['targets_per_update']:,} targets: mean over seeds ± "
        "half of its 95 % t-interval. At each depth, where 0 is the input: AUC of linear probes; "
        "the effective rank, exp of the entropy of normalised squared singular values; and the "
        f"anisotropy, the mean cosine of all pairs; of {ids:,.0f} ids."
    )
    yield table(["interface", "seeds", "depth", *COLUMNS], rows)
    yield (
        "By how much the loss rises without each block, counted from 1; and with a donor's "
        "residual at each depth, counted from 0, the share of windows whose prediction is nearer "
        "to the donor's, or follows it, and from which depth on that is more than half."
    )
    yield table(["interface", "what", "half from depth", *map(str, depths)], causes)


def draw(results, width, path):
    """Heat maps of depth against updates: PICTURED down, interfaces across."""
    from matplotlib.figure import Figure

    shape = len(PICTURED), len(results)
    figure = Figure(figsize=(4 * shape[1], 2.6 * shape[0]), layout="constrained")
    for row, what in zip(figure.subplots(*shape, squeeze=False), PICTURED, strict=True):
        for axis, (name, found) in zip(row, results.items(), strict=True):
            if what not in found["moments"][0]:
                axis.set_axis_off()
                continue
            least, most, form = (1, width, ".0f") if what == "effective rank" else (0.5, 1, ".2f")
            means = [[depth["mean"] for depth in moment[what]] for moment in found["moments"]]
            axis.imshow(np.transpose(means), aspect="auto", origin="lower", vmin=least, vmax=most)
            for (moment, depth), mean in np.ndenumerate(means):
                colour = "white" if mean < (least + most) / 2 else "black"
                axis.text(moment, depth, f"{mean:{form}}", ha="center", va="center", color=colour)
            axis.set_xticks(range(len(means)), found["updates"])
            axis.set(title=f"{name}: {what}", ylabel="depth", yticks=range(len(means[0])))
            axis.set_xlabel("updates" if what == PICTURED[-1] else "")
    figure.savefig(path, dpi=110)


def write_report(out, setting, records):
    """formation.json, .md and .png of all runs; returns the Markdown. Raises ValueError where there
    are none."""
    results = {}
    for name in INPUT_LAYERS:
        if runs := [record for record in records if record["interface"] == name]:
            results[name] = over_seeds([{key: record[key] for key in MEASURED} for record in runs])
            results[name] |= {"updates": runs[0]["updates"], "seeds": len(runs)}
    if not results:
        raise ValueError("there is no run to report; give --seeds")
    text = "\n\n".join(report(results, setting)) + "\n"
    shards.write_json(out / "formation.json", dict(setting=setting, interfaces=results))
    shards.write_whole(out / "formation.md", text.encode())
    draw(results, setting["d_model"], out / "formation.png")
    return text


def sweep(args):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    out, size = Path(args.out or f"out/formation-{args.size}"), SIZES[args.size]
    dtype, _ = pick_dtype("auto", device := pick_device())
    size = size | CHANGES[args.size] | dict(data=args.data, min_lr=size["lr"] / 10, compile=False)
    size["vocab_size"] = shards.read_meta(args.data)["vocab_size"]
    base = Config(**size, dtype=str(dtype).removeprefix("torch."))
    # All that decides a run but its interface and seed.
    varied = ("input_layer", "seed", "init_seed", "code_seed", *FREE)
    setting = {key: value for key, value in asdict(base).items() if key not in varied}
    setting["data_sha256"] = shards.sha256(Path(args.data) / "meta.json")
    (runs := out / "runs").mkdir(parents=True, exist_ok=True)
    made = {(record["interface"], record["seed"]) for record in read_runs(runs, setting, RUN)}
    for seed in dict.fromkeys(args.seeds):  # one that is cut off has compared all at the first
        for name in interfaces(base.d_model):
            if (name, seed) in made:
                continue
            config = replace(base, input_layer=name, seed=seed, init_seed=10 * seed, code_seed=seed)
            record = dict(interface=name, seed=seed, setting=setting) | run(config, device, dtype)
            shards.write_json(runs / f"{name}-seed{seed}.json", record)
            nats = record["nats"]
            print(f"{name} seed {seed}: {nats:.4f} nats, {record['seconds']:.0f} s", flush=True)
        write_report(out, setting, read_runs(runs, setting, RUN))
    text = write_report(out, setting, read_runs(runs, setting, RUN))
    print(f"{text}\nWrote formation.json, formation.md and formation.png to {out}")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--size", default="smoke", choices=CHANGES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2],
                        help="default 0 1 2; with none it only reports")
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    parser.add_argument("--out", metavar="DIR", help="default out/formation-<size>")
    args = parser.parse_args(argv)
    with refusals(parser):
        sweep(args)


if __name__ == "__main__":
    main()
