"""The benchmarks: the paper's table, lm-eval's tasks and their sets, and a kept record of each.

A task is named as lm-eval names it, with `:<shots>` behind it where it is not the harness's own
number of examples: `piqa`, `mmlu:5`. Prompts and metrics are the harness's own.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nanocodes.files import read_json, sha256, write_json, write_whole
from nanocodes.ranks import from_rank_0
from nanocodes.results import Difference


@dataclass(frozen=True)
class PaperTask:
    """A row of the paper's table."""

    title: str
    metric: str
    published: dict  # kind of model -> its figure, as the paper writes it


CHANCE_CSQA = {"learned": "~20", "binary16": "~20", "gf2": "~20"}
CHANCE_MMLU = {"learned": "25-26", "binary16": "25-26", "gf2": "25-26"}
PAPER = {
    "hellaswag": PaperTask(
        "HellaSwag",
        "acc_norm",
        {
            "learned": "57.79",
            "binary16": "52.40",
            "gf2": "51.44",
            "SmolLM2-135M": "43.02",
            "SmolLM2-360M": "56.28",
            "SmolLM2-1.7B": "71.43",
        },
    ),
    "arc_easy": PaperTask("ARC-Easy", "acc_norm", {"learned": "66.04"}),
    "arc_challenge": PaperTask("ARC-Challenge", "acc_norm", {"learned": "37.63"}),
    "piqa": PaperTask("PIQA", "acc", {"learned": "72.69", "binary16": "70.51", "gf2": "71.16"}),
    "winogrande": PaperTask("WinoGrande", "acc", {"learned": "58.56"}),
    "openbookqa": PaperTask("OpenBookQA", "acc_norm", {"learned": "37.80"}),
    "lambada_openai": PaperTask(
        "LAMBADA", "acc", {"learned": "47.72", "binary16": "42.75", "gf2": "42.29"}
    ),
    "wikitext": PaperTask("WikiText", "word_perplexity", {"binary16": "18.58", "gf2": "19.03"}),
    "commonsense_qa": PaperTask("CommonsenseQA", "acc", CHANCE_CSQA),
    "mmlu": PaperTask("MMLU, 0 shots", "acc", CHANCE_MMLU),
    "mmlu:5": PaperTask("MMLU, 5 shots", "acc", CHANCE_MMLU),
}
METRICS = ("acc_norm", "acc", "word_perplexity")  # of any other task the first that it has
SCORED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")  # kinds of lm-eval's tasks


def title_of(name):
    """What a table calls a task."""
    return PAPER[name].title if name in PAPER else name


def published(kind, name):
    """What the paper gives for a kind of model, such as gf2 or SmolLM2-135M, on a task, or None."""
    return PAPER[name].published.get(kind) if name in PAPER else None


def parse_name(name):
    """A task's name in lm-eval, and its number of examples, None for lm-eval's own."""
    task, _, shots = name.partition(":")
    if shots and not shots.isdecimal():
        raise ValueError(f"lm-eval has no task {name}; `lm-eval ls tasks` lists them")
    return task, int(shots) if shots else None


# ---------------- Figures


def pooled(documents, metric):
    """The figure of (documents, 2) values and weights: percent, or perplexity per word."""
    value, weight = np.asarray(documents, dtype=float).sum(axis=0)
    return np.exp(-value / weight) if metric == "word_perplexity" else 100 * value / weight


def difference(a, b, metric):
    """The figure of b less that of a, over the same documents, and its 95 % interval.

    A paired bootstrap: both are taken over the same 1000 draws of the documents.
    """
    a = np.asarray(a, dtype=float)
    b = np.asarray(b, dtype=float)
    random = np.random.default_rng(0)
    draws = []
    for _ in range(1000):
        pick = random.integers(0, len(a), len(a))
        draws.append(pooled(b[pick], metric) - pooled(a[pick], metric))
    low, high = np.percentile(draws, (2.5, 97.5))
    return Difference(float(pooled(b, metric) - pooled(a, metric)), float(low), float(high))


# ---------------- Loading


