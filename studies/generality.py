"""Does a fixed code cost as much elsewhere? Over vocabularies, context lengths and corpora.

    python studies/generality.py                          a smoke of about a minute
    python studies/generality.py --size cpu               some three hours on one core
    python studies/generality.py --size cpu --english FILE.jsonl.xz FILE.jsonl
    python studies/generality.py --size cpu --seeds       no more runs, only the report
    python studies/generality.py --size cpu --redraw      only the picture

The base is the standard library in a BPE of 16,384 ids, read in windows of 256 tokens. Each other
*variant* changes one of the three: another size of the vocabulary, another context, or English
prose in place of code. A *gap* is the held-out loss of an input layer minus that of `learned` in
the same variant at the same seed, and *beyond base* is how far it is from the gap of the base at
that seed; the 95 % intervals are Student's over seeds. At one seed all input layers of a variant
have the same initial backbone, bit for bit, and the same batches. The codes that have a matrix get
another one for each seed.

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
shows only that all of it runs. A vocabulary is changed with all that comes with it: with fewer than
2^15 + 1 ids the highest bits of binary16 are constant zeros (12 bits vary among 4,096 ids), and on
the same text a larger table has fewer targets for each row. A context is changed at the same number
of targets in an update, hence of fewer windows. The learning rate is the same everywhere and was
not tuned. Two corpora are two examples and no sample, and an interval that holds 0 is no proof of
equality.

A finished run is one file under --out/runs and is not made again. generality.json, .md and .png
are made anew from all of them after each seed.
"""

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from model import INPUT_LAYERS, Transformer
from nanocodes.batches import read_windows, validation_windows
from nanocodes.checkpoint import backbone_hash
from nanocodes.command import refusals
from nanocodes.device import autocast, pick_device, pick_dtype
from nanocodes.files import read_json, write_json
from nanocodes.held_out import bits_per_byte, held_out_loss, open_held_out, token_counts
from nanocodes.pictures import GREY, looks_of, new_figure, save_figure
from nanocodes.plan import parameter_counts
from nanocodes.report import table
from nanocodes.shards import SPLITS, open_shards
from studies.common import (
    add_redraw_option,
    add_seeds_option,
    check_keys,
    dtype_name,
    fit,
    in_words,
    interval,
    make_study_parser,
    output_folder,
    read_runs,
    seeds_of,
    setting_of,
    write_results,
)
from train import Config

# ---------------- Variants


@dataclass(frozen=True)
class Variant:
    vocab_size: int = 16_384
    max_seq_len: int = 256
    corpus: str = "stdlib"

    @property
    def folder(self):
        """The name of its data folder; a context needs none of its own."""
        return f"{self.corpus}-{self.vocab_size}"


BASE = Variant()
VARIANTS = {  # in the order in which they are run
    "base": BASE,
    "vocab-4096": replace(BASE, vocab_size=4096),
    "vocab-49152": replace(BASE, vocab_size=49_152),
    "context-64": replace(BASE, max_seq_len=64),
    "context-1024": replace(BASE, max_seq_len=1024),
    "english": replace(BASE, corpus="english"),
}
VAL_SHARE = 0.05

# train_bytes is the text that a run is trained on, held_out_bytes the most that the loss is
# measured on; all others are fields of train.py's Config.
CPU = {
    "train_bytes": 4e6,
    "held_out_bytes": 1.6e6,
    "d_model": 128,
    "n_layers": 4,
    "n_heads": 4,
    "d_ff": 512,
    "targets_per_update": 4096,
    "lr": 2e-3,
}
SMOKE_CHANGES = {
    "train_bytes": 3e4,
    "held_out_bytes": 3e4,
    "d_model": 64,
    "n_layers": 2,
    "d_ff": 192,
    "targets_per_update": 1024,
}
GPU_CHANGES = {
    "train_bytes": 16e6,
    "d_model": 512,
    "n_layers": 8,
    "n_heads": 8,
    "d_ff": 2048,
    "targets_per_update": 32_768,
    "lr": 1e-3,
}
SIZES = {"smoke": CPU | SMOKE_CHANGES, "cpu": CPU, "gpu": CPU | GPU_CHANGES}


# ---------------- Data and configs


def prepare_data(sources, vocab_size, folder):
    """Make a data folder of some sources, as prepare.py does, unless it is there."""
    arguments = [word for source in sources for word in ("--source", str(source))]
    arguments += ["--tokenizer", f"bpe:{vocab_size}", "--val_share", str(VAL_SHARE)]
    prepare.main([*arguments, "--out", str(folder)])


