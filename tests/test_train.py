"""Training, stops, resumes, ranks. Run with: python -m pytest tests/test_train.py"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import device as device_module
import shards
import train
from model import Transformer, step_folders
from train import Config, learning_rate, make_config, micro_steps

ROOT = Path(__file__).parent.parent
LENGTH = 16
TINY = dict(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=2,
    d_ff=64,
    max_seq_len=LENGTH,
    max_updates=8,
    targets_per_update=4 * LENGTH,
    micro_batch=2,
    lr=1e-2,
    min_lr=1e-3,
    warmup_updates=2,
    eval_interval=4,
    save_interval=3,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
# One process imports torch for all that the tests start: it forks them when asked.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train", "pytest", "hypothesis", "matplotlib.figure"])


def make_data(folder, windows, vocab_size=64, tokenizer="{}"):
    """A data folder of random ids: so many whole windows and a piece of one, and 7 to validate."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    numbers, splits = np.random.default_rng(0), {}
    for split, count in (("train", windows), ("val", 7)):
        ids = numbers.integers(0, 64, count * LENGTH + 6)
        entry = shards.write_shard(folder, split, 0, ids)
        splits[split] = dict(documents=1, tokens=len(ids), bytes=3 * len(ids), shards=[entry])
    digest = shards.sha256(folder / "tokenizer.json")
    meta = dict(vocab_size=vocab_size, separator=0, tokenizer="test", tokenizer_sha256=digest)
    shards.write_json(folder / "meta.json", {**meta, "sources": [], "splits": splits})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten windows: with four an update, eight updates are three epochs and a bit."""
    return str(make_data(tmp_path_factory.mktemp("data") / "ten", 10))


@pytest.fixture(scope="module")
def more_data(tmp_path_factory):
    return str(make_data(tmp_path_factory.mktemp("data") / "hundred", 100))


@contextlib.contextmanager
def handlers_given_back():
    """Undo what a training in this process does to the handlers of signals."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signals():
    with handlers_given_back():
        yield


def run(config, resume=False):
    """Train in this process, with signals as main handles them."""
    with handlers_given_back():
        train.train(config, resume, device_module.catch_stop())


def as_options(config):
    values = dataclasses.asdict(config).items()
    return [f"--{name}={'none' if value is None else value}" for name, value in values]


def state_of(step):
    """Everything that a step folder holds of the training, flat: name -> tensor or number."""
    state = torch.load(step / "training_state.pt", weights_only=True)
    weights = load_file(step / "model.safetensors")
    flat = {f"weight {name}": value for name, value in weights.items()}
    for number, values in state["state"].items():
        flat |= {f"{number} {name}": value for name, value in values.items()}
    return flat | {"groups": repr(state["param_groups"])}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if isinstance(one[name], torch.Tensor):
            assert one[name].dtype == other[name].dtype, name
            assert torch.equal(one[name], other[name]), name
        else:
            assert one[name] == other[name], name


