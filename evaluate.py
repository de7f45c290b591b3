"""Checkpoints -> numbers: held-out loss, the paper's benchmarks, one table and one picture.

    python evaluate.py out/learned-smoke out/binary16-smoke out/gf2-smoke
    python evaluate.py out/learned out/gf2 hf:HuggingFaceTB/SmolLM2-135M --tasks paper

RUN is a run folder (its newest checkpoint), a step folder, a Hugging Face Llama folder or
hf:<repository>. Writes results.json, table.md and comparison.png. A task that is done is kept
under --out and not scored again. Under torchrun the ranks share the work.
"""

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from convert import fetch_hf, is_hf, load_hf
from model import load_checkpoint
from nanocodes import benchmarks
from nanocodes.benchmarks import Conditions, RecordFile
from nanocodes.checkpoint import find_checkpoint
from nanocodes.command import make_parser, refusals
from nanocodes.comparison import draw_comparison
from nanocodes.device import autocast, pick_device, pick_dtype
from nanocodes.files import naming, read_json, sha256, write_json, write_whole
from nanocodes.held_out import DECILES, HeldOut, HeldOutLoss, held_out_loss, open_held_out
from nanocodes.lm_eval_scorer import make_scorer
from nanocodes.metrics import read_metrics
from nanocodes.plan import parameter_counts
from nanocodes.ranks import from_rank_0, join_ranks
from nanocodes.report import report
from nanocodes.results import Curve, HeldOutTargets, MeasuredRun, Results, Run, TaskResult
from nanocodes.shards import read_meta
from nanocodes.tokenizer import tokenizer_path

# ---------------- Runs


def validation_curve(run):
    """The Curve of a run folder, as it was trained. Raises ValueError on damaged metrics."""
    try:
        points = [m for m in read_metrics(run) if "val_loss" in m]
        return Curve([int(m["targets"]) for m in points], [float(m["val_loss"]) for m in points])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run / 'metrics.jsonl'} is damaged ({error}); mend or move it") from None


def open_run(text):
    """The Run that a RUN means, without its weights. Raises ValueError if it is no checkpoint."""
    path = Path(text.removeprefix("hf:")).resolve()
    folder = fetch_hf(text.removeprefix("hf:")) if text.startswith("hf:") else path
    hugging_face = is_hf(folder)
    step = folder if hugging_face else find_checkpoint(folder)
    config = read_json(step / "config.json")
    state = read_json(step / "state.json") if (step / "state.json").is_file() else {}
    context = "max_position_embeddings" if hugging_face else "max_seq_len"
    check_run(step, config, state, context)
    tokenizer = tokenizer_path(step)
    files = [*sorted(step.glob("*.safetensors")), step / "config.json", tokenizer]
    return Run(
        name="/".join(path.parts[-2:]) if path.name.startswith("step_") else path.name,
        checkpoint=str(step),
        hugging_face=hugging_face,
        input_layer=config.get("input_layer", "learned"),
        vocab_size=config["vocab_size"],
        max_seq_len=config[context],
        data=config.get("data"),
        data_sha256=state.get("data_sha256"),
        update=state.get("update"),
        targets=state.get("targets"),
        tokenizer=str(tokenizer),
        sha256={file.name: sha256(file) for file in files},
        validation=validation_curve(step.parent),
    )


def check_run(step, config, state, context):
    """Raise ValueError if what a Run takes from config.json or state.json is damaged. `context` is
    the config's name for the number of tokens that the model reads."""
    for key in ("vocab_size", context):
        if type(config.get(key)) is not int or not 0 < config[key] < 2**31:
            raise ValueError(f"{step / 'config.json'} has no {key} above 0; use another checkpoint")
    found = config | state
    types = {"data": str, "input_layer": str, "update": int, "targets": int}
    for key, kind in types.items():
        if found.get(key) is not None and type(found[key]) is not kind:
            raise ValueError(
                f"{step} has a damaged config.json or state.json; use another checkpoint"
            )


def open_runs(texts):
    """All RUNs, named by their folders, or as they were given where two names agree."""
    runs = [open_run(text) for text in texts]
    names = [run.name for run in runs]
    for run, text in zip(runs, texts, strict=True):
        if names.count(run.name) > 1:
            run.name = text
    return runs


def load_run(run, device):
    """The run's Transformer, float32, in eval mode."""
    if run.hugging_face:
        return load_hf(Path(run.checkpoint)).to(device)
    return load_checkpoint(run.checkpoint, device)


