"""A model against lm-eval's tasks: the paper's table, a fast scorer, and each task's record.

One protocol for every model: at most 2048 tokens at a time, cut on the left; the separator before
a text without context and no other special token; the harness's own prompts and metrics.

    requests as text -> Scorer (lm-eval's LM) -> requests as ids -> score -> nats
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
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from device import from_rank_0, rank_and_world
from loss import LOGITS_AT_ONCE
from shards import read_json, sha256, write_json, write_whole
from tokenizer import load_tokenizer, vocabulary

MAX_LENGTH = 2048  # tokens of a request, also where a model could read more
PUBLISHED = ("learned", "binary16", "gf2", "SmolLM2-135M", "SmolLM2-360M", "SmolLM2-1.7B")
PAPER = {  # task[:shots] -> title, metric, and what the paper gives for each of PUBLISHED
    "hellaswag": ("HellaSwag", "acc_norm", "57.79", "52.40", "51.44", "43.02", "56.28", "71.43"),
    "arc_easy": ("ARC-Easy", "acc_norm", "66.04", None, None, None, None, None),
    "arc_challenge": ("ARC-Challenge", "acc_norm", "37.63", None, None, None, None, None),
    "piqa": ("PIQA", "acc", "72.69", "70.51", "71.16", None, None, None),
    "winogrande": ("WinoGrande", "acc", "58.56", None, None, None, None, None),
    "openbookqa": ("OpenBookQA", "acc_norm", "37.80", None, None, None, None, None),
    "lambada_openai": ("LAMBADA", "acc", "47.72", "42.75", "42.29", None, None, None),
    "wikitext": ("WikiText", "word_perplexity", None, "18.58", "19.03", None, None, None),
    "commonsense_qa": ("CommonsenseQA", "acc", "~20", "~20", "~20", None, None, None),
    "mmlu": ("MMLU, 0 shots", "acc", "25-26", "25-26", "25-26", None, None, None),
    "mmlu:5": ("MMLU, 5 shots", "acc", "25-26", "25-26", "25-26", None, None, None),
}
PASS_TOKENS = 16  # a forward pass takes about as long as so many tokens more
METRICS = ("acc_norm", "acc", "word_perplexity")  # of any other task the first that it has
SCORED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")


# ---------------- Figures


def published(kind, name):
    """What the paper gives for a kind of model, one of PUBLISHED, on a task; else None."""
    figures = PAPER[name][2:] if name in PAPER else [None] * len(PUBLISHED)
    return dict(zip(PUBLISHED, figures, strict=True)).get(kind)


def pooled(documents, metric):
    """The figure of (documents, 2) values and weights: percent, or perplexity per word."""
    value, weight = np.asarray(documents, dtype=float).sum(axis=0)
    return np.exp(-value / weight) if metric == "word_perplexity" else 100 * value / weight


def difference(a, b, metric):
    """The figure of b less that of a, over the same documents, and its 95 % interval.

    A paired bootstrap: both are taken over the same 1000 draws of the documents.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    random = np.random.default_rng(0)
    picks = (random.integers(0, len(a), len(a)) for _ in range(1000))
    draws = [pooled(b[pick], metric) - pooled(a[pick], metric) for pick in picks]
    low, high = np.percentile(draws, (2.5, 97.5))
    return {"value": float(pooled(b, metric) - pooled(a, metric)), "low": low, "high": high}


# ---------------- Scoring: ids -> nats

# A request is a (context, continuation) pair of lists of ids. Its row is what the model reads for
# it, all but the last id.


