"""The shape of the repository. Run with: python -m pytest tests/test_repository.py"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMITS = dict(codes=200, shards=200, model=320, prepare=300, train=420, evaluate=420, sample=100,
              convert=150, device=150, harness=430, tokenizer=160, loss=60)  # fmt: skip
# An import goes to a lower floor only, and within a floor goes nowhere. Studies stand on top.
FLOORS = [
    ("codes", "device", "loss", "tokenizer"),
    ("shards",),
    ("model",),
    ("prepare", "train", "sample", "convert", "harness"),
    ("evaluate",),
]
SCRIPTS = [script for floor in FLOORS for script in floor]
COMMANDS = ["codes", "prepare", "train", "sample", "convert", "evaluate"]
HEAVY = ["matplotlib", "datasets", "lm_eval", "transformers", "pyarrow"]
# Not all of a folder: the root and configs/ may hold files of a user's own.
SOURCES = [ROOT / f"{script}.py" for script in SCRIPTS]
SOURCES += sorted(path for name in ("studies", "tests") for path in (ROOT / name).glob("*.py"))


def floor_of(script):
    return next(number for number, floor in enumerate(FLOORS) if script in floor)


def imported_by(path):
    """The modules of this repository that a file imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module.split(".")[0])
    return names & {source.stem for source in SOURCES}


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_every_script_stands_on_a_floor():
    assert set(SCRIPTS) == set(LIMITS)
    assert all((ROOT / f"{script}.py").is_file() for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_size(script):
    assert len((ROOT / f"{script}.py").read_text().splitlines()) <= LIMITS[script]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_are_short_and_tidy(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= 100, f"{path.name}:{number}"
        assert line == line.rstrip() and "\t" not in line, f"{path.name}:{number}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports_go_down_only(script):
    for name in imported_by(ROOT / f"{script}.py"):
        assert name in SCRIPTS, f"{script} imports {name}, which is no script"
        assert floor_of(name) < floor_of(script), f"{script} imports {name}"


def test_studies_are_imported_by_nobody():
    studies = {path.stem for path in SOURCES if path.parent.name == "studies"}
    for path in SOURCES:
        if path.parent.name in ("studies", "tests"):
            continue
        assert not imported_by(path) & studies, path.name


def test_importing_the_scripts_prints_nothing_and_stays_light():
    program = f"""
import os, sys
before = sorted(os.listdir())
for script in {SCRIPTS}:
    __import__(script)
    found = [name for name in {HEAVY} if name in sys.modules]
    assert not found, (script, found)
assert sorted(os.listdir()) == before
"""
    done = run("-B", "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


@pytest.mark.parametrize("script", COMMANDS)
def test_help(script):
    done = run(f"{script}.py", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: ") and f"{script}.py" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_begin_with_what_they_do_and_run_only_when_called(script):
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    assert ast.get_docstring(tree)
    guards = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    assert len(guards) == (script in COMMANDS)
    for guard in guards:
        assert [ast.unparse(line) for line in guard.body] == ["main()"]
        assert f"python {script}.py" in ast.get_docstring(tree)


def test_requirements_are_pinned():
    packages = {}
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                package = re.fullmatch(r"([a-z0-9-]+)==(\d[\w.]*)", line)
                assert package, f"{path.name}: {line}"
                packages[package[1]] = package[2]
    to_run = "torch numpy tiktoken tokenizers lm-eval safetensors matplotlib tqdm"
    to_test = "pytest hypothesis transformers accelerate ruff"
    assert set(packages) == set(f"{to_run} {to_test}".split())
    assert packages["torch"] == "2.13.0"


def test_what_runs_make_is_ignored():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"data/", "out/", ".venv/"} <= set(ignored)