# ---------------- Held-out targets


def common_folder(runs):
    """The data folder that all runs were trained on. Raises ValueError if there is none."""
    folders = {run.data for run in runs}
    if len(folders) != 1 or None in folders:
        names = " and ".join(sorted(folders - {None})) or "data unknown here"
        raise ValueError(f"the runs were trained on {names}; name the data to use with --data")
    return folders.pop()


def open_common_held_out(runs, given=None):
    """The HeldOut on which all runs can be compared: of the folder given by hand, or of the data
    that all were trained on. Raises ValueError if the runs do not agree on data and tokenizer."""
    folder = common_folder(runs) if given is None else given
    meta = read_meta(folder)
    meta_sha256 = sha256(Path(folder) / "meta.json")
    for run in runs:
        if given is None and run.data_sha256 not in (None, meta_sha256):
            raise ValueError(f"{folder} changed after {run.name} was made; give it as --data")
        same = run.sha256["tokenizer.json"] == meta["tokenizer_sha256"]
        if not same or run.vocab_size < meta["vocab_size"]:
            raise ValueError(
                f"{run.name} has another tokenizer than {folder}, so that losses do not "
                "compare; evaluate it apart, on data of its own tokenizer"
            )
    return open_held_out(folder, min(run.max_seq_len for run in runs))


def describe_held_out(held_out):
    """The HeldOutTargets of a HeldOut."""
    counts = held_out.train_counts + 1
    unigram = -np.log(counts / counts.sum())  # nats of each id, (V,)
    in_decile = np.eye(DECILES)[held_out.decile] * held_out.target_counts[:, None]  # (V, deciles)
    decile_unigram = unigram @ in_decile / in_decile.sum(axis=0).clip(1)
    return HeldOutTargets(
        data=str(held_out.val.folder),
        windows=len(held_out.windows),
        targets_per_window=held_out.length,
        targets=held_out.targets,
        counted_training_tokens=int(held_out.train_counts.sum()),
        unigram=float(unigram @ held_out.target_counts) / held_out.targets,
        decile_targets=held_out.decile_targets,
        decile_unigram=decile_unigram.tolist(),
    )


# ---------------- What is to be measured


@dataclass
class Work:
    """What is to be measured: everything is open before any of it is."""

    runs: list
    compared: list  # those of the runs whose held-out loss is measured
    held_out: HeldOut | None  # None: no loss is measured
    tasks: dict  # name[:shots] -> what lm-eval's evaluate() takes
    sets: str | None  # the fingerprint of --benchmarks


def check_arguments(args, world):
    """Raise ValueError if a number among the arguments is out of range."""
    if args.batch_tokens < 1:
        raise ValueError(f"--batch_tokens {args.batch_tokens} is below 1; raise it")
    if args.limit is not None and args.limit < world:
        raise ValueError(f"--limit {args.limit} leaves a rank of {world} without work; raise it")


def open_work(args, rank):
    """The Work that the arguments mean. Raises ValueError if a part of it cannot be opened."""
    if args.benchmarks:  # before the first import of huggingface_hub, which looks here
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"
    runs = open_runs(args.runs)
    compared = runs
    if args.tasks and args.data is None:  # then a model from outside has its benchmarks alone
        compared = [run for run in runs if not run.hugging_face]
    held_out = None
    try:
        held_out = open_common_held_out(compared, args.data)
    except ValueError as error:
        if not args.tasks:
            raise
        if rank == 0:
            print(f"No held-out loss: {error}\n")
    tasks = benchmarks.load_tasks(args.tasks, args.benchmarks) if args.tasks else {}
    sets = benchmarks.fingerprint(args.benchmarks) if args.benchmarks else None
    return Work(runs, compared, held_out, tasks, sets)


def prepare_outputs(args):
    """Make what will be written to, so that a path that cannot be written is refused now."""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.samples:
        Path(args.samples).touch()


# ---------------- Measuring


@dataclass
class Measurement:
    """What was measured of one run."""

    run: Run
    parameters: dict
    held_out: HeldOutLoss | None
    records: dict  # name[:shots] -> TaskRecord
    files: list  # the RecordFile of each task


