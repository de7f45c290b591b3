"""Checkpoints -> numbers: held-out loss, the paper's benchmarks, one table and one picture.

    python evaluate.py out/learned-smoke out/binary16-smoke out/gf2-smoke
    python evaluate.py out/learned out/gf2 hf:HuggingFaceTB/SmolLM2-135M --tasks paper

RUN is a run folder (its newest checkpoint), a step folder, a Hugging Face Llama folder or
hf:<repository>. Writes results.json, table.md and comparison.png. A task that is done is kept
under --out and not scored again. Under torchrun the ranks share the work.
"""

import argparse
import json
import math
import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import harness
import shards
from convert import fetch_hf, is_hf, load_hf
from device import from_rank_0, join_ranks, named, pick_device, pick_dtype, rank_and_world, refusals
from model import find_checkpoint, load_checkpoint
from tokenizer import tokenizer_path
from train import read_metrics

COUNTED = 100_000_000  # training tokens counted for the frequencies, from the first on
DECILES = 10
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")


# ---------------- Runs


def validation_curve(run):
    """Targets seen and validation losses of a run folder, as it was trained."""
    try:
        points = [m for m in read_metrics(run) if "val_loss" in m]
        return [int(m["targets"]) for m in points], [float(m["val_loss"]) for m in points]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run / 'metrics.jsonl'} is damaged ({error}); mend or move it") from None


def open_run(text):
    """What a RUN is, without its weights. Raises ValueError if it is no checkpoint."""
    path = Path(text.removeprefix("hf:")).resolve()
    folder = fetch_hf(text.removeprefix("hf:")) if text.startswith("hf:") else path
    hugging_face, state = is_hf(folder), {}
    step = folder if hugging_face else find_checkpoint(folder)
    config = shards.read_json(step / "config.json")
    if (step / "state.json").is_file():
        state = shards.read_json(step / "state.json")
    tokenizer = tokenizer_path(step)
    files = [*sorted(step.glob("*.safetensors")), step / "config.json", tokenizer]
    context = "max_position_embeddings" if hugging_face else "max_seq_len"
    for key in ("vocab_size", context):
        if type(config.get(key)) is not int or not 0 < config[key] < 2**31:
            raise ValueError(f"{step / 'config.json'} has no {key} above 0; use another checkpoint")
    kinds, found = dict(data=str, input_layer=str, update=int, targets=int), config | state
    if any(type(found.get(name)) not in (kind, type(None)) for name, kind in kinds.items()):
        raise ValueError(f"{step} has a damaged config.json or state.json; use another checkpoint")
    return {
        "name": "/".join(path.parts[-2:] if path.name.startswith("step_") else path.parts[-1:]),
        "checkpoint": str(step),
        "hugging_face": hugging_face,
        "input_layer": config.get("input_layer", "learned"),
        "vocab_size": config["vocab_size"],
        "max_seq_len": config[context],
        "data": config.get("data"),
        "data_sha256": state.get("data_sha256"),
        "update": state.get("update"),
        "targets": state.get("targets"),
        "tokenizer": str(tokenizer),
        "sha256": {file.name: shards.sha256(file) for file in files},
        "validation": validation_curve(step.parent),
    }


