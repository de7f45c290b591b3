"""The study of geometry. Run with: python -m pytest tests/unit/test_geometry.py"""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from helpers import ROOT, edit_json, read_json_file, refused, refused_main, write_data

from codes import binary_codes, code_table, gf2_rank, random_matrix, recode
from model import TableInput, Transformer
from nanocodes.checkpoint import backbone_hash
from nanocodes.held_out import HeldOutLoss
from nanocodes.plan import parameter_counts
from studies import geometry
from train import Config

CONFIG = Config(
    vocab_size=300,
    d_model=32,
    n_layers=2,
    n_heads=2,
    d_ff=48,
    max_seq_len=16,
    max_updates=4,
    targets_per_update=128,
    micro_batch=4,
    lr=1e-2,
    min_lr=1e-3,
    warmup_updates=2,
    eval_windows=8,
    seed=3,
    init_seed=30,
    device="cpu",
    dtype="float32",
    compile=False,
)
MAIN, LATER = geometry.make_arms(CONFIG)
ARMS = MAIN | LATER


@pytest.fixture(scope="module")
def geometric_data(tmp_path_factory):
    """Ids that are the rarer, the greater they are."""
    generator = np.random.default_rng(0)
    train, val = [
        np.minimum(generator.geometric(0.02, tokens), CONFIG.vocab_size) - 1
        for tokens in (4000, 500)
    ]
    folder = tmp_path_factory.mktemp("geometric")
    return write_data(folder, [train], [val], vocab_size=CONFIG.vocab_size)


def numbers(name, config=CONFIG):
    """The table of an arm, float64 (V, K)."""
    return np.asarray(ARMS[name].values(config), dtype=np.float64)


def wide_bits(config, width):
    return geometry.wide(config, width).bits(np.arange(config.vocab_size))


# ---------------- Tables and codes

RMS = {
    "learned": 0.02,
    "learned-0.7": 0.5**0.5,
    "gaussian": 0.02,
    "gaussian-0.7": 0.5**0.5,
    "learned-16": 0.5**0.5,
    "gaussian-16": 0.5**0.5,
    "gf2": 0.5**0.5,
    "wide-32": 0.5**0.5,
    "binary16-signs": 1,
    "wide-signs": 1,
    "signs-16": 0.02,
    "signs-32": 0.02,
}


@pytest.mark.parametrize("name", RMS)
def test_a_table_has_the_rms_that_it_claims(name):
    values = numbers(name, replace(CONFIG, vocab_size=65_536))
    assert np.sqrt((values**2).mean()) == pytest.approx(RMS[name], rel=2e-3)


@pytest.mark.parametrize("name", ARMS)
def test_no_two_ids_share_a_row_of_the_claimed_width(name):
    values = numbers(name)
    width = 16 if "16" in name or "gf2" in name else 32
    assert values.shape == (CONFIG.vocab_size, width)
    assert len(np.unique(values, axis=0)) == CONFIG.vocab_size


@pytest.mark.parametrize("name", ARMS)
def test_what_a_fixed_input_stores(name):
    base = name.split("@")[0]
    numbers_of = {"gaussian-16": 300 * 16} | dict.fromkeys(
        ("gaussian", "gaussian-0.7", "gaussian-shifted"), 300 * 32
    )
    known = {
        "gf2": 16 * 16,
        "gf2-live": 9 * 9,  # 300 ids have nine bits
        "gf2-offset": 17 * 16,
        "signs-16": 16 * 16,
        "binary16-shuffled": 16 * 300,
    }
    if base.startswith(("wide", "signs-32")):
        expected = 16 * 32
    elif base in numbers_of:
        expected = 32 * numbers_of[base]
    else:
        expected = known.get(base, 0)
    assert ARMS[name].stored_bits == expected
    assert ARMS[name].trained == ("learned" in name)


@pytest.mark.parametrize("vocab_size", [300, 49_152, 65_536])
@pytest.mark.parametrize("width", [16, 17, 64, 256])
def test_wide_codes_are_injective_and_span_as_much_as_the_ids(width, vocab_size):
    config = replace(CONFIG, vocab_size=vocab_size)
    codes = wide_bits(config, width)
    assert set(np.unique(codes)) == {0, 1}
    matrix = random_matrix(width, 16, CONFIG.seed)
    assert gf2_rank(matrix) == 16
    assert np.array_equal(codes, recode(binary_codes(np.arange(vocab_size)), matrix))
    assert len(np.unique(np.packbits(codes, axis=1), axis=0)) == vocab_size
    powers = 2 ** np.arange((vocab_size - 1).bit_length())
    assert gf2_rank(codes[powers]) == len(powers)