def measure(run, work, args, device, dtype):
    """The Measurement of a run: its held-out loss, then its tasks."""
    model = load_run(run, device)
    measurement = Measurement(run, parameter_counts(model), held_out=None, records={}, files=[])
    conditions = Conditions(run.sha256, name_of(dtype), work.sets, args.limit)
    with autocast(device, dtype):
        if work.held_out and run in work.compared:
            measurement.held_out = held_out_loss(model, work.held_out, args.batch_tokens)
        scorer = make_scorer(model, run.tokenizer, args.batch_tokens) if work.tasks else None
        for name, task in work.tasks.items():
            file = RecordFile(Path(args.out) / "tasks", name, conditions, bool(args.samples))
            measurement.records[name] = benchmarks.task_record(scorer, task, file)
            measurement.files.append(file)
    return measurement


def name_of(dtype):
    """torch.float32 -> float32"""
    return str(dtype).removeprefix("torch.")


# ---------------- Reporting


def compare_tasks(run, records, first_records):
    """name[:shots] -> TaskResult of a run's TaskRecords, beside the paper's and the first run's."""
    kind = run.name if run.hugging_face else run.input_layer
    results = {}
    for name, record in records.items():
        documents = record.documents
        results[name] = TaskResult(
            metric=record.metric,
            value=record.value,
            stderr=record.stderr,
            num_fewshot=record.num_fewshot,
            versions=record.versions,
            requests=record.requests,
            seconds=record.seconds,
            documents=len(documents),
            published=benchmarks.published(kind, name),
            difference=benchmarks.difference(
                first_records[name].documents, documents, record.metric
            ),
        )
    return results


def compare(work, measurements, limit, device, dtype):
    """The Results of all Measurements. `dtype` comes with the reason for it."""
    runs = [
        MeasuredRun(
            **vars(measurement.run),
            parameters=measurement.parameters,
            held_out=measurement.held_out,
            tasks=compare_tasks(measurement.run, measurement.records, measurements[0].records),
        )
        for measurement in measurements
    ]
    return Results(
        torch=torch.__version__,
        device=str(device),
        dtype=dtype,
        harness=version("lm-eval") if work.tasks else None,
        limit=limit,
        held_out=describe_held_out(work.held_out) if work.held_out else None,
        runs=runs,
    )


def write_report(results, out):
    """Write Results to a folder as JSON, table and picture, and print the table."""
    text = report(results)
    write_json(out / "results.json", asdict(results))
    write_whole(out / "table.md", text.encode())
    draw_comparison(results, out / "comparison.png")
    print(f"{text}\nWrote results.json, table.md and comparison.png to {out}")


def write_samples(path, measurements):
    """Write the lines of all requests of all runs to one file."""
    with naming(path), open(path, "w") as samples:
        for measurement in measurements:
            for file in measurement.files:
                for line in file.lines_path.read_text().splitlines():
                    sample = {"run": measurement.run.name, **json.loads(line)}
                    samples.write(json.dumps(sample) + "\n")


# ---------------- The command


def evaluate(args):
    """Measure all runs; rank 0 writes and prints the report. Raises ValueError to refuse."""
    device = pick_device(args.device)
    dtype, reason = pick_dtype(args.dtype, device)
    rank, world = join_ranks(device)
    check_arguments(args, world)
    work = open_work(args, rank)
    from_rank_0(prepare_outputs, args)

    measurements = [measure(run, work, args, device, dtype) for run in work.runs]
    if rank == 0:
        dtype_and_reason = f"{name_of(dtype)} ({reason})"
        results = compare(work, measurements, args.limit, device, dtype_and_reason)
        write_report(results, Path(args.out))
        if args.samples:
            write_samples(args.samples, measurements)


def task_names(text):
    """The names in --tasks, each once. `paper` alone means the paper's."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    return list(benchmarks.PAPER) if names == ["paper"] else names


def main(argv=None):
    parser = make_parser(__doc__)
    tasks_help = "paper, or names of lm-eval: name,name:5 (with 5 shots)"
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN")
    add("--data", metavar="DIR", help="data folder in place of the runs' own")
    add("--tasks", type=task_names, default=[], help=tasks_help)
    add("--limit", type=int, help="only so many documents of each task")
    add("--benchmarks", metavar="DIR", help="read the sets here, not on the hub")
    add("--samples", metavar="FILE", help="write a JSON line for each request")
    add("--out", metavar="DIR", default="out/evaluation")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    add("--batch_tokens", type=int, default=8192, help="of a batch")
    args = parser.parse_args(argv)
    with refusals(parser):
        evaluate(args)


if __name__ == "__main__":
    main()
