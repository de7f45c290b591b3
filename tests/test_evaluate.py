"""Checkpoints -> numbers. Run: python -m pytest tests/test_evaluate.py

The benchmarks are lm-eval's own tasks, on tiny sets laid out like the repositories on the hub,
and lm-eval's own HFLM on the exported run is the reference.
"""

import dataclasses
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import evaluate
import harness
from convert import to_hf
from model import ModelConfig, Transformer
from shards import open_shards, read_windows, sha256, write_json, write_shard

ROOT = Path(__file__).parent.parent
VOCABULARY = 259  # the separator, every byte, and two words
SHAPE = dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, d_ff=64, max_seq_len=128)
RUNS = {
    "learned": dict(input_layer="learned"),
    "gf2": dict(input_layer="gf2"),
    "grouped": dict(input_layer="binary16", n_heads=4, n_kv_heads=2),
}
WORDS = "the a of one with this is near old red sky hill bird tree runs sees finds".split()


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *letters, "th", "the"]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("t", "h"), ("th", "e")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def write_data(folder, train, val):
    """A data folder as prepare.py writes it, of given ids; bytes are counted as two a token."""
    folder.mkdir(parents=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    splits = {}
    for split, ids in (("train", train), ("val", val)):
        shards = [write_shard(folder, split, 0, ids)]
        splits[split] = dict(documents=1, tokens=len(ids), bytes=2 * len(ids), shards=shards)
    digest = sha256(folder / "tokenizer.json")
    write_json(
        folder / "meta.json",
        dict(vocab_size=VOCABULARY, separator=0, tokenizer="bytes", tokenizer_sha256=digest,
             sources=[], splits=splits),
    )


def write_run(folder, data, update=3, **changes):
    """A run folder as train.py writes it, with random weights; returns its model."""
    model = Transformer(ModelConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that logits differ
            parameter.mul_(3)
    step = folder / f"step_{update:08d}"
    step.mkdir(parents=True)
    save_file(model.state_dict(), step / "model.safetensors")
    config = {**dataclasses.asdict(model.config), "data": str(data)}
    for place in (folder, step):
        write_json(place / "config.json", config)
    write_json(step / "state.json", dict(update=update, targets=update * 64))
    (folder / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    lines = [dict(update=u, targets=u * 64, val_loss=6 - u, bits_per_byte=1.0) for u in (1, 3)]
    lines.insert(1, dict(update=2, targets=128, loss=5.0, lr=0.1, grad_norm=1.0))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return model.eval()


# -----------------------------------------------------------------------------
# Benchmark sets


def words(rng, count):
    return " ".join(rng.choice(WORDS, count))


def write_set(hub, repository, configs):
    """A dataset repository: {config: {split: rows}}, one JSON line a row."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        (hub / repository / config).mkdir(parents=True)
        for split, rows in splits.items():
            path = f"{config}/{split}.jsonl"
            lines += [f"  - split: {split}", f"    path: {path}"]
            (hub / repository / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (hub / repository / "README.md").write_text("\n".join([*lines, "---"]) + "\n")


def write_hub(hub, seed=0):
    """The paper's nine repositories, six documents a split; two for each subject of MMLU."""
    rng = np.random.default_rng(seed)

    def rows(make, splits, count=6):
        return {split: [make() for _ in range(count)] for split in splits}

    def hellaswag():
        first, second = words(rng, 6), words(rng, 3)
        row = dict(ind=0, activity_label="Hills", ctx_a=first, ctx_b=second, label="1")
        return row | dict(ctx=f"{first} {second}", endings=[words(rng, 4) for _ in range(4)])

    def choices(count):
        return dict(text=[words(rng, 2) for _ in range(count)], label=list("ABCDE"[:count]))

    def arc():
        return dict(id="1", question=words(rng, 7) + "?", choices=choices(4), answerKey="C")

    def piqa():
        return dict(goal=words(rng, 5), sol1=words(rng, 6), sol2=words(rng, 5), label=1)

    def winogrande():
        sentence = f"{words(rng, 5)} because _ {words(rng, 3)}"
        return dict(sentence=sentence, option1="bird", option2="tree", answer="2")

    def openbookqa():
        return dict(id="1", question_stem=words(rng, 5), choices=choices(4), answerKey="A")

    def commonsense_qa():
        return dict(id="1", question=words(rng, 5), choices=choices(5), answerKey="E")

    def lambada():
        return dict(text=words(rng, 12))

    def wikitext():
        return dict(page=f" = {words(rng, 2)} = \n {words(rng, 80)} . \n")

    def mmlu():
        return dict(question=words(rng, 4), subject="x", choices=["sky", "hill", "it", "so"],
                    answer=int(rng.integers(4)))

    both = ("train", "validation")
    three = (*both, "test")
    write_set(hub, "Rowan/hellaswag", {"default": rows(hellaswag, both)})
    write_set(hub, "allenai/ai2_arc",
              {name: rows(arc, three) for name in ("ARC-Easy", "ARC-Challenge")})
    write_set(hub, "baber/piqa", {"default": rows(piqa, both)})
    write_set(hub, "allenai/winogrande", {"winogrande_xl": rows(winogrande, both)})
    write_set(hub, "allenai/openbookqa", {"main": rows(openbookqa, three)})
    write_set(hub, "tau/commonsense_qa", {"default": rows(commonsense_qa, both)})
    write_set(hub, "EleutherAI/lambada_openai", {"default": rows(lambada, ("test",))})
    write_set(hub, "EleutherAI/wikitext_document_level",
              {"wikitext-2-raw-v1": rows(wikitext, three)})
    tasks = Path(find_spec("lm_eval").origin).parent / "tasks/mmlu/default"
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in tasks.glob("mmlu_*.yaml"))
    assert len(subjects) == 57
    write_set(hub, "cais/mmlu", {
        subject: rows(mmlu, ("dev",), 5) | rows(mmlu, ("test",), 2) for subject in subjects
    })


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, benchmark sets, and three runs: (folder of all, {name: model})."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.3, 5000) % VOCABULARY).astype(np.int64)
    write_data(folder / "data", ids[:4000], ids[4000:])
    write_hub(folder / "hub")
    return folder, {n: write_run(folder / n, folder / "data", **s) for n, s in RUNS.items()}


def options(folder, out, *more):
    """What evaluates on the tiny sets in float32."""
    return ["--benchmarks", str(folder / "hub"), "--out", str(out), "--dtype", "float32",
            "--device", "cpu", *more]


@pytest.fixture
def offline(tmp_path_factory, monkeypatch):
    """Prepared sets go to a folder of the tests, and what evaluate.py sets is undone."""
    import datasets

    cache = tmp_path_factory.getbasetemp() / "prepared"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def run_script(*arguments, ranks=0):
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "evaluate.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def results_of(out):
    return json.loads((out / "results.json").read_text())


def test_held_out_loss_is_that_of_every_target(world, tmp_path, capsys):
    folder, models = world
    evaluate.main([str(folder / "learned"), str(folder / "gf2"), "--out", str(tmp_path),
                   "--dtype", "float32"])
    results = results_of(tmp_path)
    val = open_shards(folder / "data", "val")
    ids, targets = read_windows(val, range((val.tokens - 1) // 128), 128)
    train = np.bincount(open_shards(folder / "data", "train").read(0, 4000), minlength=VOCABULARY)
    for run in results["runs"]:
        model = models[run["name"]]
        with torch.no_grad():
            losses = model.losses(ids, targets).double()
        loss = run["held_out"]
        assert loss["nats_per_token"] == pytest.approx(losses.mean().item(), rel=1e-9)
        assert loss["bits_per_byte"] == pytest.approx(losses.mean().item() / math.log(2) / 2)
        assert loss["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-9)
        assert run["parameters"] == model.parameter_counts()
        assert run["sha256"]["model.safetensors"] == sha256(
            folder / run["name"] / "step_00000003/model.safetensors"
        )
        sizes = results["held_out"]["decile_targets"]
        parts = [s * d for s, d in zip(sizes, loss["deciles"], strict=True) if s]
        assert sum(parts) == pytest.approx(losses.sum().item(), rel=1e-9)
    unigram = np.log((4000 + VOCABULARY) / (train[targets.flatten()] + 1))
    assert results["held_out"]["unigram"] == pytest.approx(unigram.mean(), rel=1e-9)
    assert results["held_out"]["targets"] == targets.numel()
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert "| learned " in printed and "| gf2 " in printed
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_deciles_are_cut_by_training_frequency():
    train = np.array([5, 100, 50, 0, 7, 6, 4, 3, 2, 1, 8, 9])
    targets = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    expected = {1: 0, 2: 1, 10: 2, 4: 3, 5: 4, 0: 5, 6: 6, 7: 7, 8: 8, 9: 9}
    decile = evaluate.deciles(train, targets)
    assert {i: int(decile[i]) for i in expected} == expected
    # One id with half of the targets takes the place of five groups.
    heavy = evaluate.deciles(np.array([9, 8, 7, 6, 5, 4]), np.array([5, 1, 1, 1, 1, 1]))
    assert heavy.tolist() == [2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("config.json", "vocab_size", None), ("config.json", "max_seq_len", 0),
     ("config.json", "data", [1]), ("state.json", "update", [1])],
)
def test_damaged_facts_of_a_run_are_refused(name, key, value, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    facts = {"config.json": dict(vocab_size=8, max_seq_len=8, data="x"), "state.json": {}}
    facts[name][key] = value
    for file, values in facts.items():
        (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="use another checkpoint"):
        evaluate.open_run(str(tmp_path))


def test_validation_curve_is_that_of_the_run_less_a_torn_line(tmp_path):
    lines = [dict(update=1, targets=10, val_loss=4.0), dict(update=2, targets=20, loss=1.0),
             dict(update=2, targets=20, val_loss=2.5)]
    torn = '{"update": 3, "tar'
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), torn]))
    assert evaluate.validation_curve(tmp_path) == ([10, 20], [4.0, 2.5])


def test_step_folder_and_equal_names(world, tmp_path):
    folder, _ = world
    write_run(tmp_path / "learned", folder / "data")
    step = folder / "learned" / "step_00000003"
    assert [run["name"] for run in evaluate.open_runs([str(step)])] == ["learned/step_00000003"]
    paths = [str(folder / "learned"), str(tmp_path / "learned")]
    assert [run["name"] for run in evaluate.open_runs(paths)] == paths


# -----------------------------------------------------------------------------
# Scoring


def reference(model, context, continuation, max_length):
    """The nats of one request, and whether it is greedy, without any batch."""
    ids = (context + continuation)[-max_length - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0, -len(continuation) :].double()
    nats = logits.log_softmax(dim=1)[range(len(continuation)), continuation].sum().item()
    return nats, logits.argmax(dim=1).tolist() == continuation


def made_requests(rng):
    """Choices, one-token choices, shared examples, repeated and too long requests, in disorder."""
    draw = lambda count: rng.integers(1, VOCABULARY, count).tolist()  # noqa: E731
    requests = []
    for _ in range(6):
        examples, question = draw(40), draw(rng.integers(1, 30))
        requests += [(question, draw(rng.integers(1, 9))) for _ in range(4)]
        requests += [(examples + question, [i]) for i in (5, 6, 7)]
        requests += [(examples + draw(4), [i]) for i in (5, 6)]
        requests.append((question + question[:3], requests[-6][1]))
    requests += [(draw(200), draw(3)), (draw(1), draw(128)), (draw(1), draw(1)), requests[0]]
    # Id 0 has the zero code: alone, repeated, and at the head of what choices share.
    requests += [([0], draw(5)), ([0, 0], [0, 3]), *(([0, 0, *question], [i]) for i in (8, 9))]
    requests += [([0, *question], draw(3)) for _ in range(3)]
    return [requests[i] for i in rng.permutation(len(requests))]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("batch_tokens", [1, 300, 8192])
def test_score_equals_one_request_at_a_time(world, name, batch_tokens):
    model = world[1][name]
    requests = made_requests(np.random.default_rng(3))
    found = harness.score(model, requests, 128, batch_tokens)
    for request, (nats, greedy) in zip(requests, found, strict=True):
        expected, is_greedy = reference(model, *request, 128)
        assert nats == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert greedy == is_greedy


def test_greedy_is_seen(world):
    model = world[1]["gf2"]
    ids = torch.cat(list(model.generate(torch.tensor([[9, 8, 7]]), 4, temperature=0))).tolist()
    requests = [([9, 8, 7], ids), ([9, 8, 7], [*ids[:3], ids[3] + 1])]
    assert [greedy for _, greedy in harness.score(model, requests, 128, 64)] == [True, False]


def test_a_shared_beginning_is_read_once(world, monkeypatch):
    model, read = world[1]["learned"], []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *a: read.append(a[0].numel()) or hidden(*a))
    question = list(range(1, 61))
    harness.score(model, [(question, [i, 7]) for i in range(1, 5)], 128, 8192)
    assert read == [60, 4]  # the question, then the first token of each choice
    read.clear()
    harness.score(model, [(question, [7, 8, i, i]) for i in range(1, 5)], 128, 8192)
    assert read == [62, 4]  # what the choices share is scored, and read once too
    read.clear()
    harness.score(model, [(question, [i]) for i in range(1, 5)], 128, 8192)
    assert read == [60]
    read.clear()
    harness.score(model, [([i], [i] * n) for i, n in enumerate((100, 99, 50, 49))], 128, 8192)
    assert read == [200, 100]  # rows of unlike length are not padded to one


