"""What studies/README.md says is what was recorded, and so are the pages of the results.

python -m pytest tests/claims/test_recorded_results.py
"""

import re

import pytest
from helpers import ROOT, read_json_file

from studies import cost, generality
from studies.common import SIZES
from studies.geometry import make_arms
from train import Config

RESULTS = ROOT / "studies" / "results"
README = " ".join((ROOT / "README.md").read_text().split())
STUDIES_README = " ".join((ROOT / "studies" / "README.md").read_text().split())


def answer(number):
    """The section of studies/README.md on a question."""
    return re.search(rf"## {number}\. .*?(?= ## |$)", STUDIES_README)[0]


def recorded(name):
    return read_json_file(RESULTS / f"{name}.json")


def said(found):
    """An interval as the README writes it."""
    return f"{found['mean']:.2f} ± {found['half']:.2f}"


# ---------------- Geometry


@pytest.mark.parametrize(
    "arm",
    [
        "binary16",
        "binary16-small",
        "binary16-signs",
        "gf2",
        "signs-16",
        "signs-32",
        "signs-64",
        "signs-128",
        "gaussian",
        "learned-0.7",
    ],
)
def test_the_gaps_of_geometry(arm):
    found = recorded("geometry")["arms"][arm]
    assert found["seeds"] == [0, 1, 2] and said(found["gap"]) in answer(1)


@pytest.mark.parametrize("arm", ["binary16", "signs-128", "gaussian"])
def test_the_gaps_that_the_front_page_repeats(arm):
    assert said(recorded("geometry")["arms"][arm]["gap"]) in README


@pytest.mark.parametrize("arm", ["binary16", "signs-128"])
def test_the_gaps_at_four_times_the_budget(arm):
    once, found = recorded("geometry"), recorded("geometry-4x")
    assert found["setting"]["max_updates"] == 4 * once["setting"]["max_updates"]
    assert found["arms"][arm]["seeds"] == [0, 1, 2]
    assert said(found["arms"][arm]["gap"]) in answer(1)


@pytest.mark.parametrize("arm", ["binary16", "signs-256"])
def test_the_gaps_at_twice_the_width(arm):
    once, found = recorded("geometry"), recorded("geometry-wide")
    assert found["setting"]["d_model"] == 2 * once["setting"]["d_model"]
    assert said(found["arms"][arm]["gap"]) in answer(1)


def test_how_many_runs_geometry_makes():
    main, _ = make_arms(Config(**SIZES["cpu"]))
    assert f"four minutes for each of {3 * len(main)} runs" in STUDIES_README
    recorded_arms = recorded("geometry")["arms"]
    assert {name for name in main if recorded_arms[name]["seeds"] != [0, 1, 2]} == set()


# ---------------- Formation


@pytest.mark.parametrize("interface", ["learned", "gf2", "signs128"])
def test_the_classes_that_formation_reads(interface):
    found = recorded("formation")["interfaces"][interface]
    classes = found["moments"][-1]["classes"]
    assert found["seeds"] == 3 and said(classes[0]) in answer(2) and said(classes[-1]) in answer(2)


# ---------------- Cost


@pytest.mark.parametrize("shape", cost.SHAPES)
def test_the_page_of_cost_is_what_was_recorded(shape):
    found = recorded("cost")
    page = (RESULTS / "cost.md").read_text()
    changes = found["size"]["shapes"].get(shape, {})
    for part in cost.report(shape, found["shapes"][shape], changes):
        assert part in page


@pytest.mark.parametrize("shape", cost.SHAPES)
def test_what_cost_has_counted_is_counted_so_today(shape):
    changes = recorded("cost")["size"]["shapes"].get(shape, {})
    today = cost.summarise(shape, changes, {})
    for name, figures in today.items():
        found = recorded("cost")["shapes"][shape][name]
        assert {key: found[key] for key in figures} == figures


# ---------------- Generality


def test_the_page_of_generality_is_what_was_recorded():
    found = recorded("generality")
    page = (RESULTS / "generality.md").read_text()
    for part in generality.report(found["variants"], found["size"]):
        assert part in page


@pytest.mark.parametrize("variant", ["base", "context-1024", "vocab-4096", "english"])
def test_the_gaps_of_generality(variant):
    layers = recorded("generality")["variants"][variant]["input_layers"]
    assert layers["binary16"]["seeds"] == [0, 1, 2]
    assert said(layers["binary16"]["gap_bits_per_byte"]) in answer(4)
