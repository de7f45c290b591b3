"""The look of every picture: colours, line styles, and labels at the ends of curves.

python -m pytest tests/unit/test_pictures.py
"""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import is_color_like

from model import INPUT_LAYERS
from nanocodes.pictures import (
    BLUE,
    FAMILY_COLOURS,
    GREY,
    LINE_STYLES,
    Look,
    colour_of,
    draw_curve,
    label_curves,
    looks_of,
    new_figure,
    save_figure,
    spread,
)

# ---------------- Looks


def test_families_have_a_colour_each():
    families = ("learned", "binary16", "gf2", "signs")
    assert len({colour_of(family) for family in families}) == len(families)
    assert {colour_of(name) for name in ("signs", "signs32", "signs128")} == {colour_of("signs")}
    assert {colour_of(name) for name in ("gf2", "gf2-other")} == {colour_of("gf2")}


@given(st.text())
def test_any_input_layer_has_the_same_colour_each_time(name):
    colour = colour_of(name)
    assert is_color_like(colour) and colour != GREY
    assert colour == colour_of(name)
    assert colour not in FAMILY_COLOURS.values() or name.startswith(tuple(FAMILY_COLOURS))


def test_runs_of_one_colour_differ_in_line_style():
    assert looks_of(["learned", "gf2", "learned"]) == [
        Look(BLUE, "-"),
        Look(colour_of("gf2"), "-"),
        Look(BLUE, "--"),
    ]


@given(st.lists(st.tuples(st.sampled_from(list(INPUT_LAYERS)), st.booleans()), max_size=20))
def test_no_two_runs_look_alike_while_styles_are_left(runs):
    input_layers = [input_layer for input_layer, _ in runs]
    looks = looks_of(input_layers, foreign=[foreign for _, foreign in runs])
    assert [look.colour for look in looks] == [colour_of(name) for name in input_layers]
    for colour in {look.colour for look in looks}:
        styles = [look.line_style for look in looks if look.colour == colour]
        assert len(set(styles)) == min(len(styles), len(LINE_STYLES))
    assert len({look.marker for look in looks}) == len({look.line_style for look in looks})


def test_model_from_outside_is_not_drawn_as_the_first_of_ours():
    ours, foreign = looks_of(["learned", "learned"], foreign=[False, True])
    assert ours.line_style == LINE_STYLES[0] and foreign.line_style == LINE_STYLES[-1]


# ---------------- Labels

heights = st.lists(st.floats(-1e3, 1e3), max_size=12).map(sorted)


@given(heights, st.floats(0.1, 100))
def test_spread_keeps_labels_apart_and_in_order(heights, least):
    found = spread(heights, least)
    assert len(found) == len(heights)
    assert all(b - a >= least - 1e-6 for a, b in itertools.pairwise(found))


@given(heights, st.floats(0.1, 100), st.randoms(use_true_random=False))
def test_spread_moves_labels_as_little_as_possible(heights, least, random):
    def moved(places):
        return sum((place - height) ** 2 for place, height in zip(places, heights, strict=True))

    found = spread(heights, least)
    # The sum of squares is convex, so that places are the best if no small step betters them.
    for _ in range(20):
        steps = [random.uniform(-least, least) / 10 for _ in found]
        others = [place + step for place, step in zip(found, steps, strict=True)]
        if all(b - a >= least for a, b in itertools.pairwise(others)):
            assert moved(others) >= moved(found) - 1e-6


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([], []),
        ([5], [5]),
        ([0, 10, 20], [0, 10, 20]),
        ([5, 5], [0, 10]),
        ([0, 0, 0], [-10, 0, 10]),
        ([0, 8, 100], [-1, 9, 100]),
        ([0, 11, 11], [-8 / 3, 22 / 3, 52 / 3]),  # the lower label is pushed by the upper two
    ],
)
def test_spread_by_hand(heights, expected):
    assert spread(heights, 10) == pytest.approx(expected)


def draw_labelled(curves):
    """The texts that label the curves {label: (xs, ys)}."""
    _, (axes,) = new_figure()
    for label, (xs, ys) in curves.items():
        draw_curve(axes, xs, ys, looks_of(["gf2"])[0], label)
    label_curves(axes)
    return list(axes.texts)


def test_labels_stand_at_the_last_finite_points():
    texts = draw_labelled({"a": ([1, 2, 3], [1, 2, 3]), "b": ([1, 2, 3], [5, 4, math.nan])})
    assert {text.get_text(): text.xy for text in texts} == {"a": (3, 3), "b": (2, 4)}
    assert {text.get_color() for text in texts} == {colour_of("gf2")}


def test_empty_curves_and_curves_without_a_label_have_none_written():
    curves = {
        "empty": ([], []),
        "unknown": ([1, 2], [math.nan, math.inf]),
        "None": ([1], [None]),
        "_hidden": ([1], [1]),
        "seen": ([1], [2]),
    }
    assert [text.get_text() for text in draw_labelled(curves)] == ["seen"]
    assert draw_labelled({}) == draw_labelled({"empty": ([], [])}) == []


def test_label_may_hold_any_character(tmp_path):
    (text,) = draw_labelled({"run $x_{$": ([1], [2])})
    save_figure(text.figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_labels_of_curves_that_end_together_do_not_overlap():
    texts = draw_labelled({name: ([1, 2], [1, 1]) for name in "abc"})
    figure = texts[0].figure
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))


def test_picture_that_cannot_be_written_is_named(tmp_path):
    figure, _ = new_figure()
    with pytest.raises(OSError, match="picture.png"):
        save_figure(figure, tmp_path / "none" / "picture.png")
