"""Config files and options. Run with: python -m pytest tests/unit/test_config.py"""

import dataclasses
import re

import pytest
from helpers import refused_script
from training import refused

import train
from train import Config, make_config


@pytest.fixture
def files(tmp_path):
    (tmp_path / "first.py").write_text('lr = 1e-3\nseed = 1\ninput_layer = "gf2"\n')
    (tmp_path / "second.py").write_text("seed = 2  # wins\nmin_lr = 1e-4\n")
    return [str(tmp_path / "first.py"), str(tmp_path / "second.py")]


def test_later_files_and_then_options_win(files):
    config = make_config(files, {"min_lr": "1e-6"})
    assert (config.lr, config.seed, config.min_lr, config.input_layer) == (1e-3, 2, 1e-6, "gf2")
    assert make_config(files[::-1], {}).seed == 1
    assert make_config(files, {"seed": "3"}).seed == 3
    assert make_config([], {}) == Config(out_dir="out/learned")


def test_out_dir_is_named_after_the_files(files):
    assert make_config(files[:1], {}).out_dir == "out/first"
    assert make_config(files, {}).out_dir == "out/first-second"
    assert make_config(files, {"out_dir": "none"}).out_dir == "out/first-second"
    assert make_config(files, {"out_dir": ""}).out_dir == "out/first-second"
    assert make_config(files, {"out_dir": "elsewhere"}).out_dir == "elsewhere"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "1", 1.0),
        ("lr", "1e-3", 1e-3),
        ("max_updates", "1_000", 1000),
        ("keep_checkpoints", "-1", -1),
        ("eval_windows", "0", 0),
        ("compile", "true", True),
        ("compile", "True", True),
        ("compile", "false", False),
        ("compile", "False", False),
        ("n_kv_heads", "none", None),
        ("n_kv_heads", "None", None),
        ("n_kv_heads", "4", 4),
        ("code_matrix", "none", None),
        ("code_matrix", "1234", "1234"),
        ("out_dir", "2026", "2026"),
        ("out_dir", "1e3", "1e3"),
        ("data", "a=b=c", "a=b=c"),
        ("data", "with space", "with space"),
        ("data", "'quoted'", "'quoted'"),
    ],
)
def test_options_become_values_of_their_type(name, text, value):
    found = getattr(make_config([], {name: text}), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--learning_rate=1e-3", "learning_rate"),
        ("--l=1e-3", "--l"),
        ("lr=1e-3", "lr=1e-3"),
        ("nowhere.py", "nowhere.py"),
        ("--lr=fast", "lr is 'fast'"),
        ("--lr=1e-3x", "lr is '1e-3x'"),
        ("--lr=", "lr is ''"),
        ("--lr=1=2", "lr is '1=2'"),
        ("--lr=nan", "lr"),
        ("--lr=1e999", "lr is inf"),
        ("--lr=-1e-3", "lr is -0.001"),
        ("--lr=none", "lr is None"),
        ("--lr=true", "lr is True"),
        ("--lr=[1]", r"lr is \[1\]"),
        ("--lr=-", "lr is '-'"),
        ("--max_updates=1.5", "max_updates is 1.5"),
        ("--max_updates=1e3", "max_updates is 1000.0"),
        ("--max_updates=0", "max_updates is 0"),
        ("--max_updates=-1", "max_updates is -1"),
        ("--max_updates=many", "max_updates is 'many'"),
        ("--max_updates=true", "max_updates is True"),
        ("--micro_batch=0", "micro_batch is 0"),
        ("--micro_batch=-8", "micro_batch is -8"),
        ("--targets_per_update=0", "targets_per_update is 0"),
        ("--vocab_size=0", "vocab_size is 0"),
        ("--d_model=-2048", "d_model is -2048"),
        ("--n_layers=0", "n_layers is 0"),
        ("--max_seq_len=0", "max_seq_len is 0"),
        ("--log_interval=0", "log_interval is 0"),
        ("--save_interval=0", "save_interval is 0"),
        ("--eval_interval=0", "eval_interval is 0"),
        ("--eval_windows=-1", "eval_windows is -1"),
        ("--keep_checkpoints=-2", "keep_checkpoints is -2"),
        ("--warmup_updates=-1", "warmup_updates is -1"),
        ("--seed=-1", "seed is -1"),
        ("--beta1=1", "beta1 is 1.0"),
        ("--beta2=1.5", "beta2 is 1.5"),
        ("--max_updates=2147483648", "max_updates is 2147483648"),
        ("--compile=1", "compile is 1"),
        ("--compile=yes", "compile is 'yes'"),
        ("--n_kv_heads=5", "n_kv_heads 5"),
        ("--n_kv_heads=two", "n_kv_heads is 'two'"),
        ("--data=none", "data is None"),
        ("--input_layer=binary17", "binary17"),
        ("--n_heads=7", "d_model 2048 .* n_heads 7"),
        ("--n_heads=2048", "d_model 2048 .* n_heads 2048"),
        ("--d_model=2056 --n_heads=1 --input_layer=gf2 --dry_run", "d_model 2056 .* 16"),
        ("--vocab_size=65537 --input_layer=binary16 --dry_run", "65537"),
        ("--micro_batch=7 --dry_run", "262144 .* micro_batch 7"),
        ("--targets_per_update=1000", "targets_per_update 1000 .* 2048"),
        ("--resume=yes", "resume"),
        ("--lr", "lr"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(arguments, words, capsys):
    assert re.search(words, refused(capsys, *arguments.split()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate = 1e-3", "learning_rate"),
        ("lr = '1e-3'", "lr is '1e-3'"),
        ("lr = True", "lr is True"),
        ("max_updates = 1e3", "max_updates is 1000.0"),
        ("max_updates = True", "max_updates is True"),
        ("compile = 1", "compile is 1"),
        ("compile = 'False'", "compile is 'False'"),
        ("data = 7", "data is 7"),
        ("data = None", "data is None"),
        ("import math", "math"),
        ("lr = ", "one.py"),
        ("lr = 1 / 0", "one.py"),
        ("lr = peak", "one.py"),
        ("lr = float('nan')", "lr is nan"),
        ("lr = float('inf')", "lr is inf"),
        ("lr = 10**400", "lr"),
    ],
)
def test_wrong_config_files_are_refused_in_one_sentence(text, words, capsys, tmp_path):
    (tmp_path / "one.py").write_text(text + "\n")
    assert words in refused(capsys, str(tmp_path / "one.py"))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"lr = '\xff'", b"lr = 1\x00"])
def test_config_files_that_are_no_text_are_refused(data, capsys, tmp_path):
    (tmp_path / "one.py").write_bytes(data)
    assert "one.py" in refused(capsys, str(tmp_path / "one.py"))


def test_config_file_may_compute_and_an_int_stands_for_a_float(tmp_path):
    (tmp_path / "one.py").write_text("lr = 2\nmax_updates = 10**9 // 262_144\nn_kv_heads = None\n")
    config = make_config([str(tmp_path / "one.py")], {})
    assert config.lr == 2 and config.max_updates == 3814 and config.n_kv_heads is None


def test_command_line_refuses_without_a_traceback():
    sentence = refused_script("train.py", "configs/learned.py", "--lr=fast")
    assert re.fullmatch(r"train\.py: lr is 'fast'.*\n", sentence)


def test_help_lists_every_field_with_its_default_and_a_line(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for field in dataclasses.fields(Config):
        line = re.search(rf" --{field.name} (.*?) ?\(default (.*?)\)", text)
        assert line and len(line[1]) > 5, field.name
        assert line[2] == str(field.default), field.name
