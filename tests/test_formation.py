"""The study of formation. Run with: python -m pytest tests/test_formation.py"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "studies"))

import formation

import shards
import train
from codes import binary_codes
from model import Transformer
from tokenizer import load_tokenizer, make_tokenizer

V = 512
CONFIG = train.Config(vocab_size=V, d_model=32, n_layers=2, n_heads=2, d_ff=48, max_seq_len=64,
                      max_updates=4, targets_per_update=256, micro_batch=4, lr=1e-2, min_lr=1e-3,
                      warmup_updates=1, eval_windows=0, seed=3, device="cpu", dtype="float32",
                      compile=False)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tokenizer of V ids, and text in which every id stands about as often as any other."""
    folder, generator, splits = tmp_path_factory.mktemp("data"), np.random.default_rng(0), {}
    texts = [path.read_text() for path in Path(formation.__file__).parent.parent.glob("*.py")]
    tokenizer = make_tokenizer(f"bpe:{V}", folder / "tokenizer.json", texts)
    assert tokenizer.get_vocab_size() == V
    for split, tokens in (("train", 5000), ("val", 64 * 100 + 1)):
        ids = generator.integers(0, V, tokens)
        entry = shards.write_shard(folder, split, 0, ids)
        splits[split] = dict(documents=1, tokens=tokens, bytes=3 * tokens, shards=[entry])
    sha256 = shards.sha256(folder / "tokenizer.json")
    meta = dict(vocab_size=V, separator=0, tokenizer="-", tokenizer_sha256=sha256)
    shards.write_json(folder / "meta.json", meta | dict(sources=[], splits=splits))
    return folder


def windows(data, count=100):
    return shards.read_windows(shards.open_shards(data, "val"), range(count), 64)


def questions(data, input_layer):
    config = replace(CONFIG, data=str(data), input_layer=input_layer)
    model, ids = Transformer(config), windows(data)[0]
    return model, ids, *formation.make_questions(model, config, ids.numpy())


def draw_ids(rows=6, length=12):
    return torch.randint(1, V, (rows, length), generator=torch.Generator().manual_seed(1))


def test_a_probe_finds_what_is_linear_and_nothing_in_shuffled_labels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 20, generator=generator, dtype=torch.float64)
    x[:, 5] = 3.0  # a feature that tells nothing must not disturb
    common, rare = x[:, 0] + x[:, 1] > 0.1, x[:, 2] > 1.7  # 47 % and 4 % of the rows
    x[:, 0] += torch.where(common, 2, -2)
    x[:, 2] += torch.where(rare, 2, -2)
    labels = torch.stack((common, rare, common[torch.randperm(4000, generator=generator)]), dim=1)
    half = torch.arange(4000) % 2 == 0
    separable, few, shuffled = formation.probe(x, labels, half).tolist()
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


def test_labels_are_those_of_the_id(data):
    model, ids, positions, half, labels, names = questions(data, "binary16")
    at, L = ids.flatten()[positions].numpy(), len(names)
    assert at.tolist() == list(range(V)) and labels.shape == (V, 2 * L)
    assert half.sum() == V / 2
    own, control = labels.numpy()[:, :L], labels.numpy()[:, L:]
    bits = np.hstack((own[:, names == "low bits"], own[:, names == "high bits"]))
    assert np.array_equal(bits, binary_codes(at, 9))
    # Of the 16 bits only nine vary, and only they are asked for.
    assert np.array_equal(own[:, names == "own code"], binary_codes(at, 9))
    counts = np.bincount(shards.open_shards(data, "train").read(0, 5000), minlength=V)[at]
    for tenths, rarer in enumerate(own[:, names == "frequency"].T, start=1):
        assert counts[rarer].max() < counts[~rarer].min()
        assert rarer.mean() == pytest.approx(tenths / 10, abs=0.11)  # many counts are equal
    tokenizer = load_tokenizer(data / "tokenizer.json")
    texts = [tokenizer.decode([i]) for i in at]
    found = {name: {text for text, label in zip(texts, own[:, names == name][:, 0], strict=True)
                    if label} for name in formation.CLASSES if name in names}  # fmt: skip
    assert found["digits"] == set("0123456789")
    assert {"return", " return", " in"} & found["keyword"] and "self" not in found["keyword"]
    assert {"self", " return"} & found["letters"] and not {" ", "_", "1"} & found["letters"]
    assert {"(", ")", " ="} <= found["punctuation"] and " " not in found["punctuation"]
    assert all(text[0] == " " for text in found["space first"])
    # The control permutes the labels of a half, and most ids get those of another.
    for side in (half.numpy(), ~half.numpy()):
        assert np.array_equal(np.sort(own[side], axis=0), np.sort(control[side], axis=0))
    assert (own != control).any(axis=1).mean() > 0.9


