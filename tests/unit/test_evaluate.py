"""Checkpoints -> numbers, on tiny sets of lm-eval's own tasks.

python -m pytest tests/unit/test_evaluate.py
"""

import json
import math

import evaluation
import numpy as np
import pytest
import torch
from evaluation import VOCABULARY, options, results_of
from helpers import run_ranks

import evaluate
from convert import to_hf
from nanocodes import benchmarks
from nanocodes.batches import read_windows
from nanocodes.files import sha256
from nanocodes.plan import parameter_counts
from nanocodes.shards import open_shards

PNG = b"\x89PNG"

# ---------------- Runs


def test_validation_curve_is_that_of_the_run_less_a_torn_line(tmp_path):
    lines = [json.dumps(line) for line in evaluation.METRICS]
    torn = '{"update": 3, "tar'
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, torn]))
    assert evaluate.validation_curve(tmp_path) == ([64, 192], [5.0, 3.0])


def test_step_folder_and_equal_names(scored, tmp_path):
    evaluation.write_scored_run(tmp_path / "learned", scored.folder / "data")
    step = scored.folder / "learned" / "step_00000003"
    assert [run.name for run in evaluate.open_runs([str(step)])] == ["learned/step_00000003"]
    paths = [str(scored.folder / "learned"), str(tmp_path / "learned")]
    assert [run.name for run in evaluate.open_runs(paths)] == paths


# ---------------- Held-out loss


