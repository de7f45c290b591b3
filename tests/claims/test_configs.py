"""The files under configs/. Run with: python -m pytest tests/claims/test_configs.py"""

import difflib
import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import ROOT

from model import Transformer
from nanocodes.plan import parameter_counts
from train import make_config, micro_steps

CONFIGS = ROOT / "configs"
PAPER = {"learned": 1_812_039_680, "binary16": 1_711_376_384, "gf2": 1_711_376_384}
FILES = sorted(path.stem for path in CONFIGS.glob("*.py"))
OVERLAYS = [name for name in FILES if name not in (*PAPER, "signs")]


def config_of(*names):
    return make_config([str(CONFIGS / f"{name}.py") for name in names], {})


def build(config):
    with torch.device("meta"):
        return Transformer(config)


def test_the_files_are_the_ones_meant():
    assert {*PAPER, "signs", "smoke", "small"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_file_loads_and_builds(name):
    config = config_of(name)
    assert config.out_dir == f"out/{name}"
    assert sum(parameter_counts(build(config)).values()) > 0


@pytest.mark.parametrize("base", PAPER)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_file_laid_over_each_input_layer_changes_all_but_the_input_layer(base, overlay):
    config = config_of(base, overlay)
    alone = config_of(overlay)
    assert config.input_layer == base and config.out_dir == f"out/{base}-{overlay}"
    counts = parameter_counts(build(config))
    usual = parameter_counts(build(alone))
    assert counts["backbone"] == usual["backbone"] and counts["head"] == usual["head"]
    table = config.vocab_size * config.d_model if base == "learned" else 0
    assert counts["input"] == table


@pytest.mark.parametrize(("name", "parameters"), PAPER.items())
def test_paper_parameter_counts(name, parameters):
    config = config_of(name)
    counts = parameter_counts(build(config))
    assert sum(counts.values()) == parameters
    assert counts["input"] == (100_663_296 if name == "learned" else 0)
    assert config.targets_per_update == 262_144 and config.max_updates == 381_470
    assert micro_steps(config, 2) == 8


def test_paper_configs_differ_in_the_line_of_the_input_layer_alone():
    lines = {name: (CONFIGS / f"{name}.py").read_text().splitlines() for name in PAPER}
    for other in ("binary16", "gf2"):
        changed = [
            line
            for line in difflib.ndiff(lines["learned"], lines[other])
            if not line.startswith(("  ", "? "))
        ]
        assert [line[:15] for line in changed] == ["- input_layer =", "+ input_layer ="]
        assert f'input_layer = "{other}"' in changed[1]


def test_signs_is_the_papers_run_but_for_its_input():
    signs = config_of("signs")
    gf2 = config_of("gf2")
    assert parameter_counts(build(signs)) == parameter_counts(build(gf2))
    assert build(signs).input.tiles == 1
    assert replace(signs, input_layer=gf2.input_layer, out_dir=gf2.out_dir) == gf2


def numbers_in(text):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


@pytest.mark.parametrize("name", FILES)
def test_batch_arithmetic_in_the_comment_holds(name):
    config = config_of(name)
    text = (CONFIGS / f"{name}.py").read_text()
    batch = re.search(r"^# (.* x .*) = ([\d,]+) targets per update$", text, re.MULTILINE)
    factors = {}
    for factor in batch[1].split(" x "):
        number, _, word = factor.partition(" ")
        factors[word.rstrip("s")] = int(number.replace(",", ""))
    world = factors.get("GPU") or factors.get("rank")
    assert factors["sequence"] == config.micro_batch
    assert factors["token"] == config.max_seq_len
    assert factors["micro-step"] == micro_steps(config, world)
    assert math.prod(factors.values()) == config.targets_per_update
    assert numbers_in(batch[2]) == [config.targets_per_update]

    budget = re.search(r"^# (.*) updates x (.*) targets = (.*) targets$", text, re.MULTILINE)
    updates, targets, total = (numbers_in(part)[0] for part in budget.groups())
    assert (updates, targets) == (config.max_updates, config.targets_per_update)
    assert total == updates * targets


def test_smoke_needs_no_compiler_and_ends_with_a_checkpoint_and_a_validation():
    config = config_of("gf2", "smoke")
    assert config.compile is False
    assert config.max_updates % config.eval_interval == 0
    assert config.max_updates % config.save_interval == 0
    assert config.data == "data/stdlib" and config.vocab_size == 8192
