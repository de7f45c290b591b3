"""Small evaluations for the tests of evaluate.py: benchmark sets laid out like the repositories on
the hub, runs to be scored on them, and what an evaluation writes.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from helpers import byte_tokenizer, read_json_file, write_data, write_run

VOCABULARY = 259  # the separator, every byte, and two words
RUNS = {
    "learned": dict(input_layer="learned"),
    "gf2": dict(input_layer="gf2"),
    "grouped": dict(input_layer="binary16", n_heads=4, n_kv_heads=2),
}
METRICS = (
    dict(update=1, targets=64, val_loss=5.0, bits_per_byte=1.0),
    dict(update=2, targets=128, loss=5.0, lr=0.1, grad_norm=1.0),
    dict(update=3, targets=192, val_loss=3.0, bits_per_byte=1.0),
)

# ---------------- Data and runs


def write_scored_data(folder, train, val):
    """A data folder of given ids with the byte tokenizer; bytes are counted as two a token."""
    return write_data(
        folder,
        [train],
        [val],
        vocab_size=VOCABULARY,
        tokenizer=byte_tokenizer().to_str(pretty=True),
        bytes_per_token=2,
    )


def write_small_data(folder, seed):
    """A data folder of 900 random ids to train on and 300 held out."""
    generator = np.random.default_rng(seed)
    return write_scored_data(folder, generator.integers(0, 9, 900), generator.integers(0, 9, 300))


def write_scored_run(folder, data, **changes):
    """A run that was trained on a data folder; returns its model."""
    sizes = dict(vocab_size=VOCABULARY, max_seq_len=128)
    return write_run(folder, data=data, metrics=METRICS, **sizes | changes)


# ---------------- Benchmark sets

WORDS = "the a of one with this is near old red sky hill bird tree runs sees finds".split()


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


class SetWriter:
    """Makes the rows of the paper's sets of random words."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def words(self, count):
        return " ".join(self.generator.choice(WORDS, count))

    def choices(self, count):
        return dict(text=[self.words(2) for _ in range(count)], label=list("ABCDE"[:count]))

    def hellaswag(self):
        first = self.words(6)
        second = self.words(3)
        row = dict(ind=0, activity_label="Hills", ctx_a=first, ctx_b=second, label="1")
        return row | dict(ctx=f"{first} {second}", endings=[self.words(4) for _ in range(4)])

    def arc(self):
        question = self.words(7) + "?"
        return dict(id="1", question=question, choices=self.choices(4), answerKey="C")

    def piqa(self):
        return dict(goal=self.words(5), sol1=self.words(6), sol2=self.words(5), label=1)

    def winogrande(self):
        sentence = f"{self.words(5)} because _ {self.words(3)}"
        return dict(sentence=sentence, option1="bird", option2="tree", answer="2")

    def openbookqa(self):
        return dict(id="1", question_stem=self.words(5), choices=self.choices(4), answerKey="A")

    def commonsense_qa(self):
        return dict(id="1", question=self.words(5), choices=self.choices(5), answerKey="E")

    def lambada(self):
        return dict(text=self.words(12))

    def wikitext(self):
        return dict(page=f" = {self.words(2)} = \n {self.words(80)} . \n")

    def mmlu(self):
        answer = int(self.generator.integers(4))
        choices = ["sky", "hill", "it", "so"]
        return dict(question=self.words(4), subject="x", choices=choices, answer=answer)


def rows(make, splits, count=6):
    return {split: [make() for _ in range(count)] for split in splits}


def write_hub(hub, seed=0):
    """The paper's nine repositories, six documents a split; two for each subject of MMLU."""
    make = SetWriter(seed)
    both = ("train", "validation")
    three = (*both, "test")
    write_set(hub, "Rowan/hellaswag", {"default": rows(make.hellaswag, both)})
    arc = {name: rows(make.arc, three) for name in ("ARC-Easy", "ARC-Challenge")}
    write_set(hub, "allenai/ai2_arc", arc)
    write_set(hub, "baber/piqa", {"default": rows(make.piqa, both)})
    write_set(hub, "allenai/winogrande", {"winogrande_xl": rows(make.winogrande, both)})
    write_set(hub, "allenai/openbookqa", {"main": rows(make.openbookqa, three)})
    write_set(hub, "tau/commonsense_qa", {"default": rows(make.commonsense_qa, both)})
    write_set(hub, "EleutherAI/lambada_openai", {"default": rows(make.lambada, ("test",))})
    wikitext = {"wikitext-2-raw-v1": rows(make.wikitext, three)}
    write_set(hub, "EleutherAI/wikitext_document_level", wikitext)
    tasks = Path(find_spec("lm_eval").origin).parent / "tasks/mmlu/default"
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in tasks.glob("mmlu_*.yaml"))
    assert len(subjects) == 57
    mmlu = {
        subject: rows(make.mmlu, ("dev",), 5) | rows(make.mmlu, ("test",), 2)
        for subject in subjects
    }
    write_set(hub, "cais/mmlu", mmlu)


# ---------------- Evaluating


def options(folder, out, *others):
    """The arguments that evaluate on the sets of a folder in float32."""
    given = ["--benchmarks", folder / "hub", "--out", out, "--dtype", "float32", "--device", "cpu"]
    return [*map(str, given), *others]


def results_of(out):
    return read_json_file(out / "results.json")
