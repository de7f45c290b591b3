"""What studies share. Run with: python -m pytest tests/unit/test_common.py"""

import json
from dataclasses import replace

import pytest
import torch
from helpers import TINY_RUN, assert_same, edit_json, refused, write_random_data
from training import newest

from model import Transformer, load_checkpoint
from nanocodes.files import sha256
from studies import common
from train import Config

# ---------------- Configs


def test_the_interfaces_end_with_the_widest_signs_that_fit():
    assert common.interfaces(2048) == ["learned", "binary16", "gf2", "signs2048"]
    assert common.interfaces(96)[-1] == "signs32"


def test_a_config_is_of_the_data_with_a_tenth_as_its_last_learning_rate(tmp_path):
    folder = write_random_data(tmp_path, 100, 100, vocab_size=77)
    values = {name: value for name, value in TINY_RUN.items() if name not in ("min_lr", "dtype")}
    config = common.make_config(values, folder, torch.bfloat16, lr=0.5)
    assert (config.vocab_size, config.data) == (77, str(folder))
    assert (config.lr, config.min_lr, config.dtype) == (0.5, 0.05, "bfloat16")


def test_a_setting_is_all_that_decides_a_run_but_what_varies(tmp_path):
    folder = write_random_data(tmp_path, 100, 100)
    config = Config(**TINY_RUN, data=str(folder))
    setting = common.setting_of(config, varied=("seed", "init_seed"))
    assert setting["data_sha256"] == sha256(folder / "meta.json")
    faster = replace(config, micro_batch=1, compile=True, out_dir="elsewhere")
    other_seed = replace(faster, **common.seeds_of(5))
    assert common.setting_of(other_seed, varied=("seed", "init_seed")) == setting
    assert common.setting_of(replace(config, lr=1.0), varied=("seed", "init_seed")) != setting
    assert common.setting_of(other_seed, varied=()) != common.setting_of(config, varied=())


# ---------------- Training


def test_the_loop_is_that_of_train(undisturbed):
    model = Transformer(undisturbed)
    assert list(common.fit(model, undisturbed, torch.float32)) == list(range(1, 9))
    expected = load_checkpoint(newest(undisturbed.out_dir))
    assert_same(model.state_dict(), expected.state_dict())


def test_a_diverged_run_is_refused(data):
    config = Config(**TINY_RUN | {"lr": 1e9, "min_lr": 1e9, "grad_clip": 1e9}, data=data)
    sentence = refused(lambda: list(common.fit(Transformer(config), config, torch.float32)))
    assert sentence.startswith("update ") and " has loss " in sentence
    assert sentence.endswith("; lower --lr")


# ---------------- Intervals


def test_one_seed_has_no_interval_and_three_have_that_of_student():
    assert common.interval([0.5]) == {"mean": 0.5, "half": None}
    found = common.interval([1.0, 2.0, 4.0])  # t 4.303, standard error 0.881917
    assert (found["mean"], found["half"]) == pytest.approx((7 / 3, 3.79489), rel=1e-5)


def test_intervals_in_words():
    assert common.in_words({"mean": 0.25, "half": 0.5}) == "+0.2500 ± 0.5000"
    assert common.in_words({"mean": -0.25, "half": None}) == "-0.2500"
    assert common.in_words({"mean": 0.25, "half": 0.5}, form=".1f") == "0.2 ± 0.5"


# ---------------- Records and results


def test_records_are_read_in_order_and_strange_ones_are_refused(tmp_path):
    setting = {"lr": 1.0}
    for name in ("b", "a"):
        edit_json(tmp_path / f"{name}.json", {"name": name, "setting": setting})
    (tmp_path / "b.json.partial").write_text("{")
    records = common.read_runs_of(tmp_path, {"name"}, setting)
    assert [record["name"] for record in records] == ["a", "b"]

    def read(keys=frozenset({"name"}), setting=setting):
        return common.read_runs_of(tmp_path, keys, setting)

    sentence = refused(lambda: read(keys={"name", "nats"}), "a.json does not hold nats")
    assert sentence.endswith("; remove it to make it again")
    what = "of another size or other data; choose another --out"
    refused(lambda: read(setting={"lr": 2.0}), "a.json is", what)
    (tmp_path / "b.json").write_text("{")
    refused(read, "b.json is not valid JSON")


def test_results_are_a_json_and_a_page(tmp_path):
    common.write_results(tmp_path, "cost", {"bytes": [1]}, "# ±\n")
    assert json.loads((tmp_path / "cost.json").read_text()) == {"bytes": [1]}
    assert (tmp_path / "cost.md").read_bytes() == "# ±\n".encode()
