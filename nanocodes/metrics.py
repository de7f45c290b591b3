"""metrics.jsonl, the record of a run, one JSON object a line; and loss.png, its picture."""

import json
from contextlib import suppress
from pathlib import Path

from nanocodes.files import naming, write_whole

FILE = "metrics.jsonl"


def read_metrics(run):
    """The lines of a run's metrics.jsonl, dicts. A line torn by a kill or a disk is left out."""
    path = Path(run) / FILE
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            lines.append(json.loads(text))
    return [line for line in lines if is_metrics(line)]


def is_metrics(line):
    """Whether a JSON value is a line of metrics: an update and finite numbers."""
    if not isinstance(line, dict) or type(line.get("update")) is not int:
        return False
    return all(type(value) in (int, float) and not abs(value) > 1e30 for value in line.values())


def append_metrics(run, values):
    """Put one line behind the others."""
    path = Path(run) / FILE
    with naming(path), open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def rewind_metrics(run, update):
    """Drop what a run recorded after a checkpoint, since it will record that again.

    The validation of the checkpoint's own update came after it, and goes as well.
    """
    kept = []
    for line in read_metrics(run):
        before = line["update"] < update if "val_loss" in line else line["update"] <= update
        if before:
            kept.append(json.dumps(line) + "\n")
    write_whole(Path(run) / FILE, "".join(kept).encode())


def draw_losses(run):
    """Draw loss.png: the losses of a run over the targets it has seen."""
    from matplotlib.figure import Figure

    lines = [line for line in read_metrics(run) if "targets" in line]
    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [line for line in lines if key in line]
        targets = [line["targets"] for line in points]
        axes.plot(targets, [line[key] for line in points], label=label)
    axes.set(xlabel="targets", ylabel="nats per token")
    axes.legend()
    axes.figure.savefig(Path(run) / "loss.png", dpi=120)
