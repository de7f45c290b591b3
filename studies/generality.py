"""Does a fixed code cost as much elsewhere? Over vocabularies, context lengths and corpora.

    python studies/generality.py                          a smoke of about a minute
    python studies/generality.py --size cpu               some three hours on one core
    python studies/generality.py --size cpu --english FILE.jsonl.xz FILE.jsonl
    python studies/generality.py --size cpu --seeds       no more runs, only the report

The base is the standard library in a BPE of 16,384 ids, read in windows of 256 tokens. Each other
*variant* changes one of the three: another size of the vocabulary, another context, or English
prose in place of code. A *gap* is the held-out loss of an input layer minus that of `learned` in
the same variant at the same seed, and *beyond base* is how far it is from the gap of the base at
that seed; the 95 % intervals are Student's over seeds. At one seed all input
layers of a variant have the same initial backbone, bit for bit, and the same batches. The codes
that have a matrix get another one for each seed.

The larger a vocabulary, the more text is in a token, so that a nat per token means something else
in each. Gaps are therefore compared in bits per byte of text, and all variants train on the same
number of bytes: those with longer tokens make fewer updates. (A shorter text is read more than
once.) Which documents are held out is decided by their text alone, so that all variants of a corpus
hold out the same. At the sizes cpu and gpu the loss is over all 1.5 MB of Python 3.11, but for an
incomplete window at the end.

Data folders are made where they are missing, under --data. The English text is yours, given as
files or a folder that prepare.py reads, once; without it that variant is left out.

What a size can show is whether the gap of a small model early in its training hangs on these
three. It cannot show what is left of a gap after billions of tokens, and the smoke, which stays far
above `unigram`, the loss of guessing by the frequencies of as many tokens as a run is trained on,
shows only that all of it runs. A
vocabulary is changed with all that comes with it: with fewer than 2^15 + 1 ids the highest bits of
binary16 are constant zeros (12 bits vary among 4,096 ids), and on the same text a larger table has
fewer targets for each row. A context is changed at the same number of targets in an update, hence
of fewer windows. The learning rate is the same everywhere and was not tuned. Two corpora are two
examples and no sample, and an interval that holds 0 is no proof of equality.

A finished run is one file under --out/runs and is not made again. generality.json, .md and .png
are made anew from all of them after each seed.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from geometry import check_keys, fit, in_words, interval, open_held_out

import prepare
import shards
from device import pick_device, pick_dtype, refusals
from evaluate import COLOURS, STYLES, held_out_loss, table, token_counts
from model import INPUT_LAYERS, Transformer
from train import FREE, Config

BASE = dict(vocab_size=16_384, max_seq_len=256, corpus="stdlib")
VARIANTS = {  # in the order in which they are run
    "base": BASE,
    "vocab-4096": BASE | dict(vocab_size=4096),
    "vocab-49152": BASE | dict(vocab_size=49_152),
    "context-64": BASE | dict(max_seq_len=64),
    "context-1024": BASE | dict(max_seq_len=1024),
    "english": BASE | dict(corpus="english"),
}
CPU = dict(train_bytes=4e6, held_out_bytes=1.6e6, d_model=128, n_layers=4, n_heads=4, d_ff=512,
           targets_per_update=4096, lr=2e-3)  # fmt: skip
SIZES = {  # held_out_bytes is the most that the loss is measured on
    "smoke": CPU | dict(train_bytes=3e4, held_out_bytes=3e4, d_model=64, n_layers=2, d_ff=192,
                        targets_per_update=1024),
    "cpu": CPU,
    "gpu": CPU | dict(train_bytes=16e6, d_model=512, n_layers=8, n_heads=8, d_ff=2048,
                      targets_per_update=32_768, lr=1e-3),
}  # fmt: skip
VAL_SHARE = 0.05
RUN = {"variant", "input_layer", "seed", "held_out", "backbone_hash", "parameters"}  # of a run
VARIED = ("seed", "init_seed", "code_seed", "input_layer", *FREE)  # what is in no setting


# ---------------- Variants: data and config


def data_folders(root, english):
    """name of a variant -> its data folder, made where it is missing. `english` is paths, or None,
    where the folder of an earlier call serves and without one the variant is left out."""
    sources, folders = dict(stdlib=["stdlib"], english=english), {}
    for name, variant in VARIANTS.items():
        corpus, vocab_size = variant["corpus"], variant["vocab_size"]
        folder = Path(root) / f"{corpus}-{vocab_size}"
        if sources[corpus] and folder not in folders.values():
            chosen = [word for source in sources[corpus] for word in ("--source", str(source))]
            chosen += ["--tokenizer", f"bpe:{vocab_size}", "--val_share", str(VAL_SHARE)]
            prepare.main([*chosen, "--out", str(folder)])
        if sources[corpus] or folder.exists():
            folders[name] = folder
        else:
            print(f"{name} is left out, since {folder} is missing; give --english", file=sys.stderr)
    return folders


def count_for(size, split, unit):
    """How many units of so many tokens, at least one, come nearest to `size` bytes of a split."""
    return max(1, round(size * split.tokens / split.bytes / unit))


def make_config(size, variant, folder, dtype, compile):
    """The Config of a variant at a size, without input layer and seeds. Each update is one
    forward and backward pass, and a twelfth of the updates is warmup."""
    train, val = (shards.open_shards(folder, split) for split in shards.SPLITS)
    shape = {key: value for key, value in size.items() if not key.endswith("_bytes")}
    length, together = variant["max_seq_len"], size["targets_per_update"]
    updates = count_for(size["train_bytes"], train, together)
    return Config(**shape, data=str(folder), vocab_size=train.meta["vocab_size"],
                  max_seq_len=length, micro_batch=together // length, min_lr=size["lr"] / 10,
                  max_updates=updates, warmup_updates=updates // 12,
                  eval_windows=count_for(size["held_out_bytes"], val, length), dtype=dtype,
                  compile=compile)  # fmt: skip


def describe(corpus, config):
    """What the report says of a variant, with the sources of its text, without their folders."""
    train, val = (shards.open_shards(config.data, split) for split in shards.SPLITS)
    seen = min(train.tokens, config.max_updates * config.targets_per_update)
    counts, windows = token_counts(train, 0, seen) + 1, open_held_out(config)[1]
    _, targets = shards.read_windows(val, windows, config.max_seq_len)
    unigram = float(-np.log(counts / counts.sum())[targets].mean())
    sources = [entry | dict(source=Path(entry["source"]).name) for entry in val.meta["sources"]]
    return dict(corpus=corpus, vocab_size=config.vocab_size, context=config.max_seq_len,
                updates=config.max_updates, targets=config.max_updates * config.targets_per_update,
                train_bytes_per_token=train.bytes / train.tokens,
                held_out_bytes_per_token=val.bytes / val.tokens,
                held_out_targets=targets.numel(), unigram=dict(
                    nats=unigram, bits_per_byte=shards.bits_per_byte(unigram, val)),
                sources=sources)  # fmt: skip


# ---------------- One run


def run(config, device, dtype):
    """Train and measure one input layer; returns what its file holds."""
    started = time.perf_counter()
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    held_out, model = open_held_out(config), Transformer(config)
    backbone = model.backbone_hash()
    for _ in fit(model.to(device).train(), config, autocast):
        pass
    with autocast():
        loss = held_out_loss(model, *held_out, config.targets_per_update)
    return dict(held_out=loss, parameters=model.parameter_counts(), backbone_hash=backbone,
                torch=torch.__version__, seconds=time.perf_counter() - started)  # fmt: skip


# ---------------- Report


def read_runs(folder, settings):
    """(variant, input layer, seed) -> finished run. Raises ValueError at one of another setting."""
    runs = {}
    for path in sorted(folder.glob("*.json")):
        record = shards.read_json(path)
        if record.get("setting") != settings.get(str(record.get("variant")), {}):
            what = f"{path} is of another size or --lr, or of data that changed or are not at hand"
            raise ValueError(f"{what}; choose another --out")
        check_keys(path, record, RUN)
        runs[record["variant"], record["input_layer"], record["seed"]] = record
    return runs


def summarise(runs, name):
    """input layer -> figures in one variant, and gaps to `learned` at the same seeds.
    Raises ValueError if backbones of one seed began unlike."""
    layers, seeds = {}, sorted(s for n, layer, s in runs if (n, layer) == (name, "learned"))
    for layer in INPUT_LAYERS:
        pairs = [(runs[name, layer, s], runs[name, "learned", s])
                 for s in seeds if (name, layer, s) in runs]  # fmt: skip
        if any(found["backbone_hash"] != learned["backbone_hash"] for found, learned in pairs):
            raise ValueError(f"{layer} and learned of {name} began unlike; make their runs again")
        if not pairs:
            continue
        layers[layer] = dict(seeds=[found["seed"] for found, _ in pairs])
        layers[layer]["parameters"] = pairs[0][0]["parameters"]
        for short, key in dict(nats="nats_per_token", bits_per_byte="bits_per_byte").items():
            losses = np.array([[run["held_out"][key] for run in pair] for pair in pairs])
            gaps = losses[:, 0] - losses[:, 1]
            layers[layer] |= {short: float(losses[:, 0].mean()), f"gap_{short}": interval(gaps)}
        layers[layer]["gaps"] = dict(zip(layers[layer]["seeds"], gaps.tolist(), strict=True))
    return layers


def compare(layers, base):
    """Add "beyond_base" to the input layers of a variant: by how much more bits per byte they lose
    than in the base, at the seeds that both have."""
    for layer, found in layers.items():
        theirs = base.get(layer, {}).get("gaps", {})
        beyond = [gap - theirs[seed] for seed, gap in found["gaps"].items() if seed in theirs]
        found["beyond_base"] = interval(beyond) if beyond else None


def report(variants, size):
    """The table, as Markdown."""
    yield (
        f"{size['n_layers']} blocks of width {size['d_model']}, trained on "
        f"{size['train_bytes'] / 1e6:g} MB of text, peak learning rate {size['lr']:g}. A gap is "
        "the held-out loss minus that of `learned` at the same seeds, ± half of its 95 % "
        "t-interval over seeds. `unigram` is the loss of guessing by token frequency."
    )
    header = ["variant", "corpus", "V", "context", "updates", "input layer", "seeds"]
    header += ["nats per token", "bits per byte", "gap, nats per token", "gap, bits per byte"]
    header += ["beyond base, bits per byte"]
    rows = []
    for name, found in variants.items():
        start = [name, found["corpus"], f"{found['vocab_size']:,}", f"{found['context']:,}"]
        start.append(f"{found['updates']:,}")
        for layer, losses in (("unigram", found["unigram"]), *found["input_layers"].items()):
            rows.append([*start, layer, str(len(losses.get("seeds", "")) or "")])
            rows[-1] += [f"{losses['nats']:.4f}", f"{losses['bits_per_byte']:.4f}"]
            gaps = [losses.get(key) for key in ("gap_nats", "gap_bits_per_byte", "beyond_base")]
            rows[-1] += ["" if gap is None else in_words(gap) for gap in gaps]
    yield table(header, rows)


def draw(variants, path):
    """The gap in bits per byte of each input layer against vocabulary, context and corpus."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    keys = dict(vocab_size="ids of the vocabulary", max_seq_len="context, tokens", corpus="corpus")
    layers = [name for name in INPUT_LAYERS if name != "learned"]
    layers = [n for n in layers if any(n in v["input_layers"] for v in variants.values())]
    for axis, (key, label) in zip(axes, keys.items(), strict=True):
        # The base and what differs from it in this key alone, in order of the key.
        names = [n for n in variants if VARIANTS[n] | {key: BASE[key]} == BASE]
        names.sort(key=lambda name, key=key: VARIANTS[name][key])
        for i, layer in enumerate(layers):
            there = [n for n in names if layer in variants[n]["input_layers"]]
            gaps = [variants[n]["input_layers"][layer]["gap_bits_per_byte"] for n in there]
            places = [names.index(n) + 0.04 * (i - (len(layers) - 1) / 2) for n in there]
            axis.errorbar(places, [gap["mean"] for gap in gaps], [gap["half"] or 0 for gap in gaps],
                          color=COLOURS[i % len(COLOURS)], marker="o", capsize=3, label=layer,
                          linestyle="" if key == "corpus" else STYLES[i % len(STYLES)])  # fmt: skip
        values = [VARIANTS[n][key] for n in names]
        axis.set_xticks(range(len(names)), [v if key == "corpus" else f"{v:,}" for v in values])
        axis.set(xlabel=label, xlim=(-0.5, len(names) - 0.5))
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.grid(True, alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="bits per byte above learned", title="Gap, 95 % interval over seeds")
    if layers:
        axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