def test_a_long_continuation_is_refused(world):
    with pytest.raises(ValueError, match="a continuation has 129 tokens"):
        harness.score(world[1]["learned"], [([1], [1] * 129)], 128, 8192)


def test_difference_is_paired():
    a = [(1, 1), (0, 1)] * 50
    assert harness.difference(a, a, "acc") == {"value": 0, "low": 0, "high": 0}
    b = [(1, 1), (1, 1), (0, 1), (0, 1)] * 25
    found = harness.difference(a, b, "acc")
    assert found["value"] == 0 and -30 < found["low"] < -5 and 5 < found["high"] < 30
    worse = harness.difference([(-2.0, 1)] * 9, [(-3.0, 1)] * 9, "word_perplexity")
    expected = pytest.approx(math.exp(3) - math.exp(2))
    assert [worse[key] for key in ("value", "low", "high")] == [expected] * 3


# -----------------------------------------------------------------------------
# The harness's tasks


@pytest.mark.parametrize(
    ("name", "tasks"),
    [("gf2", "hellaswag winogrande lambada_openai wikitext commonsense_qa:3"),
     ("grouped", "piqa mmlu:5")],
)
def test_every_request_equals_hflm(world, name, tasks, tmp_path, offline):
    from lm_eval.models.huggingface import HFLM

    folder, models = world
    to_hf(folder / name, tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4)
    ours = harness.make_scorer(models[name], folder / name / "tokenizer.json", 512)
    assert theirs.max_length == 128 and theirs.prefix_token_id == ours.prefix_token_id == 0
    for task, loaded in harness.load_tasks(tasks.split(), folder / "hub").items():
        record, lines = harness.run_task(ours, loaded, task, None)
        expected, expected_lines = harness.run_task(theirs, loaded, task, None)
        assert record["value"] == pytest.approx(expected["value"], rel=1e-4)
        assert record["stderr"] == expected["stderr"]
        assert len(lines) == len(expected_lines) == record["requests"]
        for line, other in zip(map(json.loads, lines), map(json.loads, expected_lines),
                               strict=True):
            nats, others = line.pop("loglikelihood"), other.pop("loglikelihood")
            assert nats == pytest.approx(others, rel=1e-5, abs=1e-4)
            assert line == other


