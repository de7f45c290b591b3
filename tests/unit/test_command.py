"""How every command refuses. Run with: python -m pytest tests/unit/test_command.py

Stops are tested where they are used, in the tests of train.py and prepare.py.
"""

import errno

import pytest

from nanocodes.command import make_parser, refusals


@pytest.mark.parametrize(
    "error, status, sentence",
    [
        (ValueError("no data; make it"), 2, "no data; make it"),
        (ValueError("of two\nlines\n"), 2, "of two lines"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), 2, "[Errno 28] No space left: 'a/b'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_refusal_is_one_sentence(capsys, error, status, sentence):
    with pytest.raises(SystemExit) as ended, refusals(make_parser("", prog="script.py")):
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"script.py: {sentence}\n"


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyError("a fault"), AssertionError()])
def test_a_fault_of_our_own_keeps_its_traceback(error):
    with pytest.raises(type(error)), refusals(make_parser("")):
        raise error


@pytest.mark.parametrize("arguments", [["--unknown"], ["--size", "much"], ["--siz", "3"]])
def test_a_parser_refuses_in_one_sentence_without_the_usage(capsys, arguments):
    parser = make_parser("", prog="script.py")
    parser.add_argument("--size", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("script.py: ") and error.count("\n") == 1


def test_too_little_memory_is_refused_and_other_errors_are_not(capsys):
    parser = make_parser("doc", "train.py")
    with pytest.raises(SystemExit) as ended, refusals(parser):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    assert ended.value.code == 2
    assert "too little memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="illegal memory access"), refusals(parser):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_option_of_two_lines_is_refused_in_one(capsys):
    with pytest.raises(SystemExit):
        make_parser("doc", "train.py").parse_args(["--bog\nus=1"])
    assert capsys.readouterr().err.count("\n") == 1