def test_sixteen_wide_is_gf2_with_another_matrix_for_each_seed():
    tables = []
    for seed in range(4):
        config = replace(CONFIG, seed=seed)
        tables.append(wide_bits(config, 16))
        assert np.array_equal(tables[-1], code_table("gf2", CONFIG.vocab_size, seed=seed))
        signs = numbers("signs-32", config).astype(np.float32)
        assert np.array_equal(signs, code_table("signs32", CONFIG.vocab_size, seed=seed))
    assert len({codes.tobytes() for codes in tables}) == 4


def test_the_codes_differ_where_they_should():
    binary = numbers("binary16")
    live = numbers("gf2-live")
    shuffled = numbers("binary16-shuffled")
    assert np.array_equal(binary, code_table("binary16", CONFIG.vocab_size))
    assert not live[:, 9:].any() and (live[:, :9].mean(axis=0) > 0.3).all()
    assert np.array_equal(np.unique(shuffled, axis=0), np.unique(binary, axis=0))
    assert not shuffled[0].any() and (shuffled != binary).any(axis=1).sum() > 250
    assert numbers("gf2-offset").any(axis=1).all()
    assert not numbers("gf2")[0].any()
    difference = numbers("gf2-offset") != numbers("gf2")
    assert (difference == difference[0]).all()


# ---------------- Models


def test_a_fixed_gaussian_is_what_the_learned_table_begins_as():
    assert np.array_equal(numbers("gaussian"), numbers("learned"))
    model, _ = geometry.make_model(ARMS["learned"], CONFIG)
    assert torch.equal(model.input.weight, Transformer(CONFIG).input.weight)


def test_all_backbones_begin_alike():
    hashes = {geometry.make_model(arm, CONFIG)[1] for arm in ARMS.values()}
    assert hashes == {backbone_hash(Transformer(CONFIG))}
    changed = {name for name, arm in ARMS.items() if arm.changes.keys() - {"lr", "min_lr"}}
    assert changed == {"binary16-matched"}


def test_parameters_and_the_zero_code():
    models = {
        name: geometry.make_model(arm, replace(CONFIG, **arm.changes))[0]
        for name, arm in ARMS.items()
    }
    for name, model in models.items():
        assert isinstance(model.input, TableInput)
        trained = "learned" in name
        width = model.input.weight.shape[1]
        assert parameter_counts(model)["input"] == trained * CONFIG.vocab_size * width
        assert model.input.weight.requires_grad == trained
        assert ("input.weight" in model.state_dict()) == trained
        is_code = name.startswith(("gf2", "wide", "binary16"))
        has_zero = is_code and "signs" not in name and name != "gf2-offset"
        assert model.input.zero_id == (0 if has_zero else None)
    total = {name: sum(parameter_counts(model).values()) for name, model in models.items()}
    assert total["binary16-matched"] == total["learned"]
    tied = models["learned-tied"]
    assert tied.head.weight is tied.input.weight and parameter_counts(tied)["head"] == 0


# ---------------- The sweep


@pytest.fixture
def tiny(monkeypatch):
    """The size smoke, made tiny."""
    size = {
        "d_model": 16,
        "n_layers": 1,
        "n_heads": 2,
        "d_ff": 16,
        "max_seq_len": 16,
        "max_updates": 3,
        "targets_per_update": 64,
        "micro_batch": 4,
        "lr": 1e-2,
        "warmup_updates": 1,
        "eval_windows": 4,
    }
    monkeypatch.setitem(geometry.SIZES, "smoke", size)


def test_a_run_that_is_there_is_not_made_again(geometric_data, tiny, tmp_path, monkeypatch, capsys):
    command = ["--data", str(geometric_data), "--out", str(tmp_path), "--arms"]
    made = []
    run_arm = geometry.run_arm

    def counted(name, arm, config, *others):
        made.append((name, config.seed))
        return run_arm(name, arm, config, *others)

    monkeypatch.setattr(geometry, "run_arm", counted)
    geometry.main([*command, "gf2", "--seeds", "0"])
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in before} == {"learned-seed0.json", "gf2-seed0.json"}
    geometry.main([*command, "gf2", "binary16-matched", "--seeds", "0", "1"])
    first = [("learned", 0), ("gf2", 0), ("binary16-matched", 0)]
    assert made == [*first, *((name, 1) for name, _ in first)]
    assert before == {path: path.read_bytes() for path in before}

    record = read_json_file(tmp_path / "runs" / "gf2-seed1.json")
    assert [targets for targets, _ in record["curve"]] == [64, 192]
    assert sum(record["decile_targets"]) == 64 and np.shape(record["rms"]) == (2, 2)
    page = (tmp_path / "geometry.md").read_text()
    assert page.strip() in capsys.readouterr().out and "| gf2" in page
    assert list(read_json_file(tmp_path / "geometry.json")["arms"]) == [
        "learned",
        "gf2",
        "binary16-matched",
    ]

    geometry.main([*command, "gf2", "--seeds"])  # only the report
    assert len(made) == 6 and (tmp_path / "geometry.md").read_text() == page
    (tmp_path / "geometry.png").unlink()
    geometry.main(["--redraw", "--out", str(tmp_path)])
    assert (tmp_path / "geometry.png").stat().st_size > 20_000

    capsys.readouterr()
    for other in (["--updates", "5"], ["--lr", "0.1"]):
        error = refused_main(capsys, geometry.main, *command, "gf2", *other)
        assert "of another size or other data; choose another --out" in error
    assert "there is no arm gf3" in refused_main(capsys, geometry.main, *command, "gf3")


