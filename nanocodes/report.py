"""Results -> Markdown: what evaluate.py prints and writes to table.md."""

import math

from nanocodes.benchmarks import title_of


def number(value, places=0):
    """A figure with thousands marked; nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if places == 0 else f"{value:,.{places}f}"


def table(header, rows):
    """A Markdown table, padded so that it also reads well on a terminal."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (header, rule, *rows):
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(results):
    """All tables of Results, with a sentence on each."""
    parts = parameters_part(results)
    if results.held_out:
        parts += held_out_part(results)
    if results.harness:
        parts += tasks_part(results)
    return "\n\n".join(parts) + "\n"


def parameters_part(results):
    rows = []
    for run in results.runs:
        counts = [*run.parameters.values(), sum(run.parameters.values())]
        figures = [run.update, run.targets, *counts]
        rows.append([run.name, run.input_layer, *map(number, figures)])
    header = ["run", "input layer", "update", "targets seen", "input", "backbone", "head", "all"]
    return [f"Parameters by group. Scored in {results.dtype}.", table(header, rows)]


def held_out_part(results):
    """The losses of the runs that have one, and these by token frequency."""
    held_out = results.held_out
    runs = [run for run in results.runs if run.held_out]
    losses_caption = (
        f"Held-out loss on {held_out.data}: {held_out.targets:,} targets in {held_out.windows:,} "
        f"windows of {held_out.targets_per_window:,}, the same for every run. `unigram` is the "
        "loss of the same targets under the token frequencies of the training split (its first "
        f"{held_out.counted_training_tokens:,} tokens, each count plus one)."
    )
    unigram = held_out.unigram
    losses = [["unigram", number(unigram, 4), "", number(math.exp(unigram), 2)]]
    for run in runs:
        loss = run.held_out
        figures = [number(loss.nats_per_token, 4), number(loss.bits_per_byte, 4)]
        losses.append([run.name, *figures, number(loss.perplexity, 2)])

    deciles_caption = (
        "Nats per token by token frequency: the targets sorted by how often their id occurs in "
        "training, most frequent first, in ten groups as equal as whole ids allow."
    )
    deciles = []
    for i, targets in enumerate(held_out.decile_targets):
        if targets:
            figures = [held_out.decile_unigram[i], *(run.held_out.deciles[i] for run in runs)]
            row = [str(i + 1), number(targets), *(number(figure, 3) for figure in figures)]
            deciles.append(row)
    return [
        losses_caption,
        table(["run", "nats per token", "bits per byte", "perplexity"], losses),
        deciles_caption,
        table(["decile", "targets", "unigram", *(run.name for run in runs)], deciles),
    ]


def tasks_part(results):
    """Every run's figures beside the paper's, and the differences from the first run."""
    first, *others = results.runs
    limited = f"the first {results.limit} documents of each task, " if results.limit else ""
    figures_caption = (
        f"Benchmarks (lm-eval {results.harness}, {limited}percent, WikiText perplexity per word), "
        "± standard error, and in brackets what the paper gives for such a model after 100B "
        "targets."
    )
    figures = []
    differences = []
    for name, task in first.tasks.items():
        cells = [figure_cell(run.tasks[name]) for run in results.runs]
        figures.append([title_of(name), task.metric, number(task.documents), *cells])
        cells = [difference_cell(run.tasks[name].difference) for run in others]
        differences.append([title_of(name), *cells])
    header = ["task", "metric", "documents", *(run.name for run in results.runs)]
    parts = [figures_caption, table(header, figures)]
    if others:
        parts += [
            f"Difference from {first.name}, and its 95 % interval by a paired bootstrap.",
            table(["task", *(run.name for run in others)], differences),
        ]
    return parts


def figure_cell(task):
    cell = number(task.value, 2)
    if task.stderr is not None:
        cell += f" ± {task.stderr:.2f}"
    if task.published:
        cell += f" [{task.published}]"
    return cell


def difference_cell(difference):
    return f"{difference.value:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})"
