"""The paper's table, figures and their differences, names of tasks, and kept records.

python -m pytest tests/unit/test_benchmarks.py
"""

import json
import math
from pathlib import Path

import pytest

from nanocodes.benchmarks import (
    PAPER,
    Conditions,
    RecordFile,
    TaskRecord,
    difference,
    fingerprint,
    parse_name,
    pooled,
    published,
    title_of,
)
from nanocodes.results import Difference

# ---------------- The paper's table and names


def test_published_figures():
    assert published("gf2", "hellaswag") == "51.44"
    assert published("SmolLM2-360M", "hellaswag") == "56.28"
    assert published("learned", "wikitext") is None
    assert published("signs32", "piqa") is None
    assert published("gf2", "boolq") is None
    assert title_of("mmlu:5") == "MMLU, 5 shots" and title_of("boolq") == "boolq"
    assert len(PAPER) == 11


def test_names_of_tasks():
    assert parse_name("piqa") == ("piqa", None)
    assert parse_name("mmlu:5") == ("mmlu", 5)
    with pytest.raises(ValueError, match="lm-eval has no task mmlu:five"):
        parse_name("mmlu:five")


# ---------------- Figures


def test_pooled_figures():
    assert pooled([(1, 1), (0, 1), (0, 1), (0, 1)], "acc") == 25
    assert pooled([(-6.0, 2), (-3.0, 1)], "word_perplexity") == pytest.approx(math.exp(3))


def test_difference_is_paired():
    a = [(1, 1), (0, 1)] * 50
    assert difference(a, a, "acc") == Difference(0, 0, 0)
    b = [(1, 1), (1, 1), (0, 1), (0, 1)] * 25
    found = difference(a, b, "acc")
    assert found.value == 0 and -30 < found.low < -5 and 5 < found.high < 30
    worse = difference([(-2.0, 1)] * 9, [(-3.0, 1)] * 9, "word_perplexity")
    expected = pytest.approx(math.exp(3) - math.exp(2))
    assert [worse.value, worse.low, worse.high] == [expected] * 3


# ---------------- Kept records

CONDITIONS = Conditions({"model.safetensors": "aa", "config.json": "bb"}, "float32", None, None)
RECORD = TaskRecord(
    metric="acc",
    value=50.0,
    stderr=None,
    num_fewshot=0,
    versions={"piqa": 1},
    requests=4,
    seconds=1.5,
    documents=[(1.0, 1), (0.0, 1)],
)


def test_names_of_records_stay():
    """Records of earlier evaluations are found by these names."""
    limited = Conditions(CONDITIONS.sha256, "float32", None, limit=50)
    piqa = RecordFile(Path("tasks"), "piqa", CONDITIONS, with_lines=False)
    mmlu = RecordFile(Path("tasks"), "mmlu:5", limited, with_lines=False)
    assert piqa.path == Path("tasks/piqa-ca2dd9ee75488bd3.json")
    assert mmlu.path == Path("tasks/mmlu-5-dd85e212673b2968.json")


@pytest.mark.parametrize("with_lines", [False, True])
def test_record_comes_back_as_it_was(tmp_path, with_lines):
    file = RecordFile(tmp_path / "tasks", "piqa", CONDITIONS, with_lines)
    assert file.load() is None
    file.save(RECORD, ["{}", "{}"])
    loaded = file.load()
    assert [tuple(pair) for pair in loaded.documents] == RECORD.documents
    loaded.documents = RECORD.documents
    assert loaded == RECORD
    assert file.lines_path.exists() == with_lines
    saved = json.loads(file.path.read_text())
    assert list(saved) == ["key", "sha256", "record"]
    # A record without lines does where none are wanted, and is scored again where they are.
    assert (RecordFile(file.folder, "piqa", CONDITIONS, True).load() is None) != with_lines
    assert RecordFile(file.folder, "piqa", CONDITIONS, False).load() is not None


def test_fingerprint_tells_of_a_changed_set(tmp_path):
    (tmp_path / "sets").mkdir()
    rows = tmp_path / "sets" / "rows.jsonl"
    rows.write_text("{}\n")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    rows.write_text("{}\n{}\n")
    assert fingerprint(tmp_path) != before
