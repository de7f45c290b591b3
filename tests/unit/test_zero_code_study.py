"""The study of the zero code. Run with: python -m pytest tests/unit/test_zero_code_study.py"""

import json
import math

import helpers
import numpy as np
import pytest
import torch
from helpers import assert_close, refused, refused_script

from codes import code_table
from model import ModelConfig, Transformer
from studies import zero_code
from studies.zero_code import FIXED, make_model

V = 300


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(zero_code.SHAPE, "vocab_size", V)


def write_data(folder, ids):
    """A data folder with these ids as its train split, a separator at the end of a document."""
    data = helpers.write_data(folder, [ids], vocab_size=V)
    meta = helpers.read_json_file(data / "meta.json")
    meta["splits"]["train"]["documents"] = ids.count(0)
    helpers.edit_json(data / "meta.json", meta)
    return data


def test_matrices_are_as_large_as_at_the_papers_width():
    found = make_model("learned", 3, scale=2).state_dict()
    drawn = Transformer(ModelConfig(n_layers=3, **zero_code.SHAPE)).state_dict()
    assert found.keys() == drawn.keys()
    for name, weight in drawn.items():
        factor = 1 if weight.dim() == 1 or name == "input.weight" else 2 * 32**0.5
        assert torch.equal(found[name], weight * factor), name


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("name", FIXED)
def test_separators_alone_are_exactly_uniform(name, length):
    found = zero_code.only_separators(make_model(name), length)
    assert found["residual"] == found["logit"] == 0
    assert found["loss"] == pytest.approx(math.log(V), abs=2e-6)
    assert found["loss - ln V"] == found["loss"] - math.log(V)


def test_a_learned_separator_is_not_uniform():
    found = zero_code.only_separators(make_model("learned"), 8)
    assert min(found["residual"], found["logit"], abs(found["loss - ln V"])) > 0.01


