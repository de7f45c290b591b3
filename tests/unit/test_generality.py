"""The study of generality. Run with: python -m pytest tests/unit/test_generality.py"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import edit_json, read_json_file, refused, refused_main, write_documents

import prepare
import train
from model import INPUT_LAYERS, Transformer, load_checkpoint
from nanocodes.batches import validation_windows
from nanocodes.checkpoint import backbone_hash
from nanocodes.held_out import held_out_loss, open_held_out
from nanocodes.shards import SPLITS, open_shards
from nanocodes.tokenizer import load_tokenizer
from studies import generality
from studies.generality import Variant

BASE = Variant(vocab_size=300, max_seq_len=16)
VARIANTS = {
    "base": BASE,
    "vocab-400": replace(BASE, vocab_size=400),
    "context-8": replace(BASE, max_seq_len=8),
    "english": replace(BASE, corpus="english"),
}
SIZE = {
    "train_bytes": 2000,
    "held_out_bytes": 1e9,
    "d_model": 32,
    "n_layers": 1,
    "n_heads": 2,
    "d_ff": 16,
    "targets_per_update": 64,
    "lr": 1e-2,
}
REAL_VARIANTS, REAL_SIZES = generality.VARIANTS, dict(generality.SIZES)
STDLIB = [name for name, variant in VARIANTS.items() if variant.corpus == "stdlib"]


def documents(name, count=60):
    """Rows of made-up words, another kind for each name."""
    rng = np.random.default_rng(len(name))
    words = ["".join(rng.choice([*name, "e", " "], rng.integers(2, 9))) for _ in range(200)]
    return [" ".join(rng.choice(words, 40)).encode() for _ in range(count)]


@pytest.fixture(scope="module", autouse=True)
def small():
    """The study with tiny variants, and the standard library replaced by made-up words."""
    documents_of = prepare.documents_of

    def made_up(name):
        return iter(documents(name)) if name == "stdlib" else documents_of(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generality, "VARIANTS", VARIANTS)
        patch.setattr(generality, "BASE", BASE)
        patch.setattr(generality, "VAL_SHARE", 0.3)
        patch.setitem(generality.SIZES, "smoke", SIZE)
        patch.setattr(prepare, "documents_of", made_up)
        yield


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prose.jsonl"
    return write_documents(path, [text.decode() for text in documents("shakespeare")])


@pytest.fixture(scope="module")
def root(tmp_path_factory, english, small):
    root = tmp_path_factory.mktemp("data")
    assert list(generality.data_folders(root, [english])) == list(VARIANTS)
    return root


@pytest.fixture(scope="module")
def configs(root):
    folders = generality.data_folders(root, None)
    return {
        name: generality.make_config(SIZE, variant, folders[name], "float32", False)
        for name, variant in VARIANTS.items()
    }


def open_splits(config):
    return [open_shards(config.data, split) for split in SPLITS]


def held_out_of(config):
    return open_held_out(config.data, config.max_seq_len, config.eval_windows)


@pytest.mark.parametrize("size", generality.SIZES)
def test_a_variant_changes_one_thing_and_fits_into_an_update(size):
    base, *others = map(vars, REAL_VARIANTS.values())
    for variant in others:
        assert sum(variant[key] != base[key] for key in base) == 1
    for variant in REAL_VARIANTS.values():
        assert REAL_SIZES[size]["targets_per_update"] % variant.max_seq_len == 0
    assert f"signs{REAL_SIZES[size]['d_model']}" in INPUT_LAYERS


def test_all_variants_train_on_the_same_bytes(configs):
    for name, config in configs.items():
        split, _ = open_splits(config)
        per_update = config.targets_per_update * split.bytes / split.tokens
        assert abs(config.max_updates * per_update - SIZE["train_bytes"]) <= per_update / 2, name
        assert config.warmup_updates == config.max_updates // 12
        assert config.micro_batch * config.max_seq_len == 64
        assert train.micro_steps(config, 1) == 1
    longer = [open_splits(configs[n])[0] for n in ("base", "vocab-400")]
    assert longer[0].bytes == longer[1].bytes and longer[0].tokens > longer[1].tokens
    assert configs["base"].max_updates > configs["vocab-400"].max_updates
    assert generality.count_for(1, longer[0], 1000) == 1


def test_all_vocabularies_hold_out_the_same_text(configs):
    texts = []
    for name in STDLIB:
        _, val = open_splits(configs[name])
        ids = val.read(0, val.tokens)
        tokenizer = load_tokenizer(val.folder / "tokenizer.json")
        documents = np.split(ids, np.flatnonzero(ids == val.meta["separator"]) + 1)[:-1]
        texts.append([tokenizer.decode(document[:-1].tolist()) for document in documents])
        windows = validation_windows(val, configs[name].max_seq_len, 10**9)
        chosen = held_out_of(configs[name]).windows
        assert chosen == windows == list(range((val.tokens - 1) // configs[name].max_seq_len))
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 5


def test_the_loss_is_measured_on_at_most_so_many_bytes(configs, root):
    size = SIZE | {"held_out_bytes": 600}
    for name in STDLIB:
        config = generality.make_config(
            size, VARIANTS[name], Path(configs[name].data), "float32", False
        )
        _, val = open_splits(config)
        per_window = config.max_seq_len * val.bytes / val.tokens
        assert abs(len(held_out_of(config).windows) * per_window - 600) <= per_window / 2


def test_what_a_variant_is_described_by(configs, english):
    config = configs["english"]
    found = generality.describe("english", config)
    split, val = open_splits(config)
    seen = split.read(0, min(split.tokens, config.max_updates * 64)).tolist()
    targets = val.read(1, val.tokens)[: (val.tokens - 1) // 16 * 16].tolist()
    total = len(seen) + config.vocab_size
    nats = -sum(math.log((seen.count(t) + 1) / total) for t in targets) / len(targets)
    assert found["unigram"]["nats"] == pytest.approx(nats, rel=1e-12)
    assert found["held_out_targets"] == 16 * ((val.tokens - 1) // 16)
    assert [entry["source"] for entry in found["sources"]] == [english.name]
    assert found["sources"][0]["documents"] == 60
    assert str(english.parent) not in json.dumps(found)


def test_input_layers_of_a_seed_begin_alike_and_differ_by_their_input(configs):
    hashes = {}
    for name, config in configs.items():
        for seed in (0, 1):
            for layer in ("learned", "binary16", "signs32"):
                changed = replace(config, input_layer=layer, init_seed=10 * seed, code_seed=seed)
                model = Transformer(changed)
                hashes.setdefault((name, seed), set()).add(backbone_hash(model))
    assert all(len(found) == 1 for found in hashes.values())
    assert hashes["base", 0] != hashes["base", 1] and hashes["base", 0] != hashes["vocab-400", 0]
    tables = []
    for seed in (0, 1):
        config = replace(configs["base"], input_layer="signs32", code_seed=seed)
        tables.append(Transformer(config).input.table())
    assert not torch.equal(*tables)


@pytest.mark.parametrize("layer", ["learned", "signs32"])
def test_a_run_is_that_of_train_and_bits_per_byte_are_of_its_text(configs, tmp_path, layer):
    config = replace(
        configs["vocab-400"],
        input_layer=layer,
        out_dir=str(tmp_path / "run"),
        device="cpu",
        eval_interval=100,
        save_interval=100,
    )
    found = generality.run(config, torch.device("cpu"), torch.float32)
    assert found["backbone_hash"] == backbone_hash(Transformer(config))
    train.train(config)
    model = load_checkpoint(tmp_path / "run")
    expected = vars(held_out_loss(model, held_out_of(config), 64))
    assert found["held_out"] == expected
    _, val = open_splits(config)
    bits = expected["nats_per_token"] / math.log(2) * val.tokens / val.bytes
    assert found["held_out"]["bits_per_byte"] == bits


def test_a_sweep_goes_on_where_it_stopped_and_refuses_another(root, tmp_path, monkeypatch, capsys):
    made, run = [], generality.run

    def counted(config, *where):
        made.append((Path(config.data).name, config.max_seq_len, config.input_layer, config.seed))
        return run(config, *where)

    monkeypatch.setattr(generality, "run", counted)
    command = ["--data", str(root), "--out", str(tmp_path)]
    generality.main([*command, "--seeds", "0"])
    layers = ("learned", "binary16", "signs32")
    folders = [variant.folder for variant in VARIANTS.values()]
    places = list(zip(folders, (16, 16, 8, 16), strict=True))
    assert made == [(*place, layer, 0) for place in places for layer in layers]
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in before} == {
        f"{name}-{layer}-seed0.json" for name in VARIANTS for layer in layers
    }
    made.clear()
    generality.main([*command, "--seeds", "0", "1", "--input_layers", "binary16", "gf2"])
    assert made == [(*place, "gf2", 0) for place in places] + [
        (*place, layer, 1) for place in places for layer in ("learned", "binary16", "gf2")
    ]
    assert before.items() <= {path: path.read_bytes() for path in before}.items()

    found = read_json_file(tmp_path / "generality.json")["variants"]
    assert list(found) == list(VARIANTS)
    figures = found["base"]["input_layers"]
    assert {name: f["seeds"] for name, f in figures.items()} == {
        "learned": [0, 1],
        "binary16": [0, 1],
        "gf2": [0, 1],
        "signs32": [0],
    }
    assert figures["learned"]["gap_nats"] == {"mean": 0, "half": 0}
    assert figures["learned"]["parameters"]["input"] == 300 * 32
    assert figures["binary16"]["parameters"]["input"] == 0
    assert figures["binary16"]["gap_bits_per_byte"]["half"] > 0
    hashes = {}
    for path in (tmp_path / "runs").iterdir():
        record = read_json_file(path)
        hashes.setdefault((record["variant"], record["seed"]), set()).add(record["backbone_hash"])
    assert len(hashes) == 8 and all(len(same) == 1 for same in hashes.values())
    page = (tmp_path / "generality.md").read_text()
    assert page.count(" unigram |") == page.count(" signs32 |") == page.count(" gf2 |") == 4
    picture = (tmp_path / "generality.png").read_bytes()
    assert picture.startswith(b"\x89PNG")

    capsys.readouterr()
    made.clear()
    generality.main([*command, "--seeds"])
    assert page in capsys.readouterr().out and not made
    (tmp_path / "generality.png").unlink()
    generality.main([*command, "--redraw"])
    assert (tmp_path / "generality.png").read_bytes() == picture and not made
    error = refused_main(capsys, generality.main, *command, "--lr", "0.1")
    assert "is of another size or --lr, or of data that changed" in error
    error = refused_main(capsys, generality.main, *command, "--input_layers", "signs3")
    assert "there is no input layer signs3; take of learned, binary16" in error
    too_wide = ["--seeds", "5", "--input_layers", "signs256"]
    error = refused_main(capsys, generality.main, *command, *too_wide)
    assert "d_model 32 is no multiple of the code width 256" in error and not made
    other = [*command[:2], "--out", str(tmp_path / "other"), "--seeds"]
    assert "there is no run of learned" in refused_main(capsys, generality.main, *other)


def test_without_english_text_that_variant_is_left_out(tmp_path, english, capsys):
    folders = generality.data_folders(tmp_path, None)
    assert list(folders) == STDLIB and folders["base"] == folders["context-8"]
    error = capsys.readouterr().err
    assert error.startswith("english is left out") and error.count("\n") == 1
    assert list(generality.data_folders(tmp_path, [english])) == list(VARIANTS)
    assert list(generality.data_folders(tmp_path, None)) == list(VARIANTS)
    with pytest.raises(SystemExit) as ended:  # other text than that of the folder
        generality.data_folders(tmp_path, [english, english])
    assert ended.value.code == 2 and "not made with these arguments" in capsys.readouterr().err


def record(layer, seed, nats, backbone="a"):
    return {
        "held_out": {"nats_per_token": nats, "bits_per_byte": nats / 2},
        "seed": seed,
        "backbone_hash": backbone,
        "parameters": {"input": 0},
    }


def runs_of(*records, name="base"):
    return {(name, layer, seed): record(layer, seed, *rest) for layer, seed, *rest in records}


def test_gaps_are_paired_by_seed_within_a_variant():
    runs = runs_of(("learned", 0, 4.0), ("learned", 1, 5.0), ("learned", 2, 9.0))
    runs |= runs_of(("gf2", 0, 4.1), ("gf2", 1, 5.3), ("gf2", 7, 0.0))
    runs |= runs_of(("learned", 0, 1.0), ("gf2", 2, 1.0), name="english")
    layers = generality.summarise(runs, "base")
    assert list(layers) == ["learned", "gf2"] and layers["gf2"]["seeds"] == [0, 1]
    assert layers["learned"]["nats"] == 6 and layers["gf2"]["nats"] == pytest.approx(4.7)
    # Differences 0.1 and 0.3: standard deviation 0.1 sqrt 2, standard error 0.1.
    gap = layers["gf2"]["gap_nats"]
    assert (gap["mean"], gap["half"]) == pytest.approx((0.2, 1.2706))
    gap = layers["gf2"]["gap_bits_per_byte"]
    assert (gap["mean"], gap["half"]) == pytest.approx((0.1, 0.6353))
    assert list(generality.summarise(runs, "english")) == ["learned"]
    assert generality.summarise(runs, "context-8") == {}


def test_unlike_backbones_are_refused():
    runs = runs_of(("learned", 0, 4.0), ("gf2", 0, 4.1, "b"))
    refused(lambda: generality.summarise(runs, "base"), "gf2 and learned of base began unlike")


RECORD = dict.fromkeys(generality.RECORD_KEYS, 1) | {
    "variant": "base",
    "input_layer": "gf2",
    "seed": 0,
    "setting": {"lr": 1},
}
SETTINGS = {"base": {"lr": 1}}


@pytest.mark.parametrize("changes", [{"setting": ...}, {"variant": "other"}, {"variant": ...}])
def test_runs_of_another_setting_are_refused(tmp_path, changes):
    edit_json(tmp_path / "a.json", RECORD)
    assert list(generality.read_all_runs(tmp_path, SETTINGS)) == [("base", "gf2", 0)]
    edit_json(tmp_path / "a.json", changes)
    refused(
        lambda: generality.read_all_runs(tmp_path, SETTINGS), "a.json is of another size or --lr"
    )


def test_a_run_that_lacks_a_figure_is_refused(tmp_path):
    edit_json(tmp_path / "a.json", RECORD | {"held_out": ...})
    refused(
        lambda: generality.read_all_runs(tmp_path, SETTINGS),
        "a.json does not hold held_out; remove it",
    )


def test_how_far_a_gap_is_beyond_that_of_the_base_is_paired_by_seed():
    base = generality.summarise(
        runs_of(("learned", 0, 4.0), ("learned", 1, 5.0), ("gf2", 0, 4.2), ("gf2", 1, 5.4)), "base"
    )
    runs = runs_of(("learned", 0, 1.0), ("learned", 1, 2.0), name="english")
    runs |= runs_of(("gf2", 0, 1.4), ("gf2", 1, 3.2), name="english")
    runs |= runs_of(("binary16", 0, 1.4), name="english")
    layers = generality.summarise(runs, "english")
    generality.compare(layers, base)
    # In bits per byte, half a nat here: 0.2 less 0.1, and 0.6 less 0.2.
    found = layers["gf2"]["beyond_base"]
    assert (found["mean"], found["half"]) == pytest.approx((0.25, 1.9059), rel=1e-4)
    assert layers["learned"]["beyond_base"] == {"mean": 0, "half": 0}
    assert layers["binary16"]["beyond_base"] is None