def data_folders(root, english):
    """{name of a variant: its data folder}, made where it is missing.

    `english` is a list of paths, or None: then the folder of an earlier call serves, and without
    one the variant is left out.
    """
    sources = {"stdlib": ["stdlib"], "english": english}
    folders = {}
    for name, variant in VARIANTS.items():
        folder = Path(root) / variant.folder
        if sources[variant.corpus] and folder not in folders.values():
            prepare_data(sources[variant.corpus], variant.vocab_size, folder)
        if sources[variant.corpus] or folder.exists():
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
    train, val = (open_shards(folder, split) for split in SPLITS)
    shape = {key: value for key, value in size.items() if not key.endswith("_bytes")}
    length = variant.max_seq_len
    updates = count_for(size["train_bytes"], train, size["targets_per_update"])
    return Config(
        **shape,
        data=str(folder),
        vocab_size=train.meta["vocab_size"],
        max_seq_len=length,
        micro_batch=size["targets_per_update"] // length,
        min_lr=size["lr"] / 10,
        max_updates=updates,
        warmup_updates=updates // 12,
        eval_windows=count_for(size["held_out_bytes"], val, length),
        dtype=dtype,
        compile=compile,
    )


def describe(corpus, config):
    """What the report says of a variant, with the sources of its text, without their folders."""
    train, val = (open_shards(config.data, split) for split in SPLITS)
    trained = config.max_updates * config.targets_per_update
    counts = token_counts(train, 0, min(train.tokens, trained)) + 1
    windows = validation_windows(val, config.max_seq_len, config.eval_windows)
    _, targets = read_windows(val, windows, config.max_seq_len)
    unigram = float(-np.log(counts / counts.sum())[targets].mean())
    sources = [source | {"source": Path(source["source"]).name} for source in val.meta["sources"]]
    return {
        "corpus": corpus,
        "vocab_size": config.vocab_size,
        "context": config.max_seq_len,
        "updates": config.max_updates,
        "targets": trained,
        "train_bytes_per_token": train.bytes / train.tokens,
        "held_out_bytes_per_token": val.bytes / val.tokens,
        "held_out_targets": targets.numel(),
        "unigram": {"nats": unigram, "bits_per_byte": bits_per_byte(unigram, val)},
        "sources": sources,
    }


# ---------------- Runs


def run(config, device, dtype):
    """Train and measure one input layer; returns what its record holds beside its name."""
    started = time.perf_counter()
    model = Transformer(config)
    backbone = backbone_hash(model)
    model.to(device).train()
    for _ in fit(model, config, dtype):
        pass
    held_out = open_held_out(config.data, config.max_seq_len, config.eval_windows)
    with autocast(device, dtype):
        loss = held_out_loss(model, held_out, config.targets_per_update)
    return {
        "held_out": asdict(loss),
        "parameters": parameter_counts(model),
        "backbone_hash": backbone,
        "torch": torch.__version__,
        "seconds": time.perf_counter() - started,
    }


# What the report takes of a record.
RECORD_KEYS = {"variant", "input_layer", "seed", "held_out", "backbone_hash", "parameters"}


def read_all_runs(folder, settings):
    """{(variant, input layer, seed): record} of all finished runs. `settings` are those of the
    variants. Raises ValueError at a run of another setting."""
    records = read_runs(
        folder,
        RECORD_KEYS,
        is_ours=lambda record: (
            record.get("setting") == settings.get(str(record.get("variant")), {})
        ),
        mismatch="of another size or --lr, or of data that changed or are not at hand",
    )
    return {
        (record["variant"], record["input_layer"], record["seed"]): record for record in records
    }


# ---------------- Report


def summarise(runs, variant):
    """{input layer: figures} of one variant, with gaps to `learned` at the same seeds.

    Raises ValueError if backbones of one seed began unlike.
    """
    seeds = sorted(seed for name, layer, seed in runs if (name, layer) == (variant, "learned"))
    layers = {}
    for layer in INPUT_LAYERS:
        pairs = [
            (runs[variant, layer, seed], runs[variant, "learned", seed])
            for seed in seeds
            if (variant, layer, seed) in runs
        ]
        if any(record["backbone_hash"] != learned["backbone_hash"] for record, learned in pairs):
            raise ValueError(
                f"{layer} and learned of {variant} began unlike; make their runs again"
            )
        if pairs:
            layers[layer] = summarise_pairs(pairs)
    return layers