def metrics_of(out):
    """The lines of metrics.jsonl, less what depends on the clock."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in m.items() if k not in ("targets_per_s", "mfu")} for m in lines]


def losses_of(out):
    return {m["update"]: m["loss"] for m in metrics_of(out) if "loss" in m}


def steps_of(out):
    return [int(step.name.removeprefix("step_")) for step in step_folders(out)]


def newest(out):
    return step_folders(out)[-1]


def stop_during(monkeypatch, update):
    """Send SIGTERM in the middle of the update that counts from 0."""
    original = train.accumulate_gradients

    def interrupted(model, data, config, now, *rest):
        if now == update:
            signal.raise_signal(signal.SIGTERM)
        return original(model, data, config, now, *rest)

    monkeypatch.setattr(train, "accumulate_gradients", interrupted)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """A run of eight updates without a stop: its config and folder."""
    config = Config(**TINY, data=data, out_dir=str(tmp_path_factory.mktemp("run") / "whole"))
    run(config)
    return config


@pytest.fixture
def stopped(undisturbed, tmp_path, monkeypatch):
    """A run like it, stopped after update 6: it holds the steps 3 and 6."""
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        stop_during(patch, 5)
        run(config)
    assert steps_of(config.out_dir) == [3, 6]
    return config


def assert_like_undisturbed(config, undisturbed):
    assert steps_of(config.out_dir)[-1] == 8
    assert_same(state_of(newest(config.out_dir)), state_of(newest(undisturbed.out_dir)))
    assert metrics_of(config.out_dir) == metrics_of(undisturbed.out_dir)


# ---------------------------------------------------------------- the schedule and the batch


def test_schedule_at_its_corners():
    config = Config()
    assert learning_rate(config, 0) == 1.5e-4 / 2000
    assert learning_rate(config, 999) == 1.5e-4 / 2
    assert learning_rate(config, 1999) == learning_rate(config, 2000) == 1.5e-4
    middle = (2000 + 381_469) / 2
    assert learning_rate(config, middle) == pytest.approx((1.5e-4 + 1.5e-5) / 2, rel=1e-9)
    assert learning_rate(config, 381_469) == 1.5e-5


def test_schedule_rises_then_falls():
    config = Config(**TINY | dict(max_updates=1000, warmup_updates=100))
    rates = [learning_rate(config, update) for update in range(1000)]
    assert all(a < b for a, b in zip(rates[:100], rates[1:100], strict=False))
    assert all(a > b for a, b in zip(rates[100:], rates[101:], strict=False))
    assert min(rates[100:]) == rates[-1] == 1e-3
    assert max(rates) == pytest.approx(1e-2, rel=1e-12)
    assert learning_rate(Config(**TINY | dict(warmup_updates=0)), 0) == pytest.approx(1e-2)


def test_paper_batch_in_micro_steps():
    assert micro_steps(Config(), 2) == 8
    assert micro_steps(Config(), 1) == 16
    assert micro_steps(Config(micro_batch=128), 1) == 1


def test_batch_that_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(ValueError) as refusal:
        micro_steps(Config(), 3)
    for number in ("262144", "49152", "micro_batch 8", "max_seq_len 2048", "3 ranks"):
        assert number in str(refusal.value)
    with pytest.raises(ValueError, match="targets_per_update 1000 .* max_seq_len 2048"):
        micro_steps(Config(targets_per_update=1000), 1)


# ---------------------------------------------------------------- config files and options


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


def refused(capsys, *arguments):
    """The one sentence on stderr with which train.py refuses these arguments."""
    with pytest.raises(SystemExit) as stop:
        train.main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("train.py: ") and error.endswith("\n") and error.count("\n") == 1
    return error


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
    command = [sys.executable, "train.py", "configs/learned.py", "--lr=fast"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"train\.py: lr is 'fast'.*\n", done.stderr)


def test_help_lists_every_field_with_its_default_and_a_line(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for field in dataclasses.fields(Config):
        line = re.search(rf" --{field.name} (.*?) ?\(default (.*?)\)", text)
        assert line and len(line[1]) > 5, field.name
        assert line[2] == str(field.default), field.name


def test_dry_run_prints_the_papers_numbers_without_data(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    train.main([str(ROOT / "configs/learned.py"), "--dry_run"])
    learned = capsys.readouterr().out
    for number in ("1,812,039,680", "100,663,296", "262,144", "381,470", "100,000,071,680",
                   "48,828,160"):  # fmt: skip
        assert number in learned
    assert "2 ranks x 8 micro-steps x 8 sequences x 2048" in learned
    for name in ("binary16", "gf2"):
        train.main([str(ROOT / f"configs/{name}.py"), "--dry_run"])
        assert "1,711,376,384" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- one process: what an update is


def test_recorded_loss_is_the_mean_over_the_batch_whatever_the_micro_batch(data, tmp_path):
    losses = {}
    for size in (1, 2, 4):
        changes = dict(micro_batch=size, max_updates=3, out_dir=str(tmp_path / str(size)))
        config = Config(**TINY | dict(data=data) | changes)
        run(config)
        losses[size] = losses_of(config.out_dir)
    opened = shards.open_shards(data, "train")
    windows = shards.update_windows(10, 4, config.seed, 0)
    ids, targets = shards.read_windows(opened, windows, LENGTH)
    whole = Transformer(config).losses(ids, targets).mean().item()
    assert losses[4][1] == pytest.approx(whole, rel=1e-6)
    for size in (1, 2):
        assert losses[size] == pytest.approx(losses[4], rel=1e-5)
        assert len(losses[size]) == 3


def test_three_interfaces_train_through_the_same_batches(data, tmp_path, monkeypatch):
    seen, original = [], shards.read_windows

    def noting(opened, windows, length):
        seen.append(windows)
        return original(opened, windows, length)

    monkeypatch.setattr(shards, "read_windows", noting)
    batches, hashes = {}, set()
    for name in ("learned", "binary16", "gf2"):
        changes = dict(data=data, out_dir=str(tmp_path / name), input_layer=name, eval_interval=8)
        run(Config(**TINY | changes))
        batches[name], seen[:] = list(seen), []
        step = newest(tmp_path / name)
        hashes.add(shards.read_json(step / "state.json")["backbone_hash"])
        assert ("input.weight" in load_file(step / "model.safetensors")) == (name == "learned")
    assert batches["learned"] == batches["binary16"] == batches["gf2"]
    assert len(hashes) == 1
    # Eight updates of two micro-steps of two windows, then the seven to validate.
    windows = [window for batch in batches["learned"] for window in batch]
    assert windows[32:] == list(range(7))
    epochs = [windows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_exactly_so_many_updates_then_save_then_validation(data, tmp_path, monkeypatch):
    events = []

    def noting(word, function):
        return lambda *given, **named: (events.append(word), function(*given, **named))[1]

    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", noting("step", step))
    monkeypatch.setattr(train, "save_checkpoint", noting("save", train.save_checkpoint))
    monkeypatch.setattr(shards, "held_out_sum", noting("validate", shards.held_out_sum))
    changes = dict(data=data, out_dir=str(tmp_path / "run"), max_updates=5)
    run(Config(**TINY | changes))
    assert events == [*["step"] * 3, "save", "step", "validate", "step", "save", "validate"]


def test_metrics_hold_the_schedule_the_targets_and_the_validation(undisturbed):
    text = Path(undisturbed.out_dir, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    training = [m for m in lines if "loss" in m]
    validation = [m for m in lines if "val_loss" in m]
    assert [m["update"] for m in training] == list(range(1, 9))
    assert [m["lr"] for m in training] == [learning_rate(undisturbed, u) for u in range(8)]
    keys = {"update", "targets", "loss", "lr", "grad_norm", "targets_per_s", "mfu"}
    assert all(m.keys() == keys and m["targets"] == 64 * m["update"] for m in training)
    assert [m["update"] for m in validation] == [4, 8]
    val = shards.open_shards(undisturbed.data, "val")
    model = train.load_checkpoint(undisturbed.out_dir)
    ids, targets = shards.read_windows(val, range(7), LENGTH)
    with torch.no_grad():
        nats = model.losses(ids, targets).double().mean().item()
    assert validation[-1]["val_loss"] == pytest.approx(nats, rel=1e-6)
    # 118 held-out tokens stand for 354 bytes.
    assert validation[-1]["bits_per_byte"] == pytest.approx(nats / math.log(2) / 3, rel=1e-6)
    assert Path(undisturbed.out_dir, "loss.png").read_bytes().startswith(b"\x89PNG")


def test_three_updates_equal_adamw_written_out(data, tmp_path):
    changes = dict(data=data, out_dir=str(tmp_path / "run"), max_updates=3, grad_clip=0.5)
    config = Config(**TINY | changes | dict(weight_decay=0.3, beta1=0.8, beta2=0.9))
    run(config)
    model, opened = Transformer(config).double(), shards.open_shards(data, "train")
    means = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for update in range(3):
        lr = learning_rate(config, update)
        windows = shards.update_windows(10, 4, config.seed, update)
        model.zero_grad()
        model(*shards.read_windows(opened, windows, LENGTH))[1].backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        assert norm > 0.5  # so that the clip is at work
        with torch.no_grad():
            for p, (mean, square) in means.items():
                gradient = p.grad * 0.5 / norm
                mean.mul_(0.8).add_(0.2 * gradient)
                square.mul_(0.9).add_(0.1 * gradient**2)
                step = mean / (1 - 0.8 ** (update + 1))
                step /= (square / (1 - 0.9 ** (update + 1))).sqrt() + 1e-8
                p -= lr * (step + (0.3 * p if p.dim() == 2 else 0))
    saved = load_file(newest(config.out_dir) / "model.safetensors")
    for name, parameter in model.named_parameters():
        # Adam divides a gradient by itself, so that where it is near 0 its rounding shows.
        error = (saved[name] - parameter).norm() / parameter.norm()
        assert error < 1e-4, (name, error.item())


def test_optimizer_decays_matrices_only(undisturbed):
    model = Transformer(undisturbed)
    optimizer = train.make_optimizer(model, undisturbed)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in plain["params"])
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in groups} == {id(p) for p in model.parameters()}
    assert len(groups) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8


def test_bfloat16_keeps_weights_and_moments_in_float32(data, tmp_path, monkeypatch):
    dtypes, original = set(), Transformer.forward

    def noting(model, *given):
        products = [model.blocks[0].attention.q_proj, model.blocks[-1].mlp.down_proj]
        hooks = [part.register_forward_hook(lambda m, i, out: dtypes.add(out.dtype))
                 for part in products]  # fmt: skip
        result = original(model, *given)
        dtypes.update(part.dtype for part in model.head_inputs(given[0]))
        for hook in hooks:
            hook.remove()
        return result

    monkeypatch.setattr(Transformer, "forward", noting)
    changes = dict(data=data, out_dir=str(tmp_path / "run"), dtype="bfloat16", max_updates=2)
    run(Config(**TINY | changes))
    assert dtypes == {torch.bfloat16}
    tensors = state_of(newest(tmp_path / "run"))
    tensors.pop("groups")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    moments = [name for name in tensors if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert len(moments) == 2 * len([name for name in tensors if name.startswith("weight ")])


def test_compiled_training_saves_the_raw_names(data, undisturbed, tmp_path, monkeypatch):
    compiled, original = [], torch.compile

    def compile_eagerly(model, **options):
        compiled.append(model)
        return original(model, backend="eager", **options)  # needs no compiler

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    changes = dict(data=data, out_dir=str(tmp_path / "run"), compile=True)
    config = Config(**TINY | changes)
    run(config)
    assert [type(model) for model in compiled] == [Transformer]
    saved = load_file(newest(config.out_dir) / "model.safetensors")
    assert saved.keys() == {name for name, _ in Transformer(config).named_parameters()}
    assert losses_of(config.out_dir) == pytest.approx(losses_of(undisturbed.out_dir), rel=1e-5)


def test_checkpointed_activations_change_no_number(undisturbed, tmp_path):
    changes = dict(out_dir=str(tmp_path / "run"), checkpoint_activations=True)
    config = dataclasses.replace(undisturbed, **changes)
    run(config)
    assert_like_undisturbed(config, undisturbed)


# ---------------------------------------------------------------- checkpoints


def test_what_a_checkpoint_holds(undisturbed):
    step = newest(undisturbed.out_dir)
    names = ["config.json", "model.safetensors", "state.json", "training_state.pt"]
    assert sorted(path.name for path in step.iterdir()) == names
    weights = load_file(step / "model.safetensors")
    assert weights.keys() == Transformer(undisturbed).state_dict().keys()
    assert shards.read_json(step / "config.json") == dataclasses.asdict(undisturbed)
    assert shards.read_json(step.parent / "config.json") == dataclasses.asdict(undisturbed)
    tokenizer = Path(undisturbed.data) / "tokenizer.json"
    assert (step.parent / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    state = shards.read_json(step / "state.json")
    sums = state.pop("sha256")
    assert state == dict(
        update=8,
        targets=512,
        backbone_hash=Transformer(undisturbed).backbone_hash(),
        tokenizer_sha256=shards.sha256(tokenizer),
        data_sha256=shards.sha256(Path(undisturbed.data) / "meta.json"),
        torch=torch.__version__,
    )
    assert sums == {name: shards.sha256(step / name) for name in names if name != "state.json"}


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (9, [2, 4, 5]), (-1, [2, 4, 5])])
def test_newest_checkpoints_are_kept(keep, kept, data, tmp_path):
    changes = dict(data=data, out_dir=str(tmp_path / "run"), keep_checkpoints=keep)
    run(Config(**TINY | dict(max_updates=5, save_interval=2) | changes))
    assert steps_of(tmp_path / "run") == kept
    assert not list((tmp_path / "run").glob("*.partial"))


def test_leftovers_of_a_kill_do_no_harm(stopped, undisturbed, capsys):
    out = Path(stopped.out_dir)
    for name in ("step_00000003", "step_00000007", "step_00000008"):
        folder = out / (name + ".partial")
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
    (out / "metrics.jsonl.partial").write_bytes(b"{")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"update": 7, "loss": 9.9, "targets": 448}\n{"update": 7, "lo')
    run(stopped, resume=True)
    assert "after step_00000006" in capsys.readouterr().out
    assert_like_undisturbed(stopped, undisturbed)


def test_resume_with_nothing_whole_begins(undisturbed, tmp_path, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "step_00000003.partial").mkdir(parents=True)
    run(config, resume=True)
    assert "from the start" in capsys.readouterr().out
    assert_like_undisturbed(config, undisturbed)


def train_on_a_full_disk(config, size):
    """No file can grow beyond `size` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train.main([*as_options(config), "--resume"])


