"""The study of formation. Run with: python -m pytest tests/unit/test_formation.py"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ROOT, random_ids, refused, refused_main, write_random_data
from torch import nn
from torch.nn import functional as F

from codes import binary_codes
from model import Transformer
from nanocodes.batches import read_windows
from nanocodes.shards import open_shards
from nanocodes.tokenizer import load_tokenizer, make_tokenizer
from studies import formation
from train import Config

V = 512
LENGTH = 64
CONFIG = Config(
    vocab_size=V,
    d_model=32,
    n_layers=2,
    n_heads=2,
    d_ff=48,
    max_seq_len=LENGTH,
    max_updates=4,
    targets_per_update=256,
    micro_batch=4,
    lr=1e-2,
    min_lr=1e-3,
    warmup_updates=1,
    eval_windows=0,
    seed=3,
    device="cpu",
    dtype="float32",
    compile=False,
)


@pytest.fixture(scope="module")
def even_data(tmp_path_factory):
    """A tokenizer of V ids, and text in which every id stands about as often as any other."""
    folder = tmp_path_factory.mktemp("even")
    texts = [path.read_text() for path in ROOT.glob("*.py")]
    tokenizer = make_tokenizer(f"bpe:{V}", folder / "bpe.json", texts)
    assert tokenizer.get_vocab_size() == V
    text = (folder / "bpe.json").read_text()
    return write_random_data(folder, 5000, LENGTH * 100 + 1, vocab_size=V, tokenizer=text)


def ask(folder, input_layer):
    """(a model, ids (100, LENGTH), the Questions about them)."""
    config = replace(CONFIG, data=str(folder), input_layer=input_layer)
    model = Transformer(config)
    ids, _ = read_windows(open_shards(folder, "val"), range(100), LENGTH)
    return model, ids, formation.make_questions(model, config, ids.numpy())


def draw_ids(rows=6, length=12):
    return random_ids(rows, length, vocab_size=V, seed=1)


# ---------------- Probes


def test_a_probe_finds_what_is_linear_and_nothing_in_shuffled_labels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 20, generator=generator, dtype=torch.float64)
    x[:, 5] = 3.0  # a feature that tells nothing must not disturb
    common = x[:, 0] + x[:, 1] > 0.1  # 47 % of the rows
    rare = x[:, 2] > 1.7  # 4 % of them
    x[:, 0] += torch.where(common, 2, -2)
    x[:, 2] += torch.where(rare, 2, -2)
    random = common[torch.randperm(4000, generator=generator)]
    half = torch.arange(4000) % 2 == 0
    scores = formation.probe(x, torch.stack((common, rare, random), dim=1), half)
    separable, few, shuffled = scores.tolist()
    assert separable > 0.99 and few > 0.99 and abs(shuffled - 0.5) < 0.04


def test_the_score_is_of_the_other_half_and_counts_pairs():
    labels = torch.tensor([[True], [False], [False], [False]] * 50)
    half = torch.arange(200) < 100
    x = torch.where(labels, 1.0, -1.0).double()
    assert formation.probe(x, labels, half) == 1
    x[half] *= -1  # what one half teaches is wrong in the other
    assert formation.probe(x, labels, half) == 0
    # One of three false labels looks true: of three pairs one is a tie.
    x = torch.tensor([[1.0], [1], [-1], [-1]] * 50).double()
    assert formation.probe(x, labels, half).item() == pytest.approx(5 / 6)


def test_effective_rank_and_anisotropy_of_known_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 24, generator=generator, dtype=torch.float64)
    rank = formation.effective_rank(x)
    assert rank == pytest.approx(24, rel=2e-3)
    assert formation.effective_rank(x + 100) == pytest.approx(rank)  # centred
    line = torch.outer(x[:, 0], x[0])
    assert formation.effective_rank(line) == pytest.approx(1, abs=1e-6)

    assert abs(formation.anisotropy(x)) < 1e-3
    assert formation.anisotropy(x + 100) > 0.99
    few = F.normalize(x[:50], dim=1)
    pairs = [few[i] @ few[j] for i in range(50) for j in range(50) if i != j]
    assert formation.anisotropy(x[:50]) == pytest.approx(np.mean(pairs))


# ---------------- Questions


def test_positions_and_bits_are_those_of_the_id(even_data):
    _, ids, questions = ask(even_data, "binary16")
    at = ids.flatten()[questions.positions].numpy()
    labels = questions.labels.numpy()
    names = questions.names
    assert at.tolist() == list(range(V))
    assert labels.shape == questions.control.shape == (V, len(names))
    assert questions.half.sum() == V / 2
    bits = np.hstack((labels[:, names == "low bits"], labels[:, names == "high bits"]))
    assert np.array_equal(bits, binary_codes(at, 9))
    # Of the 16 bits only nine vary, and only they are asked for.
    assert np.array_equal(labels[:, names == "own code"], binary_codes(at, 9))


def test_frequency_is_that_of_the_training_split(even_data):
    _, ids, questions = ask(even_data, "binary16")
    at = ids.flatten()[questions.positions].numpy()
    counts = np.bincount(open_shards(even_data, "train").read(0, 5000), minlength=V)[at]
    frequency = questions.labels.numpy()[:, questions.names == "frequency"]
    for tenths, rarer in enumerate(frequency.T, start=1):
        assert counts[rarer].max() < counts[~rarer].min()
        assert rarer.mean() == pytest.approx(tenths / 10, abs=0.11)  # many counts are equal


def test_classes_are_those_of_the_text(even_data):
    _, ids, questions = ask(even_data, "binary16")
    tokenizer = load_tokenizer(even_data / "tokenizer.json")
    texts = [tokenizer.decode([i]) for i in ids.flatten()[questions.positions].tolist()]
    classes = {}
    for name in formation.CLASSES:
        if name in questions.names:
            is_in = questions.labels.numpy()[:, questions.names == name][:, 0]
            classes[name] = {text for text, found in zip(texts, is_in, strict=True) if found}
    assert classes["digits"] == set("0123456789")
    assert {"return", " return", " in"} & classes["keyword"] and "self" not in classes["keyword"]
    assert {"self", " return"} & classes["letters"] and not {" ", "_", "1"} & classes["letters"]
    assert {"(", ")", " ="} <= classes["punctuation"] and " " not in classes["punctuation"]
    assert all(text[0] == " " for text in classes["space first"])


def test_the_control_permutes_the_labels_of_a_half(even_data):
    _, _, questions = ask(even_data, "binary16")
    labels = questions.labels.numpy()
    control = questions.control.numpy()
    for side in (questions.half.numpy(), ~questions.half.numpy()):
        assert np.array_equal(np.sort(labels[side], axis=0), np.sort(control[side], axis=0))
    assert (labels != control).any(axis=1).mean() > 0.9  # most ids get those of another


def test_no_id_is_in_both_halves_and_all_interfaces_are_asked_the_same(even_data):
    _, ids, learned = ask(even_data, "learned")
    _, _, gf2 = ask(even_data, "gf2")
    at = ids.flatten()[learned.positions]
    assert not set(at[learned.half].tolist()) & set(at[~learned.half].tolist())
    windows = set((learned.positions // LENGTH).tolist())
    assert len(windows) > 90  # of all windows, not of the first
    assert torch.equal(learned.positions, gf2.positions)
    assert torch.equal(learned.half, gf2.half)
    shared = torch.from_numpy(gf2.names != "own code")
    assert not shared.all() and "own code" not in learned.names
    assert torch.equal(learned.labels, gf2.labels[:, shared])


@pytest.mark.parametrize(
    ("name", "dimensions", "cosine"),
    [("binary16", 9, 0.5), ("gf2", 16, 0.5), ("signs32", 32, 0)],  # 0s and 1s have a mean
)
def test_the_input_of_a_code_shows_its_own_bits_and_no_parity(even_data, name, dimensions, cosine):
    found = formation.measure(*ask(even_data, name))
    assert found["own code"][0] == 1
    assert abs(found["control"][0] - 0.5) < 0.05
    for part in ("low bits", "high bits"):
        assert found[part][0] == 1 if name == "binary16" else found[part][0] < 0.6
    assert found["anisotropy"][0] == pytest.approx(cosine, abs=0.1)
    # Both values of a bit as often as each other in independent columns: as many dimensions.
    assert dimensions * 0.9 < found["effective rank"][0] <= dimensions + 1e-9
    assert all(len(values) == 3 for values in found.values())


# ---------------- What a residual does


@pytest.mark.parametrize("name", ["learned", "gf2"])
def test_the_residual_is_what_the_model_computes(name):
    model = Transformer(replace(CONFIG, input_layer=name))
    ids = draw_ids()
    ids[0, :3] = ids[1, 4] = 0  # zeros at the start and within
    depths = formation.residuals(model, ids)
    assert len(depths) == 3 and torch.equal(depths[0], model.input(ids))
    assert torch.equal(model.norm(depths[-1]), model.hidden(ids))


def test_without_a_block_is_as_if_it_added_nothing():
    model = Transformer(CONFIG)
    ids = draw_ids()
    targets = ids.flip(1)
    before = [parameter.clone() for parameter in model.parameters()]
    nats, rises = formation.loss_without_blocks(model, ids, targets)
    assert len(model.blocks) == 2
    assert all(map(torch.equal, before, model.parameters()))
    assert nats == model(ids, targets)[1].item() and rises[0] != rises[1]
    for i, rise in enumerate(rises):
        silent = Transformer(CONFIG)
        nn.init.zeros_(silent.blocks[i].attention.o_proj.weight)
        nn.init.zeros_(silent.blocks[i].mlp.down_proj.weight)
        assert silent(ids, targets)[1].item() - nats == pytest.approx(rise, abs=1e-6)


@torch.no_grad()
def test_substitution_at_its_ends():
    # In float64, as a row's product depends in its last bits on where the row stands.
    model = Transformer(replace(CONFIG, input_layer="gf2")).double()
    ids = draw_ids()
    for block in model.blocks:  # so that blocks matter
        block.attention.o_proj.weight.mul_(30)
        block.mlp.down_proj.weight.mul_(30)
    plain = model(ids)[0][:, -1].log_softmax(dim=-1)
    alike = ids[:1].expand(6, -1)  # each row's donor is its own like
    own, replaced = formation.substitute(model, alike)
    expected = plain[:1].expand(6, -1)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    for other in replaced:
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-12)

    own, replaced = formation.substitute(model, ids)
    assert len(replaced) == 3
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(replaced[-1], own.roll(1, dims=0), rtol=0, atol=1e-12)
    swapped = ids.clone()  # at depth 0 it is the donor's token in the own context
    swapped[:, -1] = ids[:, -1].roll(1)
    expected = model(swapped)[0][:, -1].log_softmax(dim=-1)
    torch.testing.assert_close(replaced[0], expected, rtol=0, atol=1e-12)
    assert (replaced[0] - replaced[-1]).abs().max() > 0.01


def test_donor_shares_count_who_follows():
    likely = torch.tensor([[8.0, 1, 1], [1, 8, 1], [1, 1, 8]]) / 10
    own = likely[[0, 1, 1, 2]].log()  # donors 2, 0, 1, 1: of the third the same token
    donor = own.roll(1, dims=0)
    one_goes = torch.where(torch.tensor([True, False, False, False])[:, None], donor, own)
    found = formation.donor_shares(own, torch.stack((own, one_goes, donor)))
    assert found.can == 3
    assert found.follows == pytest.approx([0, 1 / 3, 1])
    assert found.nearer == pytest.approx([0, 1 / 4, 3 / 4])
    found = formation.donor_shares(own[[1, 2]], own[[1, 2]][None])
    assert found.can == 0 and found.follows is None


# ---------------- Over seeds, and the sweep


def test_intervals_keep_the_shape_and_leave_out_what_a_seed_lacks():
    found = formation.over_seeds([{"a": [[1.0, 2.0]], "b": 3.0, "c": None}, {"a": [[3.0, 2.0]]}])
    assert found.keys() == {"a"}
    assert found["a"][0][0] == {"mean": 2, "half": pytest.approx(12.706)}
    assert found["a"][0][1] == {"mean": 2, "half": 0}


@pytest.fixture
def tiny(monkeypatch):
    """The size smoke, made tiny; a dict."""
    size = {
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 2,
        "d_ff": 32,
        "max_seq_len": LENGTH,
        "max_updates": 8,
        "targets_per_update": 256,
        "micro_batch": 4,
        "lr": 1e-2,
        "warmup_updates": 1,
        "eval_windows": 60,
    }
    monkeypatch.setitem(formation.SIZES, "smoke", size)
    monkeypatch.setitem(formation.CHANGES, "smoke", {})
    return size


def read_strictly(path):
    """The value in a JSON file, which must hold neither NaN nor Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_run_that_is_there_is_not_made_again(even_data, tiny, tmp_path, monkeypatch, capsys):
    command = ["--data", str(even_data), "--out", str(tmp_path)]
    made = []
    make_run = formation.make_run

    def counted(config, *others):
        made.append((config.input_layer, config.seed))
        return make_run(config, *others)

    monkeypatch.setattr(formation, "make_run", counted)
    formation.main([*command, "--seeds", "0"])
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    names = ["learned", "binary16", "gf2", "signs32"]
    assert {path.name for path in before} == {f"{name}-seed0.json" for name in names}
    formation.main([*command, "--seeds", "0", "1"])
    assert made == [(name, seed) for seed in (0, 1) for name in names]
    assert before == {path: path.read_bytes() for path in before}

    record = read_strictly(tmp_path / "runs" / "gf2-seed1.json")
    assert record["updates"] == [0, 1, 2, 4, 8] and len(record["moments"]) == 5
    assert len(record["rises"]) == 1 and record["nearer"][-1] == 1 and record["ids"] > 400
    page = (tmp_path / "formation.md").read_text()
    assert page.strip() in capsys.readouterr().out and "| signs32 " in page
    interfaces = read_strictly(tmp_path / "formation.json")["interfaces"]
    bits = interfaces["binary16"]["moments"][0]["low bits"]
    assert bits[0] == {"mean": 1, "half": 0} and len(bits) == 2
    assert "own code" not in interfaces["learned"]["moments"][0]
    assert (tmp_path / "formation.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "formation.png").unlink()
    formation.main(["--redraw", "--out", str(tmp_path)])
    assert (tmp_path / "formation.png").stat().st_size > 20_000

    tiny["max_updates"] = 9
    capsys.readouterr()
    error = refused_main(capsys, formation.main, *command)
    assert "of another size or other data; choose another --out" in error


def test_nothing_to_report_is_refused():
    refused(lambda: formation.summarise([]), "there is no run to report; give --seeds")


# ---------------- What is recorded


def test_the_recorded_page_is_made_of_the_recorded_figures():
    results = ROOT / "studies" / "results"
    recorded = json.loads((results / "formation.json").read_text())
    summaries = {
        name: formation.Summary(**values) for name, values in recorded["interfaces"].items()
    }
    page = (results / "formation.md").read_text()
    assert page.endswith(formation.report(summaries, recorded["setting"]))
    written = {name: formation.as_json(summary) for name, summary in summaries.items()}
    assert written == recorded["interfaces"]