def summarise_pairs(pairs):
    """The figures of an input layer, from pairs of its record and learned's at the same seed."""
    figures = {
        "seeds": [record["seed"] for record, _ in pairs],
        "parameters": pairs[0][0]["parameters"],
    }
    for name, key in {"nats": "nats_per_token", "bits_per_byte": "bits_per_byte"}.items():
        losses = np.array([record["held_out"][key] for record, _ in pairs])
        gaps = losses - np.array([learned["held_out"][key] for _, learned in pairs])
        figures[name] = float(losses.mean())
        figures[f"gap_{name}"] = interval(gaps)
    # Those in bits per byte, which alone can be compared between variants.
    figures["gaps"] = dict(zip(figures["seeds"], gaps.tolist(), strict=True))
    return figures


def compare(layers, base):
    """Add "beyond_base" to the input layers of a variant: by how much more bits per byte they lose
    than in the base, at the seeds that both have."""
    for layer, figures in layers.items():
        of_base = base.get(layer, {}).get("gaps", {})
        beyond = [gap - of_base[seed] for seed, gap in figures["gaps"].items() if seed in of_base]
        figures["beyond_base"] = interval(beyond) if beyond else None


HEADER = [
    "variant",
    "corpus",
    "V",
    "context",
    "updates",
    "input layer",
    "seeds",
    "nats per token",
    "bits per byte",
    "gap, nats per token",
    "gap, bits per byte",
    "beyond base, bits per byte",
]


def report_row(name, variant, layer, figures):
    """A row of the table, of an input layer or of unigram."""
    gaps = [figures.get(key) for key in ("gap_nats", "gap_bits_per_byte", "beyond_base")]
    return [
        name,
        variant["corpus"],
        f"{variant['vocab_size']:,}",
        f"{variant['context']:,}",
        f"{variant['updates']:,}",
        layer,
        str(len(figures["seeds"])) if "seeds" in figures else "",
        f"{figures['nats']:.4f}",
        f"{figures['bits_per_byte']:.4f}",
        *("" if gap is None else in_words(gap) for gap in gaps),
    ]


def report(variants, size):
    """The table, as Markdown."""
    yield (
        f"{size['n_layers']} blocks of width {size['d_model']}, trained on "
        f"{size['train_bytes'] / 1e6:g} MB of text, peak learning rate {size['lr']:g}. A gap is "
        "the held-out loss minus that of `learned` at the same seeds, ± half of its 95 % "
        "t-interval over seeds. `unigram` is the loss of guessing by token frequency."
    )
    rows = []
    for name, variant in variants.items():
        rows.append(report_row(name, variant, "unigram", variant["unigram"]))
        for layer, figures in variant["input_layers"].items():
            rows.append(report_row(name, variant, layer, figures))
    yield table(HEADER, rows)


# ---------------- Picture

# What the panels vary, and how they name it.
PANELS = {
    "vocab_size": "ids of the vocabulary",
    "max_seq_len": "context, tokens",
    "corpus": "corpus",
}


def names_along(variants, field):
    """The variants that differ from the base in this field alone, and the base, in its order."""
    names = [
        name
        for name in variants
        if replace(VARIANTS[name], **{field: getattr(BASE, field)}) == BASE
    ]
    return sorted(names, key=lambda name: getattr(VARIANTS[name], field))


def draw_panel(axes, variants, field, layers):
    """The gap of each input layer against one field of the variants."""
    names = names_along(variants, field)
    for i, (layer, look) in enumerate(zip(layers, looks_of(layers), strict=True)):
        there = [name for name in names if layer in variants[name]["input_layers"]]
        gaps = [variants[name]["input_layers"][layer]["gap_bits_per_byte"] for name in there]
        shift = 0.04 * (i - (len(layers) - 1) / 2)  # so that no interval hides another
        axes.errorbar(
            [names.index(name) + shift for name in there],
            [gap["mean"] for gap in gaps],
            [gap["half"] or 0 for gap in gaps],
            color=look.colour,
            linestyle="" if field == "corpus" else look.line_style,
            marker=look.marker,
            capsize=3,
            label=layer,
        )
    values = [getattr(VARIANTS[name], field) for name in names]
    axes.set_xticks(range(len(names)), [v if field == "corpus" else f"{v:,}" for v in values])
    axes.set(xlabel=PANELS[field], xlim=(-0.5, len(names) - 0.5))
    axes.axhline(0, color=GREY, linewidth=0.8)


def draw(variants, path):
    """The gap in bits per byte of each input layer against vocabulary, context and corpus."""
    layers = [
        layer
        for layer in INPUT_LAYERS
        if layer != "learned" and any(layer in v["input_layers"] for v in variants.values())
    ]
    figure, panels = new_figure(panels=len(PANELS), width=4.7, height=4.5)
    for axes, field in zip(panels, PANELS, strict=True):
        if axes is not panels[0]:
            axes.sharey(panels[0])
        draw_panel(axes, variants, field, layers)
    panels[0].set(ylabel="bits per byte above learned", title="Gap, 95 % interval over seeds")
    if layers:
        panels[0].legend(frameon=False)
    save_figure(figure, path)


