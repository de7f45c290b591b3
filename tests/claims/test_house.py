"""How the repository is laid out. Run with: python -m pytest tests/claims/test_house.py"""

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT, run_script

SCRIPTS = ["codes", "model", "prepare", "train", "evaluate", "sample", "convert"]
COMMANDS = [script for script in SCRIPTS if script != "model"]
PACKAGE = sorted((ROOT / "nanocodes").glob("*.py"))
STUDIES = sorted((ROOT / "studies").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# What one script may import of the others: the algebra, the model, and for evaluate a reader of
# Hugging Face folders.
MAY_IMPORT = dict.fromkeys(SCRIPTS, {"codes", "model"}) | {
    "codes": set(),
    "model": {"codes"},
    "evaluate": {"codes", "model", "convert"},
}
HEAVY = ["matplotlib", "datasets", "lm_eval", "transformers", "pyarrow"]


def imported_by(path):
    """The first parts of the names of all modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module.split(".")[0])
    return names


def test_the_top_level_holds_seven_scripts():
    tracked = {path.stem for path in ROOT.glob("*.py")} & {*SCRIPTS}
    assert tracked == {*SCRIPTS}
    for folder in ("nanocodes", "configs", "studies", "docs", "tests"):
        assert (ROOT / folder).is_dir()
    for folder in ("claims", "unit", "hostile"):
        assert list((ROOT / "tests" / folder).glob("test_*.py"))


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.stem)
def test_the_package_imports_nothing_from_above(path):
    above = {*SCRIPTS, "studies", "tests", "helpers", *(study.stem for study in STUDIES)}
    assert not imported_by(path) & above


def test_the_package_has_no_circles():
    imports = {}
    for path in PACKAGE:
        text = path.read_text()
        imports[path.stem] = set(re.findall(r"from nanocodes\.(\w+) import", text))
        assert "import nanocodes" not in text and "from nanocodes import" not in text
    while imports:
        leaves = [room for room, used in imports.items() if not used & imports.keys()]
        assert leaves, f"a circle among {sorted(imports)}"
        for leaf in leaves:
            del imports[leaf]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_import_what_comes_before_them_only(script):
    assert imported_by(ROOT / f"{script}.py") & {*SCRIPTS} <= MAY_IMPORT[script]


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_but_studies_and_tests_imports_a_study(script):
    names = {"studies", *(study.stem for study in STUDIES)}
    assert not imported_by(ROOT / f"{script}.py") & names


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
    done = run_script("-B", "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


@pytest.mark.parametrize("script", COMMANDS)
def test_help(script):
    done = run_script(f"{script}.py", "--help")
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


@pytest.mark.parametrize("path", [*PACKAGE, *STUDIES, *TESTS], ids=lambda path: path.stem)
def test_every_file_says_what_it_holds(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_file_escapes_the_formatter():
    scripts = [ROOT / f"{script}.py" for script in SCRIPTS]
    for path in [*scripts, *PACKAGE, *STUDIES, *TESTS]:
        if path != Path(__file__):
            assert not re.search("# fmt: (skip|off)", path.read_text()), path
    makefile = (ROOT / "Makefile").read_text()
    assert "ruff format --check" in makefile and "ruff check" in makefile
    assert re.search(r"^test: lint$", makefile, re.MULTILINE)


def test_requirements_are_pinned():
    packages = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            package = re.fullmatch(r"([a-z0-9-]+)==(\d[\w.]*)", line)
            assert package, line
            packages[package[1]] = package[2]
    to_run = "torch numpy tiktoken tokenizers lm-eval safetensors matplotlib tqdm"
    to_test = "pytest hypothesis transformers accelerate ruff"
    assert set(packages) == set(f"{to_run} {to_test}".split())
    assert packages["torch"] == "2.13.0"


def test_what_runs_make_is_ignored():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"data/", "out/", ".venv/"} <= set(ignored)