def common_length(a, b):
    """How many ids two rows share from the first on."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def share_prefixes(rows, batch_tokens):
    """Group rows that begin alike: the choices of a question, questions after the same examples.

    Returns (positions shared, rows) pairs. A row joins a group of which it shares at least a third
    of its own positions, the last one left out.
    """
    groups = []
    for row in sorted(rows):
        if groups:
            shared, members = groups[-1]
            common = min(shared, len(row) - 1, common_length(members[-1], row))
            tokens = (len(members) + 1) * max(map(len, [*members, row]))
            if 3 * common >= len(row) and tokens <= batch_tokens:
                groups[-1] = common, [*members, row]
                continue
        groups.append((len(row) - 1, [row]))
    return [(shared if len(members) > 1 else 0, members) for shared, members in groups]


def make_batches(groups, batch_tokens):
    """Lists of groups to read together, those that share most first, bounded in tokens.

    In a batch all share as much as its last group. What the others so lose is bounded too.
    """
    batches, longest, count, shares = [], 0, 0, 0
    for shared, rows in sorted(groups, key=lambda g: (g[0], max(map(len, g[1]))), reverse=True):
        longest, count = max(longest, *map(len, rows)), count + len(rows)
        shares += (len(rows) - 1) * shared
        lost = shares - (count - len(batches[-1]) - 1) * shared if batches else 0
        if batches and lost <= PASS_TOKENS and count * longest <= batch_tokens:
            batches[-1].append((shared, rows))
        else:
            batches.append([(shared, rows)])
            longest, count, shares = max(map(len, rows)), len(rows), (len(rows) - 1) * shared
    return batches


def even_parts(pairs, past):
    """Cut (row, group) pairs, the longest first, so that the padding of each part is bounded."""
    parts, tokens = [], 0
    for row, group in sorted(pairs, key=lambda pair: len(pair[0]), reverse=True):
        tokens += len(row) - past
        padded = (len(parts[-1]) + 1) * (len(parts[-1][0][0]) - past) if parts else 0
        if parts and padded - tokens <= PASS_TOKENS:
            parts[-1].append((row, group))
        else:
            parts.append([(row, group)])
            tokens = len(row) - past
    return parts


def read_batch(model, batch):
    """What the head reads for a batch, (N, d_model), and row -> where its positions lie in that.

    What the rows of a group share is read once, and each row goes on from its keys and values.
    """
    device, past = model.head.weight.device, batch[-1][0]
    hidden, places, cache = [], {}, None
    if past:
        cache = [[] for _ in model.blocks]
        ids = torch.tensor([rows[0][:past] for _, rows in batch], device=device)
        hidden.append(model.hidden(ids, cache).flatten(0, 1))
    pairs = [(row, group) for group, (_, rows) in enumerate(batch) for row in rows]
    for part in even_parts(pairs, past):
        ids = pad_sequence([torch.tensor(row[past:]) for row, _ in part], batch_first=True)
        if past:
            groups = torch.tensor([group for _, group in part], device=device)
            own = [[kv[groups] for kv in block] for block in cache]
        start = sum(map(len, hidden))
        for row, group in part:
            rest = range(start, start + len(row) - past)
            places[row] = [*range(group * past, (group + 1) * past), *rest]
            start += ids.shape[1]
        hidden.append(model.hidden(ids.to(device), own if past else None).flatten(0, 1))
    return torch.cat(hidden), places


@torch.no_grad()
def score(model, requests, max_length, batch_tokens):
    """(nats of the continuation, whether greedy decoding gives it) for each request.

    A context that is too long loses its beginning. Requests with the same row, such as one-token
    choices, are read once. Raises ValueError on a continuation longer than max_length.
    """
    from tqdm import tqdm

    readers, results = {}, [None] * len(requests)  # row -> the requests that read it
    for i, (context, continuation) in enumerate(requests):
        if len(continuation) > max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, and the model reads {max_length} "
                "at most; leave its task out"
            )
        row = tuple((context + continuation)[-max_length - 1 : -1])
        readers.setdefault(row, []).append(i)
    device, at_once = model.head.weight.device, max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    progress = tqdm(total=len(requests), desc="requests", disable=rank_and_world()[0] > 0 or None)
    for batch in make_batches(share_prefixes(readers, batch_tokens), batch_tokens):
        hidden, places = read_batch(model, batch)
        scored = [i for row in places for i in readers[row]]
        sizes = [len(requests[i][1]) for i in scored]
        positions = [p for row in places for i in readers[row]
                     for p in places[row][-len(requests[i][1]):]]
        targets = [target for i in scored for target in requests[i][1]]
        hidden = hidden[torch.tensor(positions, device=device)]  # (targets, d_model)
        targets, parts = torch.tensor(targets, device=device), []
        for part, target in zip(hidden.split(at_once), targets.split(at_once), strict=True):
            logs = model.head(part).float().log_softmax(dim=1)  # (n, V)
            greedy = logs.argmax(dim=1) == target
            parts.append(torch.stack((logs.gather(1, target[:, None])[:, 0], greedy.float())))
        nats, greedy = torch.cat(parts, dim=1).cpu().double()
        for i, n, g in zip(scored, nats.split(sizes), greedy.split(sizes), strict=True):
            results[i] = float(n.sum()), bool(g.all())
        progress.update(len(scored))
    progress.close()
    return results


# ---------------- The harness


def make_scorer(model, tokenizer_file, batch_tokens):
    """The model as lm-eval's LM. Under torchrun each rank is given its share of the documents."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = load_tokenizer(tokenizer_file, model.config.vocab_size)
    _, separator = vocabulary(tokenizer)
    max_length = min(MAX_LENGTH, model.config.max_seq_len)

    class Scorer(TemplateLM):
        eot_token_id = separator  # and so also the harness's prefix_token_id

        def __init__(self):
            super().__init__()
            self._rank, self._world_size = rank_and_world()
            self._device = model.head.weight.device

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, add_special_tokens=False).ids

        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            return score(model, [ids for _, *ids in requests], max_length, batch_tokens)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows, owners, totals = [], [], [0.0] * len(requests)
            for i, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                for window in get_rolling_token_windows(ids, separator, max_length, 1):
                    windows.append(make_disjoint_window(window))
                    owners.append(i)
            for i, (nats, _) in zip(
                owners, score(model, windows, max_length, batch_tokens), strict=True
            ):
                totals[i] += nats
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            raise ValueError("evaluate.py scores given text; leave out tasks that generate it")

        def all_gather(self, tensor):
            tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(tensors, tensor)
            return torch.stack(tensors)

        def gather_object(self, obj, dst=0):
            objects = [None] * self.world_size
            dist.all_gather_object(objects, obj)
            return objects

        def barrier(self):
            dist.barrier()

    return Scorer()