# ---------------- The sweep


@dataclass
class Prepared:
    """A variant whose data are at hand."""

    config: Config  # without input layer and seeds
    setting: dict  # all that decides its runs but these; records hold it
    description: dict  # what the report says of it


def prepare_variants(args, size, layers, dtype):
    """{name of a variant: Prepared}. Raises ValueError if an input layer cannot be built."""
    prepared = {}
    for name, folder in data_folders(args.data, args.english).items():
        variant = VARIANTS[name]
        config = make_config(size, variant, folder, dtype_name(dtype), args.compile)
        varied = {"seed", "init_seed", "code_seed", "input_layer"}
        prepared[name] = Prepared(
            config, setting_of(config, varied), describe(variant.corpus, config)
        )
        for layer in layers:  # refuses what cannot be built before anything is trained
            with torch.device("meta"):
                Transformer(replace(config, input_layer=layer))
    return prepared


def write_report(out, size, prepared):
    """generality.json, .md and .png from all runs under `out`; returns the Markdown.

    Raises ValueError where there is no run.
    """
    settings = {name: variant.setting for name, variant in prepared.items()}
    runs = read_all_runs(out / "runs", settings)
    summaries = {name: summarise(runs, name) for name in prepared}
    for layers in summaries.values():
        compare(layers, summaries.get("base", {}))
    variants = {
        name: prepared[name].description | {"input_layers": layers}
        for name, layers in summaries.items()
        if layers
    }
    if not variants:
        raise ValueError("there is no run of learned, to which all gaps are; give --seeds")
    text = "\n\n".join(report(variants, size)) + "\n"
    values = {
        "torch": torch.__version__,
        "size": size,
        "settings": settings,
        "variants": variants,
    }
    write_results(out, "generality", values, text)
    draw(variants, out / "generality.png")
    return text


def make_run(name, variant, layer, seed, device, dtype, folder):
    """Make one run and write its record."""
    config = replace(variant.config, input_layer=layer, code_seed=seed, **seeds_of(seed))
    record = {"variant": name, "input_layer": layer, "seed": seed, "setting": variant.setting}
    record |= run(config, device, dtype)
    write_json(folder / f"{name}-{layer}-seed{seed}.json", record)
    loss = record["held_out"]["bits_per_byte"]
    print(f"{name} {layer} {seed}: {loss:.4f} bits/byte, {record['seconds']:.0f} s", flush=True)


def sweep(args, out):
    """Make the runs that are missing, and the report. Raises ValueError to refuse."""
    size = dict(SIZES[args.size])
    if args.lr is not None:
        size["lr"] = args.lr
    layers = args.input_layers or ["binary16", f"signs{size['d_model']}"]
    for layer in layers:
        if layer not in INPUT_LAYERS:
            raise ValueError(f"there is no input layer {layer}; take of {', '.join(INPUT_LAYERS)}")
    device = pick_device()
    dtype, _ = pick_dtype("auto", device)
    prepared = prepare_variants(args, size, layers, dtype)
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    made = read_all_runs(folder, {name: variant.setting for name, variant in prepared.items()})
    for seed in dict.fromkeys(args.seeds):  # one that is cut off has compared all at the first
        for name, variant in prepared.items():
            for layer in dict.fromkeys(["learned", *layers]):
                if (name, layer, seed) not in made:
                    make_run(name, variant, layer, seed, device, dtype, folder)
        write_report(out, size, prepared)
    text = write_report(out, size, prepared)
    print(f"\n{text}\nWrote generality.json, generality.md and generality.png to {out}")


def redraw(out):
    """Draw generality.png from the generality.json in `out`."""
    recorded = read_json(out / "generality.json")
    check_keys(out / "generality.json", recorded, {"variants"})
    draw(recorded["variants"], out / "generality.png")
    print(f"Wrote generality.png to {out}")


def main(argv=None):
    parser = make_study_parser(__doc__, SIZES)
    parser.add_argument(
        "--input_layers",
        nargs="+",
        help="beside learned; default binary16 and signs as wide as the model",
    )
    add_seeds_option(parser)
    parser.add_argument("--data", metavar="DIR", default="data", help="where data folders are made")
    parser.add_argument("--english", nargs="+", metavar="PATH", help="English text; see prepare.py")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the size's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    add_redraw_option(parser, "generality")
    args = parser.parse_args(argv)
    with refusals(parser):
        out = output_folder(args, "generality")
        if args.redraw:
            redraw(out)
        else:
            sweep(args, out)


if __name__ == "__main__":
    main()