@pytest.mark.parametrize("size", [50_000, 200_000], ids=["weights", "optimizer"])
def test_full_disk_leaves_nothing_that_looks_whole(size, stopped, undisturbed, tmp_path):
    step = newest(stopped.out_dir)
    sizes = [(step / name).stat().st_size for name in ("model.safetensors", "training_state.pt")]
    assert 50_000 < sizes[0] < 200_000 < sizes[1]
    ended, _ = run_ranks(1, tmp_path, train_on_a_full_disk, stopped, size)
    assert ended[0] not in (0, None)
    assert steps_of(stopped.out_dir) == [3, 6]
    run(stopped, resume=True)
    assert_like_undisturbed(stopped, undisturbed)


# ---------------------------------------------------------------- stops and resumes


# Epoch 2 begins in the middle of the third update, epoch 3 with the sixth.
STOPS = [(1,), (3,), (4,), (5,), (6,), (7,), (2, 5), (1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_resume_equals_no_stop(stops, undisturbed, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    for number, stop in enumerate(stops):
        with monkeypatch.context() as patch:
            stop_during(patch, stop - 1)
            run(config, resume=number > 0)
        assert f"stopped after update {stop}" in capsys.readouterr().out
        assert steps_of(config.out_dir)[-1] == stop
    run(config, resume=True)
    assert_like_undisturbed(config, undisturbed)


@pytest.mark.parametrize("name", ["binary16", "gf2"])
def test_resume_equals_no_stop_with_fixed_codes(name, data, tmp_path, monkeypatch):
    whole = Config(**TINY, data=data, input_layer=name, out_dir=str(tmp_path / "whole"))
    config = dataclasses.replace(whole, out_dir=str(tmp_path / "run"))
    run(whole)
    with monkeypatch.context() as patch:
        stop_during(patch, 3)
        run(config)
    run(config, resume=True)
    assert_like_undisturbed(config, whole)


@pytest.mark.parametrize(
    ("place", "name", "after"),
    [(train, "save_file", 4), (shards, "held_out_sum", 5), (train, "draw_losses", 5)],
)
def test_stop_in_a_save_or_a_validation(
    place, name, after, undisturbed, tmp_path, monkeypatch, capsys
):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    original = getattr(place, name)

    sent = []

    def interrupted(*given):
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        run(config)
    assert f"stopped after update {after}" in capsys.readouterr().out
    run(config, resume=True)
    assert_like_undisturbed(config, undisturbed)


def test_sigterm_to_the_command_saves_and_exits_0(data, tmp_path, monkeypatch):
    changes = dict(data=data, max_updates=1_000_000, out_dir=str(tmp_path / "run"))
    config = Config(**TINY | changes)
    running = subprocess.Popen(
        [sys.executable, "-u", "train.py", *as_options(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in running.stdout:
        if line.startswith("update 3/"):
            running.send_signal(signal.SIGTERM)
            break
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0 and errors == ""
    found = re.search(r"stopped after update (\d+) as asked; .*--resume.*\n$", output)
    last = int(found[1])
    assert steps_of(config.out_dir)[-1] == last
    undisturbed = dataclasses.replace(config, out_dir=str(tmp_path / "undisturbed"))
    for one, resume in ((config, True), (undisturbed, False)):
        with monkeypatch.context() as patch:
            stop_during(patch, last + 1)
            run(one, resume)
    assert steps_of(config.out_dir)[-1] == last + 2
    assert_same(state_of(newest(config.out_dir)), state_of(newest(undisturbed.out_dir)))
    assert metrics_of(config.out_dir) == metrics_of(undisturbed.out_dir)


def test_kills_at_any_moment_lose_nothing(data, tmp_path):
    changes = dict(data=data, max_updates=30, save_interval=2, eval_interval=100)
    config = Config(**TINY | changes | dict(out_dir=str(tmp_path / "killed")))
    whole = dataclasses.replace(config, save_interval=100, out_dir=str(tmp_path / "whole"))
    run(whole)
    metrics = Path(config.out_dir) / "metrics.jsonl"
    for update in (3, 7, 12):
        running = processes.Process(target=train.train, args=(config, True))
        running.start()
        end = time.monotonic() + 60
        while not (metrics.exists() and f'"update": {update},' in metrics.read_text()):
            assert running.is_alive() and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        running.kill()
        running.join()
        assert running.exitcode == -signal.SIGKILL
    run(config, resume=True)
    assert_same(state_of(newest(config.out_dir)), state_of(newest(whole.out_dir)))
    assert metrics_of(config.out_dir) == metrics_of(whole.out_dir)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def wrong_update(path):
    path.write_text(path.read_text().replace('"update": 6', '"update": 4'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", shorten),
        ("model.safetensors", flip),
        ("training_state.pt", truncate),
        ("training_state.pt", shorten),
        ("training_state.pt", flip),
        ("training_state.pt", Path.unlink),
        ("config.json", flip),
        ("state.json", truncate),
        ("state.json", wrong_update),
        ("state.json", Path.unlink),
    ],
)
def test_damaged_newest_checkpoint_is_passed_over(name, damage, stopped, undisturbed, capsys):
    damage(newest(stopped.out_dir) / name)
    run(stopped, resume=True)
    said = capsys.readouterr().out
    assert re.search("passing over .*step_00000006", said) and "after step_00000003" in said
    assert_like_undisturbed(stopped, undisturbed)
    assert steps_of(stopped.out_dir) == [6, 8]


def test_step_without_weights_is_in_nobodys_way(stopped, undisturbed, capsys):
    (newest(stopped.out_dir) / "model.safetensors").unlink()
    run(stopped, resume=True)
    assert "after step_00000003" in capsys.readouterr().out
    assert_like_undisturbed(stopped, undisturbed)
    assert steps_of(stopped.out_dir) == [6, 8]


def test_damaged_checkpoint_crowds_out_no_whole_one(stopped, undisturbed, monkeypatch, capsys):
    flip(newest(stopped.out_dir) / "model.safetensors")
    config = dataclasses.replace(stopped, keep_checkpoints=1)
    with monkeypatch.context() as patch:
        stop_during(patch, 3)
        run(config, resume=True)
    capsys.readouterr()
    run(config, resume=True)
    assert "after step_00000004" in capsys.readouterr().out
    assert_like_undisturbed(config, undisturbed)


def test_all_checkpoints_damaged_begins_anew(stopped, undisturbed, capsys):
    for step in step_folders(stopped.out_dir):
        flip(step / "training_state.pt")
    run(stopped, resume=True)
    said = capsys.readouterr().out
    assert said.count("passing over") == 2 and "from the start" in said
    assert_like_undisturbed(stopped, undisturbed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
states = st.dictionaries(st.sampled_from(["sha256", "update"]), json_values) | json_values


@settings(max_examples=50, deadline=None)
@example(b'{"update": 8, "sha256": {}}')
@example(b'{"update": 8, "sha256": []}')
@given(st.binary() | states.map(lambda value: json.dumps(value).encode()))
def test_no_state_from_elsewhere_is_taken_for_whole(undisturbed, tmp_path_factory, state):
    out = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(undisturbed.out_dir, out)
    (newest(out) / "state.json").write_bytes(state)
    config = dataclasses.replace(undisturbed, out_dir=str(out))
    tokenizer = shards.sha256(out / "tokenizer.json")
    with contextlib.redirect_stdout(None):
        assert train.step_to_resume(config, tokenizer, True).name == "step_00000006"


# ---------------------------------------------------------------- what is refused, and what goes on


def test_finished_run_says_so(undisturbed, capsys):
    before = state_of(newest(undisturbed.out_dir)), metrics_of(undisturbed.out_dir)
    train.main([*as_options(undisturbed), "--resume"])
    assert f"{undisturbed.out_dir} is finished after 8 updates\n" in capsys.readouterr().out
    after = state_of(newest(undisturbed.out_dir)), metrics_of(undisturbed.out_dir)
    assert_same(before[0], after[0])
    assert before[1] == after[1]


def test_run_is_not_overwritten(undisturbed, capsys):
    error = refused(capsys, *as_options(undisturbed))
    assert undisturbed.out_dir in error and "--resume" in error


def test_two_at_once_in_one_folder_are_refused(undisturbed, tmp_path, capsys):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    with device_module.hold(tmp_path / "run"):
        with pytest.raises(SystemExit) as ended:
            train.main(as_options(config))
    assert ended.value.code == 2
    assert "another run is at work" in capsys.readouterr().err
    run(config)  # the lock went with the file, and with the run that was refused


@pytest.mark.parametrize(
    "changes",
    [dict(lr=2e-2), dict(seed=1, max_updates=9), dict(input_layer="gf2"), dict(dtype="bfloat16"),
     dict(targets_per_update=128, init_seed=1, eval_windows=3)],
    ids=str,
)  # fmt: skip
def test_changed_config_is_refused_by_name(changes, stopped, capsys):
    config = dataclasses.replace(stopped, **changes)
    error = refused(capsys, *as_options(config), "--resume")
    assert stopped.out_dir in error
    named = set(re.findall(r"\w+", error.replace(stopped.out_dir, "")))
    assert named & {field.name for field in dataclasses.fields(Config)} == changes.keys()


def test_free_fields_may_change_on_the_way(stopped, undisturbed, tmp_path):
    shutil.copytree(stopped.data, tmp_path / "moved")
    changes = dict(
        data=str(tmp_path / "moved"),
        micro_batch=4,
        eval_interval=2,
        save_interval=1,
        log_interval=2,
        keep_checkpoints=-1,
        checkpoint_activations=True,
    )
    config = dataclasses.replace(stopped, **changes)
    run(config, resume=True)
    assert steps_of(config.out_dir) == [3, 6, 7, 8]
    one, other = state_of(newest(config.out_dir)), state_of(newest(undisturbed.out_dir))
    for name in one:
        if name.startswith("weight "):
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


def test_run_folder_may_be_moved(stopped, undisturbed, tmp_path):
    Path(stopped.out_dir).rename(tmp_path / "moved")
    config = dataclasses.replace(stopped, out_dir=str(tmp_path / "moved"))
    run(config, resume=True)
    assert_like_undisturbed(config, undisturbed)


def test_a_step_of_another_run_is_set_aside(stopped, undisturbed, tmp_path, capsys):
    other = dataclasses.replace(stopped, lr=0.5, max_updates=7, out_dir=str(tmp_path / "other"))
    run(other)
    newest(other.out_dir).rename(Path(stopped.out_dir) / "step_00000007")
    run(stopped, resume=True)
    assert "passing over" in capsys.readouterr().out
    assert_like_undisturbed(stopped, undisturbed)


def test_a_run_without_its_config_is_not_overwritten(stopped, capsys):
    (Path(stopped.out_dir) / "config.json").unlink()
    before = steps_of(stopped.out_dir)
    assert "holds a run" in refused(capsys, *as_options(dataclasses.replace(stopped, lr=0.5)))
    assert steps_of(stopped.out_dir) == before


def test_a_step_without_its_weights_is_named(stopped, undisturbed, capsys):
    (newest(stopped.out_dir) / "model.safetensors").unlink()
    run(stopped, resume=True)
    assert "step_00000006: its files are not as they were saved" in capsys.readouterr().out
    assert_like_undisturbed(stopped, undisturbed)


@pytest.mark.parametrize(
    "changes", [dict(beta1=1.0), dict(input_layer="gf2", code_matrix="12"), dict(code_offset=1)]
)
def test_what_cannot_be_built_leaves_no_run_folder(changes, data, tmp_path, capsys):
    changes = dict(input_layer="binary16") | changes | dict(data=data)
    config = Config(**TINY | changes | dict(out_dir=str(tmp_path / "run")))
    refused(capsys, *as_options(config))
    assert not (tmp_path / "run").exists()


def test_metrics_that_are_damaged_do_not_end_a_run(stopped, undisturbed):
    with open(Path(stopped.out_dir) / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\x00\n[1]\n{"update": "3"}\n\n{"loss": 3}\n')
    run(stopped, resume=True)
    assert_like_undisturbed(stopped, undisturbed)


def test_other_data_is_refused(stopped, tmp_path, capsys):
    other = make_data(tmp_path / "other", 12)
    assert "is other data than" in refused(
        capsys, *as_options(dataclasses.replace(stopped, data=str(other))), "--resume"
    )


def test_another_tokenizer_is_refused(stopped, tmp_path, capsys):
    other = make_data(tmp_path / "other", 10, tokenizer='{"another": 1}')
    config = dataclasses.replace(stopped, data=str(other))
    assert "tokenizer" in refused(capsys, *as_options(config), "--resume")


@pytest.mark.parametrize("name", ["learned", "binary16", "gf2"])
def test_vocabulary_beyond_the_models_is_refused(name, tmp_path, capsys):
    wide = make_data(tmp_path / "wide", 10, vocab_size=65)
    changes = dict(data=str(wide), out_dir=str(tmp_path / "run"), input_layer=name)
    error = refused(capsys, *as_options(Config(**TINY | changes)))
    assert "65" in error and "64" in error and "--vocab_size=65" in error
    assert not (tmp_path / "run").exists()


def test_model_may_have_room_for_more_ids(tmp_path):
    narrow = make_data(tmp_path / "narrow", 10, vocab_size=64)
    changes = dict(data=str(narrow), out_dir=str(tmp_path / "run"), vocab_size=80, max_updates=1)
    run(Config(**TINY | changes))
    assert steps_of(tmp_path / "run")[-1] == 1


def test_missing_short_and_unwritable_folders_are_refused(data, tmp_path, capsys):
    config = Config(**TINY, data=data, out_dir=str(tmp_path / "run"))
    nowhere = dataclasses.replace(config, data=str(tmp_path / "nowhere"))
    assert "nowhere" in refused(capsys, *as_options(nowhere))
    changes = dict(max_seq_len=256, targets_per_update=256, micro_batch=1)
    long = dataclasses.replace(config, **changes)
    assert "256" in refused(capsys, *as_options(long))
    assert "device" in refused(capsys, *as_options(dataclasses.replace(config, device="abacus")))
    assert "float16" in refused(capsys, *as_options(dataclasses.replace(config, dtype="float16")))
    uneven = dataclasses.replace(config, micro_batch=3)
    assert "micro_batch 3" in refused(capsys, *as_options(uneven))
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("not a folder")
    blocked = dataclasses.replace(config, out_dir=str(tmp_path / "file" / "run"))
    assert "file" in refused(capsys, *as_options(blocked))


def test_data_shorter_than_an_update_is_gone_through_again(tmp_path):
    short = make_data(tmp_path / "short", 3)
    changes = dict(data=str(short), out_dir=str(tmp_path / "run"), max_updates=2)
    run(Config(**TINY | changes))
    assert len(losses_of(tmp_path / "run")) == 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_weight_stops_before_the_step(value, stopped, monkeypatch, capsys):
    step, load = newest(stopped.out_dir), train.load_checkpoint

    def poisoned(path):
        model = load(path)
        model.blocks[1].mlp.up_proj.weight.data[3, 5] = value
        return model

    monkeypatch.setattr(train, "load_checkpoint", poisoned)
    before = {path: shards.sha256(path) for path in step.iterdir()}
    error = refused(capsys, *as_options(stopped), "--resume")
    assert "update 7 " in error and stopped.out_dir in error
    assert newest(stopped.out_dir) == step
    assert {path: shards.sha256(path) for path in step.iterdir()} == before


def test_nonfinite_gradient_stops_before_the_step(stopped, monkeypatch, capsys):
    steps, original, step = [], train.accumulate_gradients, torch.optim.AdamW.step

    def exploding(model, *given):
        loss = original(model, *given)
        if given[2] == 7:
            next(model.parameters()).grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(train, "accumulate_gradients", exploding)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *given: (steps.append(1), step(*given))[1]
    )
    assert "update 8 " in refused(capsys, *as_options(stopped), "--resume")
    assert len(steps) == 1 and steps_of(stopped.out_dir)[-1] == 6


def test_raise_in_a_validation_loses_no_weights(data, undisturbed, tmp_path, monkeypatch):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"), save_interval=4)

    def failing(*given):
        raise RuntimeError("the validation failed")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "held_out_sum", failing)
        with pytest.raises(RuntimeError, match="the validation failed"):
            run(config)
    assert steps_of(config.out_dir)[-1] == 4
    config = dataclasses.replace(config, save_interval=3)
    run(config, resume=True)
    assert_same(state_of(newest(config.out_dir)), state_of(newest(undisturbed.out_dir)))


def test_last_validation_that_was_cut_off_is_made_by_a_resume(undisturbed, tmp_path, monkeypatch):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"), eval_interval=100)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "held_out_sum", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(config)
    assert steps_of(config.out_dir)[-1] == 8
    run(config, resume=True)
    assert metrics_of(config.out_dir)[-1] == metrics_of(undisturbed.out_dir)[-1]


def test_local_rank_picks_the_device(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(ValueError, match="no device cuda:99; .* no more processes than GPUs"):
        device_module.pick_device("cuda")
    assert device_module.pick_device("cpu") == torch.device("cpu")


# ---------------------------------------------------------------- several ranks


def as_rank(rank, world, port, log, function, *given):
    """In a process of its own: be one rank of torchrun, with what it says in files."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for number, name in ((1, log + ".out"), (2, log)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    torch.set_num_threads(1)
    try:
        function(*given)
    finally:
        if dist.is_initialized():
            print("the process group was not destroyed", file=sys.stderr)


def run_ranks(world, folder, function, *given):
    """Run function(*given) in so many ranks to their end; returns exit statuses and stderrs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = [folder / f"rank_{rank}_of_{world}" for rank in range(world)]
    ranks = [
        processes.Process(target=as_rank, args=(rank, world, port, str(log), function, *given))
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    ended = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return ended, [log.read_text() for log in logs]


def gradients_of(config, micro_batches, folder):
    """One update's gradients and mean loss for each micro-batch, saved by rank 0."""
    rank, world = device_module.join_ranks(torch.device("cpu"))
    opened, found = shards.open_shards(config.data, "train"), {}
    for size in micro_batches:
        raw = model = Transformer(config)
        sized, passes, exchanges = dataclasses.replace(config, micro_batch=size), [], []
        raw.register_forward_pre_hook(lambda *given, passes=passes: passes.append(1))
        if world > 1:
            model = DistributedDataParallel(raw)

            def exchange(_, bucket, passes=passes, exchanges=exchanges):
                exchanges.append(len(passes))
                work = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
                return work.then(lambda done: done.value()[0])

            model.register_comm_hook(None, exchange)
        loss = train.accumulate_gradients(
            model, opened, sized, 0, rank, world, contextlib.nullcontext
        )
        assert len(passes) == micro_steps(sized, world)
        if world > 1:  # every exchange after the last forward pass
            assert set(exchanges) == {len(passes)}, exchanges
            dist.all_reduce(loss)
        found[size] = {name: p.grad for name, p in raw.named_parameters()} | {"loss": loss / world}
    if rank == 0:
        torch.save(found, folder / f"gradients_{world}")
    if dist.is_initialized():
        dist.destroy_process_group()


def test_gradients_do_not_depend_on_ranks_and_micro_batch(more_data, tmp_path):
    # 48 sequences: with micro_batch 6, one rank makes 8 micro-steps and two make 4.
    changes = dict(data=more_data, targets_per_update=48 * LENGTH, micro_batch=48)
    config, sizes = Config(**TINY | changes), (1, 2, 4, 6, 8)
    gradients_of(config, (48, *sizes), tmp_path)
    for world in (2, 3):
        divisors = [size for size in sizes if 48 % (size * world) == 0]
        ended, errors = run_ranks(world, tmp_path, gradients_of, config, divisors, tmp_path)
        assert ended == [0] * world, errors
    results = {world: torch.load(tmp_path / f"gradients_{world}") for world in (1, 2, 3)}
    whole = results[1][48]
    compared = 0
    for world, by_size in results.items():
        for size, found in by_size.items():
            for name, value in found.items():
                error = (value - whole[name]).norm() / whole[name].norm()
                assert error < 1e-5, (world, size, name, error.item())
                compared += 1
    assert {world: list(by_size) for world, by_size in results.items()} == {
        1: [48, 1, 2, 4, 6, 8],
        2: [1, 2, 4, 6, 8],
        3: [1, 2, 4, 8],
    }
    assert compared == 15 * len(whole)


def train_and_leave(config, resume=False, stop=None):
    """Train as a rank does; `stop` is (rank, update) that gets a SIGTERM, update from 0."""
    if stop is not None and stop[0] == int(os.environ["RANK"]):
        stop_during(pytest.MonkeyPatch(), stop[1])
    train.main([*as_options(config), *["--resume"] * resume])


def test_three_ranks_give_the_losses_of_one(more_data, tmp_path):
    changes = dict(data=more_data, targets_per_update=12 * LENGTH, max_updates=20, lr=1e-3)
    one = Config(**TINY | changes | dict(out_dir=str(tmp_path / "one")))
    three = dataclasses.replace(one, out_dir=str(tmp_path / "three"), eval_interval=5)
    run(one)
    ended, errors = run_ranks(3, tmp_path, train_and_leave, three)
    assert ended == [0] * 3 and errors == [""] * 3
    assert losses_of(three.out_dir) == pytest.approx(losses_of(one.out_dir), rel=1e-4)
    last = [metrics_of(config.out_dir)[-1]["val_loss"] for config in (one, three)]
    assert last[0] == pytest.approx(last[1], rel=1e-4)  # 7 windows over 3 ranks


def test_sigterm_to_one_rank_stops_all_and_one_rank_goes_on(undisturbed, tmp_path):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    ended, errors = run_ranks(2, tmp_path, train_and_leave, config, False, (1, 4))
    assert ended == [0, 0] and errors == ["", ""]
    assert "stopped after update 5" in (tmp_path / "rank_0_of_2.out").read_text()
    assert (tmp_path / "rank_1_of_2.out").read_text() == ""
    assert steps_of(config.out_dir)[-1] == 5
    run(config, resume=True)
    found = losses_of(config.out_dir)
    assert found == pytest.approx(losses_of(undisturbed.out_dir), rel=1e-4)


def fail_on_rank_1(config):
    original = shards.read_windows

    def failing(opened, windows, length):
        if os.environ["RANK"] == "1":
            raise ValueError("rank 1 cannot read its windows; mend the disk")
        return original(opened, windows, length)

    shards.read_windows = failing
    train.main(as_options(config))


def test_rank_that_raises_ends_all(undisturbed, tmp_path):
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    ended, errors = run_ranks(2, tmp_path, fail_on_rank_1, config)
    assert ended[1] == 2 and ended[0] not in (0, None)
    assert errors[1] == "train.py: rank 1 cannot read its windows; mend the disk\n"
    assert "was not destroyed" not in errors[0]


def fail_to_save(config):
    def full(state, path):
        raise SafetensorError("No space left on device (os error 28)")

    train.save_file = full
    train.main(as_options(config))


def test_what_rank_0_refuses_all_ranks_refuse_in_its_words(undisturbed, tmp_path):
    ended, errors = run_ranks(2, tmp_path, train_and_leave, undisturbed)
    assert ended == [2, 2]
    assert errors == [f"train.py: {undisturbed.out_dir} holds a run; go on with --resume or "
                      "choose another --out_dir\n"] * 2  # fmt: skip
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    ended, errors = run_ranks(2, tmp_path, fail_to_save, config)
    assert ended == [2, 2] and errors[0] == errors[1]
    assert errors[0].startswith(f"train.py: {config.out_dir}/step_00000003 cannot be written")
    assert errors[0].count("\n") == 1 and steps_of(config.out_dir) == []


def test_torchrun_gives_the_losses_of_one_process(more_data, tmp_path):
    changes = dict(data=more_data, targets_per_update=8 * LENGTH, max_updates=20, lr=1e-3)
    one = Config(**TINY | changes | dict(out_dir=str(tmp_path / "one"), input_layer="gf2"))
    two = dataclasses.replace(one, out_dir=str(tmp_path / "two"))
    run(one)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run(
        [sys.executable, *launch, *as_options(two)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update 20/20 ") == 1  # rank 0 alone speaks
    assert "2 ranks x 2 micro-steps x 2 sequences x 16" in done.stdout
    assert "destroy_process_group" not in done.stderr and "Warning" not in done.stderr
    assert losses_of(two.out_dir) == pytest.approx(losses_of(one.out_dir), rel=1e-4)
    assert len(losses_of(two.out_dir)) == 20