def open_runs(texts):
    """All RUNs, named by their folders, or as they were given where two names agree."""
    runs = [open_run(text) for text in texts]
    names = [run["name"] for run in runs]
    for run, text in zip(runs, texts, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = text
    return runs


def load_run(run, device):
    """The run's Transformer, float32, in eval mode."""
    if run["hugging_face"]:
        return load_hf(Path(run["checkpoint"])).to(device)
    return load_checkpoint(run["checkpoint"], device)


# ---------------- Held-out loss


def token_counts(split, start, stop):
    """How often each id stands among tokens start..stop-1 of a split, (V,) int64."""
    counts = np.zeros(split.meta["vocab_size"], dtype=np.int64)
    for first in range(start, stop, 2**24):
        counts += np.bincount(split.read(first, min(first + 2**24, stop)), minlength=len(counts))
    return counts


def deciles(train_counts, target_counts):
    """The decile of each id, (V,): 0 holds the ids most frequent in training.

    The targets, sorted by how often their id occurs in training, are cut into ten groups of
    equal size. An id goes whole into the group where the middle one of its targets lies.
    """
    order = np.argsort(-train_counts, kind="stable")
    sizes = target_counts[order]
    middles = sizes.cumsum() - sizes / 2
    decile = np.empty(len(order), dtype=np.int64)
    decile[order] = np.minimum(middles * DECILES // sizes.sum(), DECILES - 1)
    return decile


def open_held_out(runs, folder):
    """The runs' validation split, its windows, the decile of each id, and facts for the report."""
    folders = {run["data"] for run in runs} if folder is None else {folder}
    if len(folders) != 1 or None in folders:
        names = " and ".join(sorted(map(str, folders - {None}))) or "data unknown here"
        raise ValueError(f"the runs were trained on {names}; name the data to use with --data")
    given, folder = folder is not None, folders.pop()  # given by hand, or by the runs
    val, train = shards.open_shards(folder, "val"), shards.open_shards(folder, "train")
    made = shards.sha256(val.folder / "meta.json")
    for run in runs:
        if not given and run["data_sha256"] not in (None, made):
            raise ValueError(f"{folder} changed after {run['name']} was made; give it as --data")
        same = run["sha256"]["tokenizer.json"] == val.meta["tokenizer_sha256"]
        if not same or run["vocab_size"] < val.meta["vocab_size"]:
            raise ValueError(
                f"{run['name']} has another tokenizer than {folder}, so that losses do not "
                "compare; evaluate it apart, on data of its own tokenizer"
            )
    length = min(run["max_seq_len"] for run in runs)
    windows = shards.validation_windows(val, length, 0)
    train_counts = token_counts(train, 0, min(train.tokens, COUNTED))
    target_counts = token_counts(val, 1, len(windows) * length + 1)
    decile = deciles(train_counts, target_counts)
    unigram = -np.log((train_counts + 1) / (train_counts + 1).sum())
    in_decile = np.eye(DECILES)[decile] * target_counts[:, None]  # (V, deciles) targets
    facts = {
        "data": folder,
        "windows": len(windows),
        "targets_per_window": length,
        "targets": int(target_counts.sum()),
        "counted_training_tokens": int(train_counts.sum()),
        "unigram": float(unigram @ target_counts) / int(target_counts.sum()),
        "decile_targets": in_decile.sum(axis=0).astype(int).tolist(),
        "decile_unigram": (unigram @ in_decile / in_decile.sum(axis=0).clip(1)).tolist(),
    }
    return val, windows, torch.from_numpy(decile), facts


def held_out_loss(model, val, windows, decile, facts, batch_tokens):
    """Nats per token, bits per byte, perplexity, and nats per token in each decile (or None)."""
    from tqdm import tqdm

    rank, world = rank_and_world()
    quiet = rank > 0 or None  # None: where there is no terminal
    progress = tqdm(total=facts["targets"] // world, desc="held-out targets", disable=quiet)

    def decile_sums(ids, targets):
        progress.update(targets.numel())
        losses = model.losses(ids, targets).flatten().cpu().double()
        sums = torch.zeros(DECILES, dtype=torch.float64)
        return sums.index_add(0, decile[targets.flatten().cpu()], losses)

    length, device = facts["targets_per_window"], model.head.weight.device
    batch = max(1, batch_tokens // length)
    sums = shards.held_out_sum(decile_sums, val, windows, length, batch, device)
    progress.close()
    nats, counts = float(sums.sum()) / facts["targets"], facts["decile_targets"]
    return {
        "nats_per_token": nats,
        "bits_per_byte": shards.bits_per_byte(nats, val),
        "perplexity": math.exp(min(nats, 700)),
        "deciles": [float(s) / n if n else None for s, n in zip(sums, counts, strict=True)],
    }


# ---------------- Report


def number(value, places=0):
    """A figure with thousands marked; nothing for None."""
    return "" if value is None else f"{value:,}" if places == 0 else f"{value:,.{places}f}"


def table(header, rows):
    """A Markdown table, padded so that it also reads well on a terminal."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (header, rule, *rows):
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def held_out_report(runs, facts):
    """Two tables: the losses, and these by token frequency."""
    runs = [run for run in runs if run["held_out"]]
    yield (
        f"Held-out loss on {facts['data']}: {facts['targets']:,} targets in {facts['windows']:,} "
        f"windows of {facts['targets_per_window']:,}, the same for every run. `unigram` is the "
        "loss of the same targets under the token frequencies of the training split (its first "
        f"{facts['counted_training_tokens']:,} tokens, each count plus one)."
    )
    rows = [["unigram", number(facts["unigram"], 4), "", number(math.exp(facts["unigram"]), 2)]]
    for run in runs:
        loss = run["held_out"]
        rows.append([run["name"], number(loss["nats_per_token"], 4)])
        rows[-1] += [number(loss["bits_per_byte"], 4), number(loss["perplexity"], 2)]
    yield table(["run", "nats per token", "bits per byte", "perplexity"], rows)
    yield (
        "Nats per token by token frequency: the targets sorted by how often their id occurs in "
        "training, most frequent first, in ten groups as equal as whole ids allow."
    )
    rows = []
    for d, targets in enumerate(facts["decile_targets"]):
        figures = [run["held_out"]["deciles"][d] for run in runs]
        if targets:
            rows.append([str(d + 1), number(targets), number(facts["decile_unigram"][d], 3)])
            rows[-1] += [number(figure, 3) for figure in figures]
    yield table(["decile", "targets", "unigram", *(run["name"] for run in runs)], rows)


def tasks_report(results):
    """Two tables: every run's figures beside the paper's, and the differences from the first."""
    runs = results["runs"]
    names = [run["name"] for run in runs]
    yield (
        f"Benchmarks (lm-eval {results['harness']}, "
        + (f"the first {results['limit']} documents of each task, " if results["limit"] else "")
        + "percent, WikiText perplexity per word), ± standard error, and in brackets what the "
        "paper gives for such a model after 100B targets."
    )
    rows, differences = [], []
    for task, first in runs[0]["tasks"].items():
        title = harness.PAPER.get(task, (task,))[0]
        rows.append([title, first["metric"], number(first["documents"])])
        for run in runs:
            figure = run["tasks"][task]
            cell = number(figure["value"], 2)
            cell += "" if figure["stderr"] is None else f" ± {figure['stderr']:.2f}"
            rows[-1].append(cell + (f" [{figure['published']}]" if figure["published"] else ""))
        differences.append([title])
        for run in runs[1:]:
            d = run["tasks"][task]["difference"]
            differences[-1].append(f"{d['value']:+.2f} ({d['low']:+.2f} to {d['high']:+.2f})")
    yield table(["task", "metric", "documents", *names], rows)
    if runs[1:]:
        yield f"Difference from {names[0]}, and its 95 % interval by a paired bootstrap."
        yield table(["task", *names[1:]], differences)


def report(results):
    """All tables, as Markdown."""
    rows = []
    for run in results["runs"]:
        counts = run["parameters"]
        rows.append([run["name"], run["input_layer"], number(run["update"])])
        rows[-1] += [number(run["targets"]), *map(number, counts.values())]
        rows[-1].append(number(sum(counts.values())))
    header = ["run", "input layer", "update", "targets seen", "input", "backbone", "head", "all"]
    parts = [f"Parameters by group. Scored in {results['dtype']}.", table(header, rows)]
    if results["held_out"]:
        parts += held_out_report(results["runs"], results["held_out"])
    if results["harness"]:
        parts += tasks_report(results)
    return "\n\n".join(parts) + "\n"


def draw(results, path):
    """comparison.png: validation loss while training, loss by token frequency, and benchmarks."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    runs, facts = results["runs"], results["held_out"]
    panels = 2 * bool(facts) + bool(results["harness"])
    figure = Figure(figsize=(6 * panels, 4.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    looks = [
        dict(color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)], marker="o")
        | dict(markersize=3.5, label=run["name"])
        for i, run in enumerate(runs)
    ]
    if facts:
        left, right = axes[:2]
        left.set(xscale="log", yscale="log", xlabel="targets seen", ylabel="nats per token")
        left.set_title("Validation loss while training")
        left.yaxis.set_major_formatter(ScalarFormatter())
        left.yaxis.set_minor_formatter(ScalarFormatter())
        left.axhline(facts["unigram"], color="grey", linewidth=0.8, label="unigram")
        right.set(xlabel="decile of targets, frequent to rare", ylabel="nats per token")
        right.set_title("Held-out loss by token frequency")
        used = [d for d in range(DECILES) if facts["decile_targets"][d]]
        unigram = [facts["decile_unigram"][d] for d in used]
        right.plot([d + 1 for d in used], unigram, color="grey", linewidth=0.8, label="unigram")
        for run, look in zip(runs, looks, strict=True):
            if run["held_out"]:
                left.plot(*run["validation"], **look)
                losses = [run["held_out"]["deciles"][d] for d in used]
                right.plot([d + 1 for d in used], losses, **look)
    if results["harness"]:
        tasks = [t for t, r in runs[0]["tasks"].items() if r["metric"] != "word_perplexity"]
        for i, (run, look) in enumerate(zip(runs, looks, strict=True)):
            values = [run["tasks"][task]["value"] for task in tasks]
            errors = [run["tasks"][task]["stderr"] or 0 for task in tasks]
            rows = np.arange(len(tasks)) + 0.6 * ((i + 0.5) / len(runs) - 0.5)
            axes[-1].errorbar(values, rows, xerr=errors, **look | {"linestyle": "none"})
        titles = [harness.PAPER.get(task, (task,))[0] for task in tasks]
        axes[-1].set_yticks(range(len(tasks)), titles)
        axes[-1].invert_yaxis()
        axes[-1].set(xlabel="percent ± standard error", title="Benchmarks")
    for axis in axes:
        axis.grid(True, which="both", alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    with named(path):
        figure.savefig(path, dpi=150)


def evaluate(args):
    """Measure all runs; rank 0 writes and prints the report. Raises ValueError to refuse."""
    device = pick_device(args.device)
    dtype, reason = pick_dtype(args.dtype, device)
    dtype_name = str(dtype).removeprefix("torch.")
    rank, world = join_ranks(device)
    out = Path(args.out)
    names = list(harness.PAPER) if args.tasks == ["paper"] else list(dict.fromkeys(args.tasks))
    if args.batch_tokens < 1:
        raise ValueError(f"--batch_tokens {args.batch_tokens} is below 1; raise it")
    if args.limit is not None and args.limit < world:
        raise ValueError(f"--limit {args.limit} leaves a rank of {world} without work; raise it")
    if args.benchmarks:  # before the first import of huggingface_hub, which looks here
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    runs, held_out, facts = open_runs(args.runs), None, None
    measured = [run for run in runs if args.data or not names or not run["hugging_face"]]
    try:
        held_out = open_held_out(measured, args.data)
        facts = held_out[-1]
    except ValueError as error:
        if not names:
            raise
        if rank == 0:
            print(f"No held-out loss: {error}\n")
    loaded = harness.load_tasks(names, args.benchmarks) if names else {}
    sets = harness.fingerprint(args.benchmarks) if args.benchmarks else None
    from_rank_0(lambda: out.mkdir(parents=True, exist_ok=True))  # if it cannot be, before the work
    if args.samples:
        from_rank_0(Path(args.samples).touch)
    samples = []  # (name of a run, file of a task's requests)
    for run in runs:
        model = load_run(run, device)
        run.update(parameters=model.parameter_counts(), held_out=None, tasks={})
        key = dict(sha256=run["sha256"], dtype=dtype_name, benchmarks=sets)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if held_out and run in measured:
                run["held_out"] = held_out_loss(model, *held_out, args.batch_tokens)
            scorer = names and harness.make_scorer(model, run["tokenizer"], args.batch_tokens)
            for name in names:
                record, requests = harness.task_record(
                    scorer, name, loaded[name], args.limit, key, out / "tasks", bool(args.samples)
                )
                run["tasks"][name] = record
                samples.append((run["name"], requests))
    if rank > 0:
        return
    for name in names:
        documents = [run["tasks"][name].pop("documents") for run in runs]
        for run, own in zip(runs, documents, strict=True):
            record = run["tasks"][name]
            kind = run["name"] if run["hugging_face"] else run["input_layer"]
            record.update(documents=len(own), published=harness.published(kind, name))
            record["difference"] = harness.difference(documents[0], own, record["metric"])
    results = dict(torch=torch.__version__, device=str(device), dtype=f"{dtype_name} ({reason})")
    results.update(harness=version("lm-eval") if names else None, limit=args.limit)
    results.update(held_out=facts, runs=runs)
    text = report(results)
    shards.write_json(out / "results.json", results)
    shards.write_whole(out / "table.md", text.encode())
    draw(results, out / "comparison.png")
    if args.samples:
        with named(args.samples), open(args.samples, "w") as file:
            for name, requests in samples:
                for line in requests.read_text().splitlines():
                    file.write(json.dumps({"run": name, **json.loads(line)}) + "\n")
    print(f"{text}\nWrote results.json, table.md and comparison.png to {out}")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", metavar="DIR", help="data folder in place of the runs' own")
    parser.add_argument("--tasks", default=[], type=lambda text: text.split(","),
                        help="paper, or names of lm-eval: name,name:5 (with 5 shots)")
    parser.add_argument("--limit", type=int, help="only so many documents of each task")
    parser.add_argument("--benchmarks", metavar="DIR", help="read the sets here, not on the hub")
    parser.add_argument("--samples", metavar="FILE", help="write a JSON line for each request")
    parser.add_argument("--out", metavar="DIR", default="out/evaluation")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--batch_tokens", type=int, default=8192, help="of a batch")
    args = parser.parse_args(argv)
    with refusals(parser):
        evaluate(args)


if __name__ == "__main__":
    main()
