"""Results -> Markdown. Run with: python -m pytest tests/unit/test_report.py"""

from nanocodes.held_out import HeldOutLoss
from nanocodes.report import number, report, table
from nanocodes.results import Curve, Difference, HeldOutTargets, MeasuredRun, Results, TaskResult


def measured_run(name, held_out=None, tasks=None, update=None):
    return MeasuredRun(
        name=name,
        checkpoint="",
        hugging_face=False,
        input_layer="gf2",
        vocab_size=64,
        max_seq_len=16,
        data=None,
        data_sha256=None,
        update=update,
        targets=update and 64 * update,
        tokenizer="",
        sha256={},
        validation=Curve([], []),
        parameters={"input": 0, "backbone": 1000, "head": 2000},
        held_out=held_out,
        tasks=tasks or {},
    )


def results_of(runs, held_out=None, harness=None, limit=None):
    return Results("2.0", "cpu", "float32 (as asked)", harness, limit, held_out, runs)


def task_result(value, published, difference):
    return TaskResult(
        metric="acc",
        value=value,
        stderr=1.25,
        num_fewshot=0,
        versions={},
        requests=2000,
        seconds=1.0,
        documents=1000,
        published=published,
        difference=difference,
    )


def test_numbers():
    assert number(None) == number(None, 2) == ""
    assert number(1_234_567) == "1,234,567"
    assert number(1234.567, 2) == "1,234.57"


def test_table_is_padded():
    assert table(["run", "nats"], [["a-long-name", "1"], ["b", "23456"]]) == (
        "| run         |  nats |\n"
        "| ----------- | ----: |\n"
        "| a-long-name |     1 |\n"
        "| b           | 23456 |"
    )
    assert table(["a", "b"], []) == "| a   |   b |\n| --- | --: |"


def test_parameters_of_a_run_that_was_not_trained_here():
    text = report(results_of([measured_run("one", update=3), measured_run("other")]))
    assert text == (
        "Parameters by group. Scored in float32 (as asked).\n\n"
        "| run   | input layer | update | targets seen | input | backbone |  head |   all |\n"
        "| ----- | ----------: | -----: | -----------: | ----: | -------: | ----: | ----: |\n"
        "| one   |         gf2 |      3 |          192 |     0 |    1,000 | 2,000 | 3,000 |\n"
        "| other |         gf2 |        |              |     0 |    1,000 | 2,000 | 3,000 |\n"
    )


def test_held_out_losses_leave_out_empty_deciles_and_runs_without_a_loss():
    targets = HeldOutTargets(
        data="data/x",
        windows=20,
        targets_per_window=100,
        targets=2000,
        counted_training_tokens=5000,
        unigram=2.0,
        decile_targets=[1500, 0, 500] + [0] * 7,
        decile_unigram=[1.0, 0, 5.0] + [0] * 7,
    )
    loss = HeldOutLoss(1.5, 0.75, 4.4817, deciles=[1.0, None, 3.0] + [None] * 7)
    runs = [measured_run("one", held_out=loss), measured_run("other")]
    parts = report(results_of(runs, held_out=targets)).rstrip("\n").split("\n\n")
    assert "2,000 targets in 20 windows of 100" in parts[2] and "5,000 tokens" in parts[2]
    assert parts[3] == (
        "| run     | nats per token | bits per byte | perplexity |\n"
        "| ------- | -------------: | ------------: | ---------: |\n"
        "| unigram |         2.0000 |               |       7.39 |\n"
        "| one     |         1.5000 |        0.7500 |       4.48 |"
    )
    assert parts[5] == (
        "| decile | targets | unigram |   one |\n"
        "| ------ | ------: | ------: | ----: |\n"
        "| 1      |   1,500 |   1.000 | 1.000 |\n"
        "| 3      |     500 |   5.000 | 3.000 |"
    )


def test_tasks_stand_beside_the_paper_and_the_first_run():
    one = {"piqa": task_result(70.0, "71.16", Difference(0, 0, 0))}
    other = {"piqa": task_result(68.5, None, Difference(-1.5, -3.0, 0.25))}
    runs = [measured_run("one", tasks=one), measured_run("other", tasks=other)]
    parts = report(results_of(runs, harness="0.4", limit=5)).rstrip("\n").split("\n\n")
    assert "lm-eval 0.4, the first 5 documents of each task" in parts[2]
    assert parts[3] == (
        "| task | metric | documents |                  one |        other |\n"
        "| ---- | -----: | --------: | -------------------: | -----------: |\n"
        "| PIQA |    acc |     1,000 | 70.00 ± 1.25 [71.16] | 68.50 ± 1.25 |"
    )
    assert parts[4].startswith("Difference from one")
    assert parts[5] == (
        "| task |                  other |\n"
        "| ---- | ---------------------: |\n"
        "| PIQA | -1.50 (-3.00 to +0.25) |"
    )
    alone = report(results_of(runs[:1], harness="0.4"))
    assert "Difference" not in alone and "the first" not in alone
