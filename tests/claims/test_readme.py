"""The README's tables, code and commands hold.

python -m pytest tests/claims/test_readme.py
"""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, run_script

from model import ModelConfig, Transformer
from nanocodes.benchmarks import PAPER

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
CODE = [text for language, text in BLOCKS if language == "python"]
STUDIES = (ROOT / "studies" / "README.md").read_text()


def table_rows(text, first_cell):
    """The cells of each row of the Markdown table whose header begins with this cell."""
    header = re.search(rf"^\| {first_cell} +\|", text, re.MULTILINE)
    table = text[header.start() :].partition("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[2:]]


def commands(text):
    """(script, its options) of every command of a page's code blocks."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        script = re.search(r"(?:^python|^torchrun.*?) ((?:\w+/)?\w+\.py)(.*?)(?:#|$)", line)
        if script:
            options = re.findall(r" --(\w+)", script[2])
            found.append((script[1], options))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_is_short():
    assert len(README.split()) <= 2000


def test_the_papers_table():
    for name, _, parameters, *figures in table_rows(README, "input layer"):
        published = [
            PAPER[task].published[name] for task in ("hellaswag", "piqa", "lambada_openai")
        ]
        assert figures == published
        with torch.device("meta"):
            model = Transformer(ModelConfig(input_layer=name))
        assert parameters == f"{sum(p.numel() for p in model.parameters()):,}"


def test_the_smoke_table_is_the_recorded_one():
    recorded = (ROOT / "studies" / "results" / "smoke.md").read_text()
    losses = recorded[recorded.index("Held-out loss") :]
    rows = table_rows(losses, "run")
    assert [[row[0].removesuffix("-smoke"), *row[1:]] for row in rows] == table_rows(README, "run")


def test_the_idea_in_twelve_lines_is_the_gf2_input():
    idea = next(text for text in CODE if "def gf2_input" in text)
    namespace = {}
    exec(idea, namespace)
    body = idea[idea.index("A = ") :].splitlines()
    assert len([line for line in body if line]) <= 12
    ids = torch.arange(49_152).reshape(3, -1)
    model_input = Transformer(ModelConfig(n_layers=1, d_ff=8, input_layer="gf2")).input
    for rows in zip(ids.split(1024, dim=1), strict=True):
        assert torch.equal(namespace["gf2_input"](rows[0]), model_input(rows[0]))


def test_both_kinds_of_input_layer_are_added_as_the_readme_says(tmp_path):
    for name in ("nanocodes", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("train.py", "model.py", "codes.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    gray = next(text for text in CODE if "def gray" in text)
    gaussian = next(text for text in CODE if "def gaussian" in text)
    for name, text, behind in (
        ("codes.py", gray, r"LINEAR_CODES \|= .*\n"),
        ("model.py", gaussian, r"INPUT_LAYERS = .*\n"),
    ):
        source = (tmp_path / name).read_text()
        end = re.search(behind, source).end()
        (tmp_path / name).write_text(f"{source[:end]}\n\n{text}\n{source[end:]}")
    program = """
import torch
from codes import code_table
from model import ModelConfig, Transformer
from nanocodes.plan import parameter_counts

shape = dict(vocab_size=256, d_model=32, n_layers=1, n_heads=1, d_ff=8, max_seq_len=8)
bits = code_table("gray", 256)
assert bits.shape == (256, 16)
assert ((bits[1:] != bits[:-1]).sum(axis=1) == 1).all()
learned = Transformer(ModelConfig(**shape))
for name in ("gray", "gaussian"):
    model = Transformer(ModelConfig(**shape, input_layer=name))
    assert parameter_counts(model)["input"] == 0
    assert torch.equal(model.head.weight, learned.head.weight)
    model(torch.arange(8)[None], torch.arange(8)[None])[1].backward()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    for name in ("gray", "gaussian"):
        options = ["configs/gf2.py", "configs/smoke.py", f"--input_layer={name}", "--dry_run"]
        done = subprocess.run(
            [sys.executable, "train.py", *options], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and "input 0" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_scripts_and_options_that_exist(page):
    for script, options in commands(page.read_text()):
        assert (ROOT / script).is_file(), script
        known = help_of(script)
        for option in options:
            assert f"--{option} " in known or f"--{option}\n" in known, (script, option)


helps = {}


def help_of(script):
    if script not in helps:
        done = run_script(script, "--help")
        assert done.returncode == 0, done.stderr
        helps[script] = done.stdout
    return helps[script]


def test_findings_are_those_of_the_studies_page():
    answers = README[README.index("## Past the paper") : README.index("## Look up")]
    figures = re.findall(r"\d\.\d\d ± \d\.\d\d", answers)
    assert len(figures) >= 5
    text = " ".join(STUDIES.split())
    for figure in figures:
        assert figure in text, figure


def test_codes_by_hand_are_as_the_readme_writes_them():
    """A hex word a row, bit 0 the first column."""
    from codes import matrix_from_hex

    assert np.array_equal(matrix_from_hex("0001 0003", 2)[:, :2], [[1, 0], [1, 1]])
