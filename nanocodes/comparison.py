"""Results -> comparison.png: loss while training, loss by token frequency, and benchmarks."""

from nanocodes.benchmarks import title_of
from nanocodes.pictures import (
    GREY,
    MARKER_SIZE,
    draw_curve,
    label_curves,
    looks_of,
    new_figure,
    plain_numbers,
    save_figure,
)


def draw_comparison(results, path):
    """Draw those of the three panels for which Results have figures."""
    runs = results.runs
    looks = looks_of([run.input_layer for run in runs], foreign=[run.hugging_face for run in runs])
    panel_count = (2 if results.held_out else 0) + (1 if results.harness else 0)
    figure, panels = new_figure(panel_count)
    if results.held_out:
        draw_validation(panels[0], results, looks)
        draw_deciles(panels[1], results, looks)
    if results.harness:
        draw_benchmarks(panels[-1], results, looks)
    save_figure(figure, path)


def draw_validation(axes, results, looks):
    unigram = results.held_out.unigram
    axes.axhline(unigram, color=GREY, linewidth=0.8, label="unigram")
    for run, look in zip(results.runs, looks, strict=True):
        if run.held_out:
            draw_curve(axes, run.validation.targets, run.validation.losses, look, run.name)
    axes.set(xscale="log", yscale="log", xlabel="targets seen", ylabel="nats per token")
    axes.set_title("Validation loss while training")
    plain_numbers(axes.yaxis)
    label_curves(axes)


def draw_deciles(axes, results, looks):
    held_out = results.held_out
    used = [i for i, targets in enumerate(held_out.decile_targets) if targets]
    places = [i + 1 for i in used]
    unigram = [held_out.decile_unigram[i] for i in used]
    axes.plot(places, unigram, color=GREY, linewidth=0.8, label="unigram")
    for run, look in zip(results.runs, looks, strict=True):
        if run.held_out:
            losses = [run.held_out.deciles[i] for i in used]
            draw_curve(axes, places, losses, look, run.name)
    axes.set(xlabel="decile of targets, frequent to rare", ylabel="nats per token")
    axes.set_title("Held-out loss by token frequency")
    label_curves(axes)


def draw_benchmarks(axes, results, looks):
    """A row for each task in percent, in it a point for each run."""
    runs = results.runs
    tasks = [n for n, task in runs[0].tasks.items() if task.metric != "word_perplexity"]
    for i, (run, look) in enumerate(zip(runs, looks, strict=True)):
        values = [run.tasks[name].value for name in tasks]
        errors = [run.tasks[name].stderr or 0 for name in tasks]
        offset = 0.6 * ((i + 0.5) / len(runs) - 0.5)
        rows = [row + offset for row in range(len(tasks))]
        axes.errorbar(
            values,
            rows,
            xerr=errors,
            color=look.colour,
            linestyle="none",
            marker=look.marker,
            markersize=MARKER_SIZE,
            label=run.name,
        )
    axes.set_yticks(range(len(tasks)), [title_of(name) for name in tasks])
    axes.invert_yaxis()
    axes.set(xlabel="percent ± standard error", title="Benchmarks")
    legend = axes.legend(frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a run's name may hold a $