# ---------------- The sweep


def write_report(out, size, settings, facts):
    """generality.json, .md and .png from all runs under `out`; returns the Markdown.
    Raises ValueError where there is no run."""
    runs = read_runs(out / "runs", settings)
    summaries = {name: summarise(runs, name) for name in facts}
    for layers in summaries.values():
        compare(layers, summaries.get("base", {}))
    variants = {name: facts[name] | dict(input_layers=layers)
                for name, layers in summaries.items() if layers}  # fmt: skip
    if not variants:
        raise ValueError("there is no run of learned, to which all gaps are; give --seeds")
    text = "\n\n".join(report(variants, size)) + "\n"
    found = dict(torch=torch.__version__, size=size, settings=settings, variants=variants)
    shards.write_json(out / "generality.json", found)
    shards.write_whole(out / "generality.md", text.encode())
    draw(variants, out / "generality.png")
    return text


def sweep(args):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    out, size = Path(args.out or f"out/generality-{args.size}"), SIZES[args.size]
    size = size | dict(lr=size["lr"] if args.lr is None else args.lr)
    layers = args.input_layers or ["binary16", f"signs{size['d_model']}"]
    if unknown := [name for name in layers if name not in INPUT_LAYERS]:
        raise ValueError(f"there is no input layer {unknown[0]}; take of {', '.join(INPUT_LAYERS)}")
    dtype, _ = pick_dtype("auto", device := pick_device())
    configs, settings, facts = {}, {}, {}
    for name, folder in data_folders(args.data, args.english).items():
        dtype_name = str(dtype).removeprefix("torch.")
        configs[name] = make_config(size, VARIANTS[name], folder, dtype_name, args.compile)
        setting = {k: value for k, value in asdict(configs[name]).items() if k not in VARIED}
        settings[name] = setting | dict(data_sha256=shards.sha256(folder / "meta.json"))
        facts[name] = describe(VARIANTS[name]["corpus"], configs[name])
        for layer in layers:  # refuses what cannot be built before anything is trained
            with torch.device("meta"):
                Transformer(replace(configs[name], input_layer=layer))
    (out / "runs").mkdir(parents=True, exist_ok=True)
    made = read_runs(out / "runs", settings)
    for seed in dict.fromkeys(args.seeds):  # one that is cut off has compared all at the first
        for name, config in configs.items():
            for layer in dict.fromkeys(["learned", *layers]):
                if (name, layer, seed) in made:
                    continue
                # Ten apart, since a table is drawn from init_seed + 1.
                seeds = dict(seed=seed, init_seed=10 * seed, code_seed=seed)
                record = dict(variant=name, input_layer=layer, seed=seed, setting=settings[name])
                record |= run(replace(config, input_layer=layer, **seeds), device, dtype)
                shards.write_json(out / "runs" / f"{name}-{layer}-seed{seed}.json", record)
                loss, seconds = record["held_out"]["bits_per_byte"], record["seconds"]
                print(f"{name} {layer} {seed}: {loss:.4f} bits/byte, {seconds:.0f} s", flush=True)
        write_report(out, size, settings, facts)
    text = write_report(out, size, settings, facts)
    print(f"\n{text}\nWrote generality.json, generality.md and generality.png to {out}")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--size", default="smoke", choices=SIZES)
    parser.add_argument("--input_layers", nargs="+",
                        help="beside learned; default binary16 and signs as wide as the model")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2],
                        help="default 0 1 2; with none it only reports")
    parser.add_argument("--data", metavar="DIR", default="data", help="where data folders are made")
    parser.add_argument("--english", nargs="+", metavar="PATH", help="English text; see prepare.py")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the size's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    parser.add_argument("--out", metavar="DIR", help="default out/generality-<size>")
    args = parser.parse_args(argv)
    with refusals(parser):
        sweep(args)


if __name__ == "__main__":
    main()
