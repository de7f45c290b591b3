"""What evaluate.py finds, in the form of results.json: every field is a key there."""

from dataclasses import dataclass
from typing import NamedTuple


class Curve(NamedTuple):
    """Validation losses while training, in nats per token, over the targets seen."""

    targets: list
    losses: list


@dataclass
class HeldOutTargets:
    """The held-out targets, the same for every run, and what token frequencies alone give."""

    data: str
    windows: int
    targets_per_window: int
    targets: int
    counted_training_tokens: int  # of these are the frequencies
    unigram: float  # nats per token under the frequencies, each count plus one
    decile_targets: list
    decile_unigram: list  # nats per token in each decile


@dataclass
class Difference:
    """A run's figure less the first run's, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass
class TaskResult:
    """A run's figure on a task of lm-eval."""

    metric: str
    value: float  # percent, or perplexity per word
    stderr: float | None
    num_fewshot: int
    versions: dict  # task of lm-eval -> its version
    requests: int
    seconds: float
    documents: int
    published: str | None  # what the paper gives for such a model
    difference: Difference


@dataclass
class Run:
    """A checkpoint that is to be measured, without its weights."""

    name: str
    checkpoint: str  # its step folder, or its Hugging Face folder
    hugging_face: bool
    input_layer: str
    vocab_size: int
    max_seq_len: int
    data: str | None
    data_sha256: str | None  # of the meta.json of its data
    update: int | None
    targets: int | None  # seen in training
    tokenizer: str
    sha256: dict  # file name -> hex digest
    validation: Curve


@dataclass
class MeasuredRun(Run):
    parameters: dict  # input, backbone, head -> their number of parameters
    held_out: object  # a HeldOutLoss, or None
    tasks: dict  # name[:shots] -> TaskResult


@dataclass
class Results:
    torch: str
    device: str
    dtype: str
    harness: str | None  # the version of lm-eval
    limit: int | None  # documents of each task
    held_out: HeldOutTargets | None
    runs: list  # of MeasuredRun