def test_the_statement_without_anything_added_is_the_model():
    model = make_model("learned").double()
    ids = zero_code.draw_ids(16, 3)
    assert_close(zero_code.softmax_plus(model, ids[0], 0), model(ids)[0][0], 1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("name", FIXED)
def test_leading_separators_are_softmax_plus_n_and_trailing_ones_nothing(name, n):
    model = make_model(name).double()
    ids = zero_code.draw_ids(16, 3)
    found = zero_code.padding(model, ids, n)
    assert found["left, from softmax plus n"] < 1e-12
    assert found["left, from none"] > 0.1
    assert found["right, from none"] < 1e-12
    other = zero_code.softmax_plus(model, ids[0], n + 1) - zero_code.softmax_plus(model, ids[0], n)
    assert other.abs().max() > 0.01


def test_only_a_zero_code_takes_the_plain_mean():
    ids = zero_code.draw_ids(16, 3)
    for name in ("learned", *FIXED):
        found = zero_code.middle_separator(make_model(name).double(), ids, 8)
        assert found["size"] > 0.01
        assert (found["difference"] < 1e-14) == (name in FIXED)


@pytest.mark.parametrize("n_layers, scale", [(6, 1), (24, 1), (24, 2)])
def test_a_block_multiplies_the_gradient_as_the_docstring_says(n_layers, scale):
    model = make_model("gf2", n_layers, scale)
    norms = zero_code.leading_separator(model, "float64", masked=False).norms
    factors = [a / b for a, b in zip(norms, norms[1:], strict=False)]
    expected = scale**2 * 1e-5**-0.5 * 0.02**2 * 2048 / (2 * n_layers) ** 0.5
    assert len(norms) == n_layers and min(factors) > expected / 2
    assert zero_code.growth_per_block(norms) == pytest.approx(expected, rel=0.15)
    assert model.input.zero_id == 0
    assert max(zero_code.leading_separator(model, "float64", masked=True).norms) < 1e4


@pytest.mark.parametrize("dtype", zero_code.DTYPES)
@pytest.mark.parametrize("scale", [1, 2])
def test_the_mask_changes_no_bit_of_a_finite_gradient(scale, dtype):
    found = zero_code.compare_mask(make_model("gf2", scale=scale), dtype)
    row = found.row
    overflows = scale == 2 and dtype != "float64"
    assert row["finite, mask"] == row["parameters"] == 9 * 24 + 2
    assert row["same bits"] == row["finite, no mask"]
    assert (row["finite, no mask"] < row["parameters"]) == overflows
    lost = found.without.count(None)
    assert (lost > 0) == overflows and row["finite down to block"] == lost + 1
    assert found.without[:lost] == [None] * lost
    assert None not in found.without[lost:] + found.masked
    assert row["no mask"] == found.without[0] and row["mask"] == found.masked[0]


def test_an_offset_signs_and_a_table_leave_no_zero_code():
    models = zero_code.without_zero_code()
    assert [model.input.zero_id for model in models.values()] == [0, None, None, None]
    for name, model in models.items():
        zeros = (model.input.table() == 0).all(dim=1).sum()
        norms = zero_code.leading_separator(model, "float64", masked=False).norms
        assert zeros == (name == "gf2") and (norms[0] / norms[-1] > 1e6) == (name == "gf2")
    signs = models["binary16, -1 and 1"].input.table()
    assert set(signs.unique().tolist()) == {-1, 1} and signs[6, :4].tolist() == [-1, 1, 1, -1]
    offset = next(int(name.split()[-1]) for name in models if "offset" in name)
    table = code_table("gf2", V + 1, offset=offset)
    assert not table[V].any() and table[:V].any(axis=1).all()


def test_leading_runs_are_counted(tmp_path):
    ids = [0, 7, 8, 9] + [5, 0, 0, 0] + [0, 0, 6, 0] + [0, 0, 0, 0] + [0, 3, 0, 3] + [0]
    data = write_data(tmp_path, ids)
    found = zero_code.leading_runs(data, 4)
    assert found["windows"] == 5 and found["begin so"] == 4 and found["share"] == 0.8
    assert found["by length of the run"] == {1: 2, 2: 1, 4: 1}
    assert found["1 / mean document"] == ids.count(0) / 21
    assert found["expected"] == pytest.approx(5 * ids.count(0) / 21)
    refused(lambda: zero_code.leading_runs(data, 0), "length is 0")
    refused(lambda: zero_code.leading_runs(data, 21), "no window of 21")


def test_no_window_is_forgotten(tmp_path):
    ids = np.random.default_rng(0).integers(0, 3, 1000).tolist()
    found = zero_code.leading_runs(write_data(tmp_path, ids), 7)
    assert found["windows"] == 142 and found["begin so"] == ids[: 142 * 7 : 7].count(0)


def test_the_page_and_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zero_code, "DEPTH", 13)
    monkeypatch.setattr(zero_code, "DEPTHS", (2, 3))
    data = write_data(tmp_path / "data", [0, 1, 2, 3, 4] * 9)
    out = tmp_path / "out"
    zero_code.main(["--data", str(data), "--length", "5", "--out", str(out)])
    page = capsys.readouterr().out
    places = [page.index(title) for title in zero_code.TITLES.values()]
    assert places == sorted(places) and page.count("not finite") == 4  # 26 blocks
    picture = (out / "zero_code.png").read_bytes()
    assert picture.startswith(b"\x89PNG")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((out / "zero_code.json").read_text(), parse_constant=refuse)
    assert found["rows"][str(data)]["begin so"] == found["rows"][str(data)]["windows"] == 8
    assert len(found["by_block"]) == len(found["mask"]) == 12
    assert [len(norms) for norms in found["by_depth"].values()] == [2, 2]

    (out / "zero_code.png").unlink()
    zero_code.main(["--redraw", "--out", str(out)])
    assert (out / "zero_code.png").read_bytes() == picture


def test_missing_data_are_refused(tmp_path):
    error = refused_script("studies/zero_code.py", "--data", tmp_path / "none")
    assert "meta.json is missing; make" in error
