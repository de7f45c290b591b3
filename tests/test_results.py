"""What the README says is what was recorded. Run with: python -m pytest tests/test_results.py"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "studies"))

import geometry

from train import Config

ROOT = Path(__file__).parent.parent
README = " ".join((ROOT / "README.md").read_text().split())
QUESTIONS = README.split("## Past the paper")[1].split("## Add an input layer")[0].split(" **")


def answer(number):
    return next(text for text in QUESTIONS if text.startswith(f"{number}. "))


def recorded(name):
    return json.loads((ROOT / f"studies/results/{name}.json").read_text())


def said(found):
    """An interval as the README writes it."""
    return f"{found['mean']:.2f} ± {found['half']:.2f}"


@pytest.mark.parametrize(
    "arm",
    ["binary16", "binary16-small", "binary16-signs", "gf2", "signs-16", "signs-32", "signs-64",
     "signs-128", "gaussian", "learned-0.7"],
)  # fmt: skip
def test_the_gaps_of_geometry(arm):
    found = recorded("geometry")["arms"][arm]
    assert found["seeds"] == [0, 1, 2] and said(found["gap"]) in answer(1)


@pytest.mark.parametrize("arm", ["binary16", "signs-128"])
def test_the_gaps_at_four_times_the_budget(arm):
    once, found = (recorded(name) for name in ("geometry", "geometry-4x"))
    assert found["setting"]["max_updates"] == 4 * once["setting"]["max_updates"]
    assert found["arms"][arm]["seeds"] == [0, 1, 2]
    assert said(found["arms"][arm]["gap"]) in answer(1)


@pytest.mark.parametrize("arm", ["binary16", "signs-256"])
def test_the_gaps_at_twice_the_width(arm):
    once, found = (recorded(name) for name in ("geometry", "geometry-wide"))
    assert found["setting"]["d_model"] == 2 * once["setting"]["d_model"]
    assert said(found["arms"][arm]["gap"]) in answer(1)


def test_how_many_runs_geometry_makes():
    main, _ = geometry.make_arms(Config(**geometry.SIZES["cpu"]))
    assert f"four minutes for each of {3 * len(main)} runs" in README
    recorded_arms = recorded("geometry")["arms"]
    assert {name for name in main if recorded_arms[name]["seeds"] != [0, 1, 2]} == set()


@pytest.mark.parametrize("interface", ["learned", "gf2", "signs128"])
def test_the_classes_that_formation_reads(interface):
    found = recorded("formation")["interfaces"][interface]
    classes = found["moments"][-1]["classes"]
    assert found["seeds"] == 3 and said(classes[0]) in answer(2) and said(classes[-1]) in answer(2)