def test_main_arms_are_named_at_once():
    assert geometry.chosen_arms(["main"], MAIN, LATER) == list(MAIN)
    assert geometry.chosen_arms(["later"], MAIN, LATER) == ["learned", *LATER]
    assert geometry.chosen_arms(["gf2", "learned", "gf2"], MAIN, LATER) == ["learned", "gf2"]


# ---------------- Over seeds


def finished(arm, seed, nats, backbone="a"):
    """A Run with this held-out loss, 1 more half way and 2 more before."""
    return geometry.Run(
        arm=arm,
        seed=seed,
        setting={},
        held_out=HeldOutLoss(nats, nats, nats, [nats] * 9 + [None]),
        decile_targets=[1] * 9 + [0],
        curve=[[10, nats + 2], [20, nats + 1]],
        rms=[[1, 2], [3, 4]],
        parameters={"input": 0, "backbone": 5, "head": 5},
        input_bits=256,
        input_width=16,
        zero_id=None,
        backbone_hash=backbone,
        torch="-",
        seconds=1.0,
    )


def test_gaps_are_paired_by_seed():
    runs = [finished("learned", 0, 4.0), finished("learned", 1, 5.0), finished("learned", 2, 9.0)]
    runs += [finished("gf2", 0, 4.1), finished("gf2", 1, 5.3), finished("gf2", 7, 0.0)]
    arms = geometry.summarise(runs, ["learned", "binary16", "gf2"])
    assert list(arms) == ["learned", "gf2"]
    gf2 = arms["gf2"]
    assert gf2.seeds == [0, 1] and gf2.nats == pytest.approx(4.7)
    # Differences 0.1 and 0.3: standard deviation 0.1 sqrt 2, standard error 0.1.
    for gap in (gf2.gap, *gf2.curve, *gf2.deciles):
        assert (gap["mean"], gap["half"]) == pytest.approx((0.2, 1.2706))
    assert [gap["targets"] for gap in gf2.curve] == [10, 20]
    assert [gap["decile"] for gap in gf2.deciles] == list(range(1, 10))
    setting = {"n_layers": 1, "d_model": 16, "vocab_size": 300, "lr": 0.1}
    assert "+0.2000 ± 1.2706" in geometry.report(arms, setting)


def test_a_run_that_lacks_a_figure_is_refused(tmp_path):
    path = tmp_path / "gf2-seed0.json"
    run = finished("gf2", 0, 4.0)
    edit_json(path, asdict(run))
    assert geometry.read_arm_runs(tmp_path, {}) == [run]
    edit_json(path, {"rms": ...})
    refused(lambda: geometry.read_arm_runs(tmp_path, {}), "gf2-seed0.json does not hold rms")


def test_unlike_backbones_are_refused():
    runs = [finished("learned", 0, 4.0), finished("gf2", 0, 4.1, "b")]
    names = ["learned", "gf2"]
    sentence = "gf2 and learned began with other backbones; make them again"
    refused(lambda: geometry.summarise(runs, names), sentence)
    refused(lambda: geometry.summarise(runs[1:], names), "there is no run of learned")


# ---------------- The picture and what is recorded


def test_the_picture_is_drawn_of_one_seed_and_of_few_arms(tmp_path):
    runs = [finished(name, seed, 4.0 + seed) for name in MAIN for seed in (0, 1)]
    for chosen in (runs, runs[:2], runs[:1]):
        path = tmp_path / f"{len(chosen)}.png"
        geometry.draw(geometry.summarise(chosen, MAIN), path)
        assert path.stat().st_size > 20_000


@pytest.mark.parametrize("name", ["geometry", "geometry-4x", "geometry-wide"])
def test_the_recorded_page_is_made_of_the_recorded_figures(name):
    results = ROOT / "studies" / "results"
    recorded = json.loads((results / f"{name}.json").read_text())
    arms = {arm: geometry.Summary(**values) for arm, values in recorded["arms"].items()}
    assert geometry.report(arms, recorded["setting"]) in (results / "geometry.md").read_text()