def test_paper_tasks_and_what_is_written(world, tmp_path, offline, capsys):
    folder, _ = world
    to_hf(folder / "gf2", tmp_path / "SmolLM2-135M")
    runs = [str(folder / "gf2"), str(tmp_path / "SmolLM2-135M")]
    arguments = [*runs, "--tasks", "paper", "--samples", str(tmp_path / "samples.jsonl")]
    evaluate.main([*arguments, *options(folder, tmp_path / "out")])
    results = results_of(tmp_path / "out")
    gf2, exported = results["runs"]
    assert list(gf2["tasks"]) == list(harness.PAPER)
    assert results["harness"] == "0.4.13" and results["dtype"] == "float32 (as asked)"
    assert gf2["held_out"] and exported["held_out"] is None
    for task, record in gf2["tasks"].items():
        same = exported["tasks"][task]
        assert record["metric"] == harness.PAPER[task][1]
        assert record["documents"] == (114 if task.startswith("mmlu") else 6)
        assert record["num_fewshot"] == (5 if task == "mmlu:5" else 0)
        assert same["value"] == pytest.approx(record["value"], rel=1e-5)
        assert same["difference"]["value"] == pytest.approx(0, abs=1e-5 * record["value"])
        assert (record["published"], same["published"]) == harness.PAPER[task][4:6]
    lines = list(map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()))
    fields = ["run", "task", "doc_id", "num_fewshot", "context", "continuation", "loglikelihood",
              "is_greedy"]
    assert list(lines[0]) == fields
    assert len(lines) == 2 * sum(record["requests"] for record in gf2["tasks"].values())
    printed = capsys.readouterr().out
    assert (tmp_path / "out/table.md").read_text() in printed
    assert "[51.44]" in printed and "| WikiText " in printed
    assert (tmp_path / "out/comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_two_ranks_give_the_same_figures(world, tmp_path, offline):
    folder, _ = world
    tasks = "piqa,wikitext,lambada_openai,mmlu"
    arguments = [str(folder / "gf2"), "--tasks", tasks, "--limit", "5"]
    ran = run_script(*arguments, *options(folder, tmp_path / "two"), ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Benchmarks (lm-eval") == 1
    evaluate.main([*arguments, *options(folder, tmp_path / "one")])
    (one,), (two,) = (results_of(tmp_path / name)["runs"] for name in ("one", "two"))
    assert two["held_out"]["nats_per_token"] == pytest.approx(
        one["held_out"]["nats_per_token"], rel=1e-9
    )
    for task, record in one["tasks"].items():
        assert record["documents"] == (114 if task == "mmlu" else 5)
        assert record["documents"] == two["tasks"][task]["documents"]
        assert two["tasks"][task]["value"] == pytest.approx(record["value"], rel=1e-6)
        assert two["tasks"][task]["stderr"] == record["stderr"]


def test_a_task_that_is_done_is_not_scored_again(world, tmp_path, offline, monkeypatch):
    folder, _ = world
    scored = []
    run_task = harness.run_task
    monkeypatch.setattr(harness, "run_task", lambda *a: scored.append(a[2]) or run_task(*a))
    arguments = [str(folder / "gf2"), *options(folder, tmp_path)]
    evaluate.main([*arguments, "--tasks", "piqa"])
    evaluate.main([*arguments, "--tasks", "piqa,arc_easy"])
    evaluate.main([*arguments, "--tasks", "arc_easy", "--limit", "3"])
    evaluate.main([str(folder / "learned"), *arguments, "--tasks", "arc_easy"])
    assert scored == ["piqa", "arc_easy", "arc_easy", "arc_easy"]
    assert results_of(tmp_path)["runs"][1]["tasks"]["arc_easy"]["documents"] == 6


def damaged(text, place):
    saved = json.loads(text)
    at = saved
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = 7
    return json.dumps(saved)


def test_a_kept_record_that_is_damaged_is_made_again(world, tmp_path, offline):
    folder, _ = world
    arguments = [str(folder / "gf2"), *options(folder, tmp_path), "--tasks", "wikitext"]
    arguments += ["--samples", str(tmp_path / "samples.jsonl")]
    evaluate.main(arguments)
    (file,), (lines,) = ((tmp_path / "tasks").glob(f"*.{kind}") for kind in ("json", "jsonl"))
    whole, samples = file.read_text(), lines.read_text()
    places = [["record"], ["sha256"], ["sha256", "record"], ["record", "value"]]
    for text in ("", "{}", "[1]", whole[:-9], *(damaged(whole, place) for place in places)):
        file.write_text(text)
        evaluate.main(arguments)
        found, before = json.loads(file.read_text()), json.loads(whole)
        for saved in (found, before):  # but for the clock
            saved["record"]["seconds"] = saved["sha256"]["record"] = 0
        assert found == before
    lines.write_text(samples[:-9])
    evaluate.main(arguments)
    assert lines.read_text() == samples


def test_random_state_is_left_alone(world, tmp_path, offline):
    folder, _ = world
    states = []
    for _ in range(2):
        states.append((np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
        arguments = ["--tasks", "piqa", *options(folder, tmp_path)]
        evaluate.main([str(folder / "gf2"), *arguments])
    assert states[0] == states[1]


def refused(*arguments):
    ran = run_script(*arguments)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    return ran.stderr


def test_refusals(world, tmp_path):
    folder, _ = world
    assert "holds no checkpoint" in refused(tmp_path)
    rng = np.random.default_rng(1)
    write_data(tmp_path / "other", rng.integers(0, 9, 100), rng.integers(0, 9, 100))
    write_run(tmp_path / "elsewhere", tmp_path / "other")
    assert "--data" in refused(folder / "learned", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/tokenizer.json").write_text("{}")
    message = refused(folder / "learned", tmp_path / "elsewhere", "--data", folder / "data")
    assert "elsewhere has another tokenizer" in message


def test_data_that_changed_after_the_run_is_refused_unless_it_is_given(tmp_path, capsys):
    rng, data, run = np.random.default_rng(2), tmp_path / "data", tmp_path / "run"
    write_data(data, rng.integers(0, 9, 900), rng.integers(0, 9, 300))
    write_run(run, data)
    state = run / "step_00000003/state.json"
    write_json(state, dict(update=3, targets=192, data_sha256=sha256(data / "meta.json")))
    arguments = [str(run), "--out", str(tmp_path / "out"), "--dtype", "float32", "--device", "cpu"]
    evaluate.main(arguments)
    before = results_of(tmp_path / "out")["runs"][0]["held_out"]
    meta = json.loads((data / "meta.json").read_text())
    write_json(data / "meta.json", {**meta, "tokenizer": "prepared again, otherwise"})
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(arguments)
    assert stopped.value.code == 2
    assert f"{data} changed after run was made; give it as --data" in capsys.readouterr().err
    evaluate.main([*arguments, "--data", str(data)])
    assert results_of(tmp_path / "out")["runs"][0]["held_out"] == before


def test_refusals_of_benchmarks(world, tmp_path, offline, capsys):
    folder, _ = world

    def message(*arguments, hub=folder / "hub"):
        with pytest.raises(SystemExit) as stopped:
            evaluate.main([str(folder / "gf2"), "--benchmarks", str(hub), "--out", str(tmp_path),
                           *arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1
        return error

    assert "lm-eval has no task nonsense" in message("--tasks", "piqa,nonsense")
    for task in ("humaneval", "mbpp", "squadv2", "gsm8k"):
        assert f"{task} needs generated text" in message("--tasks", f"piqa,{task}")
    assert "--limit 0 " in message("--tasks", "piqa", "--limit", "0")
    error = message("--tasks", "truthfulqa_mc1")
    assert "`hf download truthfulqa/truthful_qa --repo-type dataset --local-dir" in error
    write_set(tmp_path / "hub", "baber/piqa", {"default": {"validation": [{"goal": "a"}]}})
    error = message("--tasks", "piqa", hub=tmp_path / "hub")
    assert "piqa has no 'train'" in error and "even at 0 shots" in error