@functools.cache
def task_manager(only_paper):
    """lm-eval's list of tasks. The whole takes seconds to read, the paper's part does not."""
    import lm_eval.tasks

    if not only_paper:
        return lm_eval.tasks.TaskManager()
    folders = Path(lm_eval.tasks.__file__).parent.iterdir()
    own = [folder for folder in folders if any(name.startswith(folder.name) for name in PAPER)]
    return lm_eval.tasks.TaskManager(include_path=own, include_defaults=False)


def leaf_configs(index, name):
    """The configs of all tasks that a name in lm-eval's index stands for."""
    entry = index[name]
    if entry.kind.name not in ("TAG", "GROUP"):
        return [entry.cfg]
    members = entry.tags if entry.kind.name == "TAG" else entry.cfg["task"]
    if not all(isinstance(member, str) for member in members):
        raise ValueError(f"{name} is a group that rewrites its tasks; name tasks instead")
    return [config for member in members for config in leaf_configs(index, member)]


def check_config(name, config, benchmarks):
    """Raise ValueError if evaluate.py cannot score a task with this config of lm-eval, or if its
    set is not in the folder `benchmarks`, where that is given."""
    if config.get("output_type") not in SCORED:
        raise ValueError(
            f"{name} needs generated text or a package that evaluate.py's name hides; "
            "export the run with convert.py and use lm-eval itself"
        )
    metrics = {entry["metric"] for entry in config.get("metric_list") or []}
    if metrics and metrics.isdisjoint(METRICS):
        raise ValueError(f"{name} has no metric of {', '.join(METRICS)}; leave it out")
    if benchmarks:
        repository = config.get("dataset_path", "")
        folder = Path(benchmarks) / repository
        if not folder.is_dir():
            raise ValueError(
                f"{name} needs {folder}; fetch it with `hf download {repository} "
                f"--repo-type dataset --local-dir {folder}`"
            )


def load_tasks(names, benchmarks):
    """lm-eval's tasks: name[:shots] -> what its evaluate() takes.

    With `benchmarks` the sets come from that folder, each repository at its hub path in it.
    Raises ValueError on a task or set that is not there, before any is loaded.
    """
    import datasets

    datasets.disable_progress_bars()
    if benchmarks:  # with a cache of its own, since `datasets` may keep an older state of a set
        cache = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
        datasets.config.HF_DATASETS_CACHE = cache

    manager = task_manager(all(name.partition(":")[0] in PAPER for name in names))
    for name in names:
        task, _ = parse_name(name)
        if task not in manager.task_index:
            raise ValueError(f"lm-eval has no task {name}; `lm-eval ls tasks` lists them")
        for config in leaf_configs(manager.task_index, task):
            check_config(name, config, benchmarks)
    with contextlib.chdir(benchmarks or "."):  # `datasets` prefers a folder here to the hub
        return {name: load_task(manager, name) for name in names}


def load_task(manager, name):
    """What lm-eval's evaluate() takes for one name. Raises ValueError if its set is not whole."""
    task, shots = parse_name(name)
    try:
        loaded = manager.load([task])
    except KeyError as error:
        raise ValueError(
            f"the set of {name} has no {error}, which lm-eval reads even at 0 shots; "
            "fetch the whole repository"
        ) from None
    except Exception as error:  # `datasets` raises kinds of its own
        first_line = str(error).partition("\n")[0][:200]
        raise ValueError(f"the set of {name}: {first_line}; fetch it for --benchmarks") from None
    for leaf in loaded["tasks"].values():
        own_shots = leaf.config.num_fewshot or 0
        leaf.set_config("num_fewshot", own_shots if shots is None else shots)
    return loaded


# ---------------- Running


@dataclass
class TaskRecord:
    """A model's result on a task, with that of every document."""

    metric: str
    value: float  # percent, or perplexity per word
    stderr: float | None
    num_fewshot: int
    versions: dict  # task of lm-eval -> its version
    requests: int
    seconds: float
    documents: list  # (value, weight) pairs, of which `pooled` makes the figure


