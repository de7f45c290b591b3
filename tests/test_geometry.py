"""The study of geometry. Run with: python -m pytest tests/test_geometry.py"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "studies"))

import geometry

import shards
import train
from codes import binary_codes, code_table, gf2_rank, invertible_matrix, recode
from model import load_checkpoint

CONFIG = train.Config(vocab_size=300, d_model=32, n_layers=2, n_heads=2, d_ff=48, max_seq_len=16,
                      max_updates=4, targets_per_update=128, micro_batch=4, lr=1e-2, min_lr=1e-3,
                      warmup_updates=2, eval_windows=8, eval_interval=2, save_interval=4, seed=3,
                      init_seed=30, device="cpu", dtype="float32", compile=False)  # fmt: skip
MAIN, LATER = geometry.make_arms(CONFIG)
ARMS = MAIN | LATER


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng, splits = tmp_path_factory.mktemp("data"), np.random.default_rng(0), {}
    for split, tokens in (("train", 4000), ("val", 500)):
        ids = np.minimum(rng.geometric(0.02, tokens), CONFIG.vocab_size) - 1
        entry = shards.write_shard(folder, split, 0, ids)
        splits[split] = dict(documents=1, tokens=tokens, bytes=3 * tokens, shards=[entry])
    (folder / "tokenizer.json").write_text("{}")
    sha256 = shards.sha256(folder / "tokenizer.json")
    meta = dict(vocab_size=CONFIG.vocab_size, separator=0, tokenizer="-", tokenizer_sha256=sha256)
    shards.write_json(folder / "meta.json", meta | dict(sources=[], splits=splits))
    return folder


def numbers(name, config=CONFIG):
    values, bits = ARMS[name].table(config)
    return np.asarray(values, dtype=np.float64), bits


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
    rms = np.sqrt((numbers(name, replace(CONFIG, vocab_size=65_536))[0] ** 2).mean())
    assert rms == pytest.approx(RMS[name], rel=2e-3)


@pytest.mark.parametrize("name", ARMS)
def test_no_two_ids_share_a_row_of_the_claimed_width(name):
    values, bits = numbers(name)
    width = 16 if "16" in name or "gf2" in name else 32
    assert values.shape == (CONFIG.vocab_size, width)
    assert len(np.unique(values, axis=0)) == CONFIG.vocab_size
    if "gf2" in name or "wide" in name or name.startswith("signs"):
        live = {"gf2-live": 9 * 9, "gf2-offset": 17 * 16}
        assert bits == live.get(name.split("@")[0], 16 * width)


@pytest.mark.parametrize("vocab_size", [300, 49_152, 65_536])
@pytest.mark.parametrize("width", [16, 17, 64, 256])
def test_wide_codes_are_injective_and_span_as_much_as_the_ids(width, vocab_size):
    config = replace(CONFIG, vocab_size=vocab_size)
    codes, bits = geometry.wide(config, width)
    assert bits == 16 * width and set(np.unique(codes)) == {0, 1}
    matrix = invertible_matrix(16, CONFIG.seed, rows=width)
    assert gf2_rank(matrix) == 16
    assert np.array_equal(codes, recode(binary_codes(np.arange(vocab_size)), matrix))
    assert len(np.unique(np.packbits(codes, axis=1), axis=0)) == vocab_size
    powers = 2 ** np.arange((vocab_size - 1).bit_length())
    assert gf2_rank(codes[powers]) == len(powers)


def test_sixteen_wide_is_gf2_with_another_matrix_for_each_seed():
    tables = [geometry.wide(replace(CONFIG, seed=seed), 16)[0] for seed in range(4)]
    for seed, codes in enumerate(tables):
        assert np.array_equal(codes, code_table("gf2", CONFIG.vocab_size, seed=seed))
        arm = numbers("signs-32", replace(CONFIG, seed=seed))[0].astype(np.float32)
        assert np.array_equal(arm, code_table("signs32", CONFIG.vocab_size, seed=seed))
    assert len({codes.tobytes() for codes in tables}) == 4


def test_the_codes_differ_where_they_should():
    binary, live, shuffled = (numbers(n)[0] for n in ("binary16", "gf2-live", "binary16-shuffled"))
    assert np.array_equal(binary, code_table("binary16", CONFIG.vocab_size))
    assert not live[:, 9:].any() and (live[:, :9].mean(axis=0) > 0.3).all()
    assert np.array_equal(np.unique(shuffled, axis=0), np.unique(binary, axis=0))
    assert not shuffled[0].any() and (shuffled != binary).any(axis=1).sum() > 250
    assert numbers("gf2-offset")[0].any(axis=1).all()
    assert not numbers("gf2")[0][0].any()
    difference = numbers("gf2-offset")[0] != numbers("gf2")[0]
    assert (difference == difference[0]).all()


def test_a_fixed_gaussian_is_what_the_learned_table_begins_as():
    assert np.array_equal(numbers("gaussian")[0], numbers("learned")[0])
    model, *_ = geometry.make_model(ARMS["learned"], CONFIG)
    assert torch.equal(model.input.weight, geometry.Transformer(CONFIG).input.weight)


def test_all_backbones_begin_alike():
    hashes = {name: geometry.make_model(arm, CONFIG)[1] for name, arm in ARMS.items()}
    assert set(hashes.values()) == {geometry.Transformer(CONFIG).backbone_hash()}
    changed = {name for name, arm in ARMS.items() if arm.changes.keys() - {"lr", "min_lr"}}
    assert changed == {"binary16-matched"}


def test_parameters_and_the_zero_code():
    found = {name: geometry.make_model(arm, replace(CONFIG, **arm.changes))[0]
             for name, arm in ARMS.items()}  # fmt: skip
    for name, model in found.items():
        counts, width = model.parameter_counts(), model.input.weight.shape[1]
        trained = "learned" in name
        assert counts["input"] == trained * CONFIG.vocab_size * width
        assert model.input.weight.requires_grad == trained
        bits = ("gf2", "wide", "binary16") if "signs" not in name else ()
        has_zero = name.startswith(bits) and name != "gf2-offset"
        assert model.input.zero_id == (0 if has_zero else None)
        assert ("input.weight" in model.state_dict()) == trained
    total = {name: sum(model.parameter_counts().values()) for name, model in found.items()}
    assert total["binary16-matched"] == total["learned"]
    tied = found["learned-tied"]
    assert tied.head.weight is tied.input.weight and tied.parameter_counts()["head"] == 0


def test_an_input_repeats_its_row():
    values = torch.arange(12.0).view(3, 4)
    found = geometry.Input(values, False, 8)(torch.tensor([[2, 0]]))
    assert found.tolist() == [[[8, 9, 10, 11] * 2, [0, 1, 2, 3] * 2]]


def test_the_loop_is_that_of_train(data, tmp_path):
    config = replace(CONFIG, data=str(data), out_dir=str(tmp_path / "run"))
    train.train(config)
    model, *_ = geometry.make_model(ARMS["learned"], config)
    assert list(geometry.fit(model, config, torch.enable_grad)) == [1, 2, 3, 4]
    expected = load_checkpoint(tmp_path / "run").state_dict()
    assert expected.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_a_diverged_run_is_refused(data):
    config = replace(CONFIG, data=str(data), lr=1e9, min_lr=1e9, grad_clip=1e9)
    model, *_ = geometry.make_model(ARMS["learned"], config)
    with pytest.raises(ValueError, match="update . has loss .*; lower --lr"):
        list(geometry.fit(model, config, torch.enable_grad))


def test_a_run_that_is_there_is_not_made_again(data, tmp_path, monkeypatch, capsys):
    tiny = dict(d_model=16, n_layers=1, n_heads=2, d_ff=16, max_seq_len=16, max_updates=3,
                targets_per_update=64, micro_batch=4, lr=1e-2, warmup_updates=1, eval_windows=4)
    monkeypatch.setitem(geometry.SIZES, "smoke", tiny)
    monkeypatch.setattr(geometry, "draw", lambda *arguments: None)
    command = ["--data", str(data), "--out", str(tmp_path), "--arms"]
    made, run_arm = [], geometry.run_arm

    def counted(arm, config, *where):
        made.append(config.seed)
        return run_arm(arm, config, *where)

    monkeypatch.setattr(geometry, "run_arm", counted)
    geometry.main([*command, "gf2", "--seeds", "0"])
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in before} == {"learned-seed0.json", "gf2-seed0.json"}
    geometry.main([*command, "gf2", "binary16-matched", "--seeds", "0", "1"])
    assert made == [0, 0, 0, 1, 1, 1]
    assert before.items() <= {path: path.read_bytes() for path in before}.items()

    record = json.loads((tmp_path / "runs" / "gf2-seed1.json").read_text())
    assert [targets for targets, _ in record["curve"]] == [64, 192]
    assert sum(record["decile_targets"]) == 64 and np.shape(record["rms"]) == (2, 2)
    assert "| gf2" in capsys.readouterr().out
    for other in (["--updates", "5"], ["--lr", "0.1"]):
        with pytest.raises(SystemExit) as ended:
            geometry.main([*command, "gf2", *other])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "of another size or other data; choose another --out" in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        geometry.main([*command, "gf3"])
    assert "there is no arm gf3" in capsys.readouterr().err


def record(arm, seed, nats, backbone="a"):
    return dict(arm=arm, seed=seed, curve=[[10, nats + 2], [20, nats + 1]], rms=[[1, 2], [3, 4]],
                held_out=dict(nats_per_token=nats, deciles=[nats] * 9 + [None]),
                decile_targets=[1] * 9 + [0], backbone_hash=backbone,
                parameters=dict(input=0, backbone=5, head=5), input_bits=256, input_width=16)


def test_gaps_are_paired_by_seed():
    runs = [record("learned", 0, 4.0), record("learned", 1, 5.0), record("learned", 2, 9.0)]
    runs += [record("gf2", 0, 4.1), record("gf2", 1, 5.3), record("gf2", 7, 0.0)]
    arms = geometry.summarise(runs, ["learned", "binary16", "gf2"])
    assert list(arms) == ["learned", "gf2"] and arms["gf2"]["seeds"] == [0, 1]
    assert arms["gf2"]["nats"] == pytest.approx(4.7)
    # Differences 0.1 and 0.3: standard deviation 0.1 sqrt 2, standard error 0.1.
    for gap in (arms["gf2"]["gap"], *arms["gf2"]["curve"], *arms["gf2"]["deciles"]):
        assert (gap["mean"], gap["half"]) == pytest.approx((0.2, 1.2706))
    assert [point["targets"] for point in arms["gf2"]["curve"]] == [10, 20]
    assert [found["decile"] for found in arms["gf2"]["deciles"]] == list(range(1, 10))
    assert "+0.2000 ± 1.2706" in "\n".join(
        geometry.report(arms, dict(n_layers=1, d_model=16, vocab_size=300, lr=0.1))
    )


def test_one_seed_has_no_interval_and_three_have_that_of_student():
    assert geometry.interval([0.5]) == dict(mean=0.5, half=None)
    found = geometry.interval([1.0, 2.0, 4.0])  # t 4.303, standard error 0.881917
    assert (found["mean"], found["half"]) == pytest.approx((7 / 3, 3.79489), rel=1e-5)


def test_a_run_that_lacks_a_figure_is_refused(tmp_path):
    found = record("gf2", 0, 4.0) | dict(setting={})
    shards.write_json(tmp_path / "gf2-seed0.json", found)
    assert geometry.read_runs(tmp_path, {}, geometry.RUN) == [json.loads(json.dumps(found))]
    del found["rms"]
    shards.write_json(tmp_path / "gf2-seed0.json", found)
    with pytest.raises(ValueError, match="gf2-seed0.json does not hold rms; remove it"):
        geometry.read_runs(tmp_path, {}, geometry.RUN)


def test_unlike_backbones_are_refused():
    runs = [record("learned", 0, 4.0), record("gf2", 0, 4.1, "b")]
    with pytest.raises(ValueError, match="gf2 and learned began with other backbones"):
        geometry.summarise(runs, ["learned", "gf2"])
    with pytest.raises(ValueError, match="there is no run of learned"):
        geometry.summarise(runs[1:], ["learned", "gf2"])


def test_the_picture_is_drawn(tmp_path):
    runs = [record(name, seed, 4.0 + seed) for name in MAIN for seed in (0, 1)]
    for chosen in (runs, runs[:2]):
        arms = geometry.summarise(chosen, MAIN)
        geometry.draw(arms, MAIN, tmp_path / "geometry.png")
        assert (tmp_path / "geometry.png").stat().st_size > 20_000