def test_no_id_is_in_both_halves_and_all_interfaces_are_asked_the_same(data):
    asked = [questions(data, name) for name in ("learned", "gf2")]
    ids, positions, half = asked[0][1:4]
    at = ids.flatten()[positions]
    assert not set(at[half].tolist()) & set(at[~half].tolist())
    assert len(set((positions // 64).tolist())) > 90  # of all windows, not of the first
    shared = [other[5] != "own code" for other in asked]
    for one, two in zip(asked[0][2:4], asked[1][2:4], strict=True):
        assert torch.equal(one, two)
    L = [len(other[5]) for other in asked]
    kept = [other[4][:, :n][:, torch.from_numpy(mask)] for other, n, mask in
            zip(asked, L, shared, strict=True)]  # fmt: skip
    assert torch.equal(*kept) and L[0] < L[1]


def test_the_input_of_a_code_shows_its_own_bits_and_no_parity(data):
    for name in ("binary16", "gf2", "signs32"):
        model, ids, *asked = questions(data, name)
        found = formation.measure(model, ids, *asked)
        assert found["own code"][0] == 1
        assert abs(found["control"][0] - 0.5) < 0.05
        for part in ("low bits", "high bits"):
            assert found[part][0] == 1 if name == "binary16" else found[part][0] < 0.6
        common = 0 if name == "signs32" else 0.5  # of 0s and 1s, their mean
        assert found["anisotropy"][0] == pytest.approx(common, abs=0.1)
        # Zeros and ones as often as each other in independent columns: as many dimensions.
        bits = {"binary16": 9, "gf2": 16, "signs32": 32}[name]
        assert bits * 0.9 < found["effective rank"][0] <= bits + 1e-9
        assert all(len(values) == 3 for values in found.values())


def test_effective_rank_and_anisotropy_of_known_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 24, generator=generator, dtype=torch.float64)
    rank, cosine = formation.spread(x)
    assert rank == pytest.approx(24, rel=2e-3) and abs(cosine) < 1e-3
    assert formation.spread(x + 100)[0] == pytest.approx(rank)  # centred
    assert formation.spread(x + 100)[1] > 0.99
    line = torch.outer(x[:, 0], x[0])
    assert formation.spread(line)[0] == pytest.approx(1, abs=1e-6)
    few = torch.nn.functional.normalize(x[:50], dim=1)
    pairs = [few[i] @ few[j] for i in range(50) for j in range(50) if i != j]
    assert formation.spread(x[:50])[1] == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("name", ["learned", "gf2"])
def test_the_residual_is_what_the_model_computes(name):
    model, ids = Transformer(replace(CONFIG, input_layer=name)), draw_ids()
    ids[0, :3] = ids[1, 4] = 0  # zeros at the start and within
    found = formation.residuals(model, ids)
    assert len(found) == 3 and torch.equal(found[0], model.input(ids))
    assert torch.equal(model.norm(found[-1]), model.hidden(ids))


def test_without_a_block_is_as_if_it_added_nothing():
    model, ids, targets = Transformer(CONFIG), draw_ids(), draw_ids().flip(1)
    before = [parameter.clone() for parameter in model.parameters()]
    nats, rises = formation.skip_rises(model, ids, targets)
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
    model, ids = Transformer(replace(CONFIG, input_layer="gf2")).double(), draw_ids()
    for block in model.blocks:  # so that blocks matter
        block.attention.o_proj.weight.mul_(30)
        block.mlp.down_proj.weight.mul_(30)
    plain = model(ids)[0][:, -1].log_softmax(dim=-1)
    alike = ids[:1].expand(6, -1)  # each row's donor is its own like
    own, replaced = formation.substitute(model, alike)
    assert torch.allclose(own, plain[:1].expand(6, -1), rtol=0, atol=1e-12)
    assert all(torch.allclose(own, other, rtol=0, atol=1e-12) for other in replaced)

    own, replaced = formation.substitute(model, ids)
    assert torch.allclose(own, plain, rtol=0, atol=1e-12) and len(replaced) == 3
    assert torch.allclose(replaced[-1], own.roll(1, dims=0), rtol=0, atol=1e-12)
    swapped = ids.clone()  # at depth 0 it is the donor's token in the own context
    swapped[:, -1] = ids[:, -1].roll(1)
    expected = model(swapped)[0][:, -1].log_softmax(dim=-1)
    assert torch.allclose(replaced[0], expected, rtol=0, atol=1e-12)
    assert (replaced[0] - replaced[-1]).abs().max() > 0.01


def test_shares_count_who_follows():
    likely = torch.tensor([[8.0, 1, 1], [1, 8, 1], [1, 1, 8]]) / 10
    own = likely[[0, 1, 1, 2]].log()  # donors 2, 0, 1, 1: of the third the same token
    stays, goes = own, own.roll(1, dims=0)
    between = torch.where(torch.tensor([True, False, False, False])[:, None], goes, stays)
    found = formation.shares(own, torch.stack((stays, between, goes)))
    assert found["can"] == 3
    assert found["follows"] == pytest.approx([0, 1 / 3, 1])
    assert found["nearer"] == pytest.approx([0, 1 / 4, 3 / 4])
    found = formation.shares(own[[1, 2]], own[[1, 2]][None])
    assert found["can"] == 0 and found["follows"] is None


def test_intervals_keep_the_shape_and_leave_out_what_a_seed_lacks():
    runs = [dict(a=[[1.0, 2.0]], b=3.0, c=None), dict(a=[[3.0, 2.0]], c=1.0)]
    found = formation.over_seeds(runs)
    assert found.keys() == {"a"}
    assert found["a"][0][0] == dict(mean=2, half=pytest.approx(12.706))
    assert found["a"][0][1] == dict(mean=2, half=0)


def test_a_run_that_is_there_is_not_made_again(data, tmp_path, monkeypatch, capsys):
    tiny = dict(d_model=32, n_layers=1, n_heads=2, d_ff=32, max_seq_len=64, max_updates=8,
                targets_per_update=256, micro_batch=4, lr=1e-2, warmup_updates=1, eval_windows=60)
    monkeypatch.setitem(formation.SIZES, "smoke", tiny)
    monkeypatch.setitem(formation.CHANGES, "smoke", {})
    command, made, run = ["--data", str(data), "--out", str(tmp_path)], [], formation.run

    def counted(config, *where):
        made.append((config.input_layer, config.seed))
        return run(config, *where)

    monkeypatch.setattr(formation, "run", counted)
    formation.main([*command, "--seeds", "0"])
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    names = ["learned", "binary16", "gf2", "signs32"]
    assert {path.name for path in before} == {f"{name}-seed0.json" for name in names}
    formation.main([*command, "--seeds", "0", "1"])
    assert made == [(name, seed) for seed in (0, 1) for name in names]
    assert all(path.read_bytes() == content for path, content in before.items())

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "runs" / "gf2-seed1.json").read_text(), parse_constant=refuse)
    assert record["updates"] == [0, 1, 2, 4, 8] and len(record["moments"]) == 5
    assert len(record["rises"]) == 1 and record["nearer"][-1] == 1 and record["ids"] > 400
    page = (tmp_path / "formation.md").read_text()
    assert page.strip() in capsys.readouterr().out and "| signs32 " in page
    found = json.loads((tmp_path / "formation.json").read_text(), parse_constant=refuse)
    bits = found["interfaces"]["binary16"]["moments"][0]["low bits"]
    assert bits[0] == dict(mean=1, half=0) and len(bits) == 2
    assert "own code" not in found["interfaces"]["learned"]["moments"][0]
    assert (tmp_path / "formation.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setitem(tiny, "max_updates", 9)
    with pytest.raises(SystemExit) as ended:
        formation.main(command)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "of another size or other data; choose another --out" in error
    assert error.count("\n") == 1