def run_task(scorer, tasks, name, limit):
    """Score a task: its TaskRecord and a list of one JSON line for each request, on rank 0;
    elsewhere None twice."""
    from lm_eval.evaluator import evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # a bootstrap gains nothing from forking a model
    started = time.time()
    for leaf in tasks["tasks"].values():  # for every run the same examples, as lm-eval draws them
        leaf.set_fewshot_seed(1234)
    with contextlib.redirect_stdout(sys.stderr):  # lm-eval also prints
        output = evaluate(scorer, tasks, limit=limit, bootstrap_iters=1000)
    if output is None:
        return None, None

    samples = [
        {**sample, "task": task, "num_fewshot": output["n-shot"][task]}
        for task, task_samples in output["samples"].items()
        for sample in task_samples
    ]
    samples.sort(key=lambda sample: (sample["task"], sample["doc_id"]))
    lines = [line for sample in samples for line in request_lines(sample)]

    metrics = [PAPER[name].metric] if name in PAPER else METRICS
    metric = next(metric for metric in metrics if metric in samples[0])
    values = [sample[metric] for sample in samples]
    documents = [value if isinstance(value, tuple) else (value, 1) for value in values]
    figures = output["results"].get(name.partition(":")[0], {})
    stderr = figures.get(f"{metric}_stderr,none")
    record = TaskRecord(
        metric=metric,
        value=float(pooled(documents, metric)),
        stderr=100 * stderr if isinstance(stderr, float) else None,
        num_fewshot=samples[0]["num_fewshot"],
        versions=output["versions"],
        requests=len(lines),
        seconds=round(time.time() - started, 1),
        documents=documents,
    )
    return record, lines


def request_lines(sample):
    """One JSON line for each request of a sample of lm-eval, a document."""
    for arguments, responses in zip(sample["arguments"], sample["resps"], strict=True):
        # A rolling request is a text without context, and its response a number.
        context, continuation = ("", *arguments)[-2:]
        response = responses[0]
        nats, is_greedy = response if isinstance(response, tuple) else (response, None)
        line = {
            "task": sample["task"],
            "doc_id": sample["doc_id"],
            "num_fewshot": sample["num_fewshot"],
            "context": context,
            "continuation": continuation,
            "loglikelihood": nats,
            "is_greedy": is_greedy,
        }
        yield json.dumps(line)


# ---------------- Records on disk


@dataclass
class Conditions:
    """What was scored, and how: together with its task it decides every figure of a record, so
    that no record is taken for another's."""

    sha256: dict  # file of the checkpoint -> its hex digest
    dtype: str
    benchmarks: str | None  # the fingerprint of the folder of sets
    limit: int | None


def digest(value):
    """The sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def fingerprint(folder):
    """A hash of the names, sizes and times of all files below a folder."""
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    stats = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return digest(stats)


@dataclass
class RecordFile:
    """Where the record of a task is kept, and the lines of its requests if they are wanted."""

    folder: Path
    task: str
    conditions: Conditions
    with_lines: bool

    @property
    def key(self):
        return {
            "sha256": self.conditions.sha256,
            "dtype": self.conditions.dtype,
            "benchmarks": self.conditions.benchmarks,
            "task": self.task,
            "limit": self.conditions.limit,
            "harness": version("lm-eval"),
        }

    @property
    def path(self):
        return self.folder / f"{self.task.replace(':', '-')}-{digest(self.key)[:16]}.json"

    @property
    def lines_path(self):
        return self.path.with_suffix(".jsonl")

    def save(self, record, lines):
        """Keep a TaskRecord, and the lines of its requests; returns the record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.with_lines:
            write_whole(self.lines_path, ("\n".join(lines) + "\n").encode())
        checks = {
            "record": digest(asdict(record)),
            "lines": sha256(self.lines_path) if self.with_lines else False,
        }
        write_json(self.path, {"key": self.key, "sha256": checks, "record": asdict(record)})
        return record

    def load(self):
        """The TaskRecord kept here, None if there is no whole one."""
        try:
            saved = read_json(self.path)
            checks = saved["sha256"]
            if digest(saved["record"]) != checks["record"]:
                return None
            if self.with_lines and sha256(self.lines_path) != checks["lines"]:
                return None
            return TaskRecord(**saved["record"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def task_record(scorer, tasks, file):
    """The TaskRecord of a RecordFile: kept there from an earlier time, or scored now."""
    record = from_rank_0(file.load)
    if record is None:
        record, lines = run_task(scorer, tasks, file.task, file.conditions.limit)
        record = from_rank_0(file.save, record, lines)
    return record