@functools.cache
def task_manager(paper):
    """lm-eval's list of tasks. The whole takes seconds to read, the paper's part does not."""
    import lm_eval.tasks

    folders = Path(lm_eval.tasks.__file__).parent.iterdir()
    own = [folder for folder in folders if any(name.startswith(folder.name) for name in PAPER)]
    if paper:
        return lm_eval.tasks.TaskManager(include_path=own, include_defaults=False)
    return lm_eval.tasks.TaskManager()


def leaf_configs(index, name):
    """The configs of all tasks that a name in the harness's index stands for."""
    entry = index[name]
    if entry.kind.name not in ("TAG", "GROUP"):
        return [entry.cfg]
    members = entry.tags if entry.kind.name == "TAG" else entry.cfg["task"]
    if not all(isinstance(member, str) for member in members):
        raise ValueError(f"{name} is a group that rewrites its tasks; name tasks instead")
    return [config for member in members for config in leaf_configs(index, member)]


def digest(value):
    """The sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def fingerprint(folder):
    """A hash of the names, sizes and times of all files below a folder."""
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    facts = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return digest(facts)


def load_tasks(names, benchmarks):
    """The harness's tasks: name[:shots] -> what its evaluate() takes.

    With `benchmarks` the sets come from that folder, each repository at its hub path in it.
    Raises ValueError on a task or set that is not there, before any is loaded.
    """
    import datasets

    datasets.disable_progress_bars()
    if benchmarks:  # with a cache of its own, since `datasets` may keep an older state of a set
        datasets.config.HF_DATASETS_CACHE = cache = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    manager, loaded = task_manager(all(n.partition(":")[0] in PAPER for n in names)), {}
    for name in names:
        task, _, shots = name.partition(":")
        if task not in manager.task_index or not (shots or "0").isdecimal():
            raise ValueError(f"lm-eval has no task {name}; `lm-eval ls tasks` lists them")
        for config in leaf_configs(manager.task_index, task):
            if config.get("output_type") not in SCORED:
                raise ValueError(
                    f"{name} needs generated text or a package that evaluate.py's name hides; "
                    "export the run with convert.py and use lm-eval itself"
                )
            metrics = {entry["metric"] for entry in config.get("metric_list") or []}
            if metrics and metrics.isdisjoint(METRICS):
                raise ValueError(f"{name} has no metric of {', '.join(METRICS)}; leave it out")
            repository = config.get("dataset_path", "")
            if benchmarks and not (Path(benchmarks) / repository).is_dir():
                folder = Path(benchmarks) / repository
                raise ValueError(
                    f"{name} needs {folder}; fetch it with `hf download {repository} "
                    f"--repo-type dataset --local-dir {folder}`"
                )
    with contextlib.chdir(benchmarks or "."):  # `datasets` prefers a folder here to the hub
        for name in names:
            task, _, shots = name.partition(":")
            try:
                loaded[name] = manager.load([task])
            except KeyError as error:
                raise ValueError(
                    f"the set of {name} has no {error}, which lm-eval reads even at 0 shots; "
                    "fetch the whole repository"
                ) from None
            except Exception as error:  # `datasets` raises kinds of its own
                what = str(error).partition("\n")[0][:200]
                raise ValueError(f"the set of {name}: {what}; fetch it for --benchmarks") from None
            for leaf in loaded[name]["tasks"].values():
                leaf.set_config("num_fewshot", int(shots or leaf.config.num_fewshot or 0))
    return loaded


def run_task(scorer, tasks, name, limit):
    """Score a task: its record and one line for each request, on rank 0; elsewhere None twice.

    The record's `documents` are (value, weight) pairs, of which `pooled` makes the figure.
    """
    from lm_eval.evaluator import evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # a bootstrap gains nothing from forking a model
    started = time.time()
    for leaf in tasks["tasks"].values():  # for every run the same examples, as lm-eval draws them
        leaf.set_fewshot_seed(1234)
    with contextlib.redirect_stdout(sys.stderr):  # the harness also prints
        output = evaluate(scorer, tasks, limit=limit, bootstrap_iters=1000)
    if output is None:
        return None, None
    samples = [sample | {"task": task} for task, s in output["samples"].items() for sample in s]
    samples.sort(key=lambda sample: (sample["task"], sample["doc_id"]))
    metrics = PAPER[name][1:2] if name in PAPER else METRICS
    metric = next(metric for metric in metrics if metric in samples[0])
    lines = []
    for sample in samples:
        for arguments, responses in zip(sample["arguments"], sample["resps"], strict=True):
            line = {"task": sample["task"], "doc_id": sample["doc_id"]}
            line["num_fewshot"] = output["n-shot"][sample["task"]]
            # A rolling request is a text without context, and its response a number.
            line["context"], line["continuation"] = ("", *arguments)[-2:]
            response = responses[0] if isinstance(responses[0], tuple) else (responses[0], None)
            line["loglikelihood"], line["is_greedy"] = response
            lines.append(json.dumps(line))
    values = [sample[metric] for sample in samples]
    documents = [value if isinstance(value, tuple) else (value, 1) for value in values]
    figures = output["results"].get(name.partition(":")[0], {})
    stderr = figures.get(f"{metric}_stderr,none")
    record = {
        "metric": metric,
        "value": float(pooled(documents, metric)),
        "stderr": 100 * stderr if isinstance(stderr, float) else None,
        "num_fewshot": output["n-shot"][samples[0]["task"]],
        "versions": output["versions"],
        "requests": len(lines),
        "seconds": round(time.time() - started, 1),
        "documents": documents,
    }
    return record, lines


def task_record(scorer, name, tasks, limit, key, folder, with_lines):
    """A task's record and the file of its requests, scored now or kept from an earlier time.

    `key` says what was scored, and how. Together with the task, the limit and the version of the
    harness it decides the figures, so that no record is taken for another's.
    """
    key = {**key, "task": name, "limit": limit, "harness": version("lm-eval")}
    file = folder / f"{name.replace(':', '-')}-{digest(key)[:16]}.json"
    lines_file = file.with_suffix(".jsonl")

    def keep(record, lines):
        folder.mkdir(parents=True, exist_ok=True)
        if with_lines:
            write_whole(lines_file, ("\n".join(lines) + "\n").encode())
        sums = {"record": digest(record), "lines": with_lines and sha256(lines_file)}
        write_json(file, {"key": key, "sha256": sums, "record": record})
        return record

    def kept():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # no whole one
            saved = read_json(file)
            sums = {"record": digest(saved["record"]), "lines": saved["sha256"]["lines"]}
            if with_lines:
                sums["lines"] = sha256(lines_file)
            return saved["record"] if sums == saved["sha256"] else None

    record = from_rank_0(kept)
    if record is None:
        record = from_rank_0(keep, *run_task(scorer, tasks, name, limit))
    return record, lines_file