def test_held_out_loss_is_that_of_every_target(scored, tmp_path, capsys):
    runs = [str(scored.folder / name) for name in ("learned", "gf2")]
    evaluate.main([*runs, "--out", str(tmp_path), "--dtype", "float32"])
    results = results_of(tmp_path)
    val = open_shards(scored.folder / "data", "val")
    ids, targets = read_windows(val, range((val.tokens - 1) // 128), 128)
    for run in results["runs"]:
        model = scored.models[run["name"]]
        with torch.no_grad():
            losses = model.losses(ids, targets).double()
        loss = run["held_out"]
        assert loss["nats_per_token"] == pytest.approx(losses.mean().item(), rel=1e-9)
        assert loss["bits_per_byte"] == pytest.approx(losses.mean().item() / math.log(2) / 2)
        assert loss["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-9)
        sizes = results["held_out"]["decile_targets"]
        parts = [s * d for s, d in zip(sizes, loss["deciles"], strict=True) if s]
        assert sum(parts) == pytest.approx(losses.sum().item(), rel=1e-9)
        assert run["parameters"] == parameter_counts(model)
        weights = scored.folder / run["name"] / "step_00000003/model.safetensors"
        assert run["sha256"]["model.safetensors"] == sha256(weights)
    train_ids = open_shards(scored.folder / "data", "train").read(0, 4000)
    counts = np.bincount(train_ids, minlength=VOCABULARY)
    unigram = np.log((4000 + VOCABULARY) / (counts[targets.flatten()] + 1))
    assert results["held_out"]["unigram"] == pytest.approx(unigram.mean(), rel=1e-9)
    assert results["held_out"]["targets"] == targets.numel()
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert "| learned " in printed and "| gf2 " in printed
    assert (tmp_path / "comparison.png").read_bytes()[:4] == PNG


# ---------------- Benchmarks


def test_task_names_may_have_blanks_and_come_twice():
    assert evaluate.task_names("piqa, hellaswag ,piqa,mmlu:5") == ["piqa", "hellaswag", "mmlu:5"]
    assert evaluate.task_names("paper") == list(benchmarks.PAPER)
    assert evaluate.task_names("paper,piqa") == ["paper", "piqa"]


def test_paper_tasks_and_what_is_written(scored, tmp_path, offline, capsys):
    to_hf(scored.folder / "gf2", tmp_path / "SmolLM2-135M")
    runs = [str(scored.folder / "gf2"), str(tmp_path / "SmolLM2-135M")]
    arguments = [*runs, "--tasks", "paper", "--samples", str(tmp_path / "samples.jsonl")]
    evaluate.main([*arguments, *options(scored.folder, tmp_path / "out")])
    results = results_of(tmp_path / "out")
    gf2, exported = results["runs"]
    assert list(gf2["tasks"]) == list(benchmarks.PAPER)
    assert results["harness"] == "0.4.13" and results["dtype"] == "float32 (as asked)"
    assert gf2["held_out"] and exported["held_out"] is None
    for name, found in gf2["tasks"].items():
        paper = benchmarks.PAPER[name]
        same = exported["tasks"][name]
        assert found["metric"] == paper.metric
        assert found["documents"] == (114 if name.startswith("mmlu") else 6)
        assert found["num_fewshot"] == (5 if name == "mmlu:5" else 0)
        assert same["value"] == pytest.approx(found["value"], rel=1e-5)
        assert same["difference"]["value"] == pytest.approx(0, abs=1e-5 * found["value"])
        assert found["published"] == paper.published.get("gf2")
        assert same["published"] == paper.published.get("SmolLM2-135M")
    lines = list(map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()))
    fields = "run task doc_id num_fewshot context continuation loglikelihood is_greedy"
    assert list(lines[0]) == fields.split()
    assert len(lines) == 2 * sum(found["requests"] for found in gf2["tasks"].values())
    printed = capsys.readouterr().out
    assert (tmp_path / "out/table.md").read_text() in printed
    assert "[51.44]" in printed and "| WikiText " in printed
    assert (tmp_path / "out/comparison.png").read_bytes()[:4] == PNG


def test_two_ranks_give_the_same_figures(scored, tmp_path, offline):
    tasks = "piqa,wikitext,lambada_openai,mmlu"
    arguments = [str(scored.folder / "gf2"), "--tasks", tasks, "--limit", "5"]
    on_two = [*arguments, *options(scored.folder, tmp_path / "two")]
    exit_statuses, errors = run_ranks(2, tmp_path, evaluate.main, on_two)
    assert exit_statuses == [0, 0], errors
    assert not any("the process group was not destroyed" in error for error in errors)
    printed = [(tmp_path / f"rank_{rank}_of_2.out").read_text() for rank in range(2)]
    assert printed[0].count("Benchmarks (lm-eval") == 1 and printed[1] == ""
    evaluate.main([*arguments, *options(scored.folder, tmp_path / "one")])
    (one,), (two,) = (results_of(tmp_path / name)["runs"] for name in ("one", "two"))
    loss = one["held_out"]["nats_per_token"]
    assert two["held_out"]["nats_per_token"] == pytest.approx(loss, rel=1e-9)
    for name, found in one["tasks"].items():
        same = two["tasks"][name]
        assert found["documents"] == same["documents"] == (114 if name == "mmlu" else 5)
        assert same["value"] == pytest.approx(found["value"], rel=1e-6)
        assert same["stderr"] == found["stderr"]


def test_finished_task_is_not_scored_again(scored, tmp_path, offline, monkeypatch):
    names = []
    run_task = benchmarks.run_task

    def counted(scorer, tasks, name, limit):
        names.append(name)
        return run_task(scorer, tasks, name, limit)

    monkeypatch.setattr(benchmarks, "run_task", counted)
    arguments = [str(scored.folder / "gf2"), *options(scored.folder, tmp_path)]
    evaluate.main([*arguments, "--tasks", "piqa"])
    evaluate.main([*arguments, "--tasks", "piqa,arc_easy"])
    evaluate.main([*arguments, "--tasks", "arc_easy", "--limit", "3"])
    evaluate.main([str(scored.folder / "learned"), *arguments, "--tasks", "arc_easy"])
    assert names == ["piqa", "arc_easy", "arc_easy", "arc_easy"]
    assert results_of(tmp_path)["runs"][1]["tasks"]["arc_easy"]["documents"] == 6


def test_random_state_is_left_alone(scored, tmp_path, offline):
    states = []
    for _ in range(2):
        states.append((np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
        arguments = ["--tasks", "piqa", *options(scored.folder, tmp_path)]
        evaluate.main([str(scored.folder / "gf2"), *arguments])
    assert states[0] == states[1]
