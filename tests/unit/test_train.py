"""What an update and a run are. Run with: python -m pytest tests/unit/test_train.py"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY_RUN, read_state
from safetensors.torch import load_file
from training import LENGTH, assert_same_run, losses_of, newest, run, steps_of, write_windows

import train
from model import Transformer, load_checkpoint
from nanocodes import held_out
from nanocodes.batches import read_windows, update_windows
from nanocodes.checkpoint import backbone_hash
from nanocodes.files import read_json, sha256
from nanocodes.shards import open_shards
from train import Config, learning_rate, micro_steps


def test_schedule_at_its_corners():
    config = Config()
    assert learning_rate(config, 0) == 1.5e-4 / 2000
    assert learning_rate(config, 999) == 1.5e-4 / 2
    assert learning_rate(config, 1999) == learning_rate(config, 2000) == 1.5e-4
    middle = (2000 + 381_469) / 2
    assert learning_rate(config, middle) == pytest.approx((1.5e-4 + 1.5e-5) / 2, rel=1e-9)
    assert learning_rate(config, 381_469) == 1.5e-5


def test_schedule_rises_then_falls():
    config = Config(**TINY_RUN | dict(max_updates=1000, warmup_updates=100))
    rates = [learning_rate(config, update) for update in range(1000)]
    assert all(a < b for a, b in zip(rates[:100], rates[1:100], strict=False))
    assert all(a > b for a, b in zip(rates[100:], rates[101:], strict=False))
    assert min(rates[100:]) == rates[-1] == 1e-3
    assert max(rates) == pytest.approx(1e-2, rel=1e-12)
    assert learning_rate(Config(**TINY_RUN | dict(warmup_updates=0)), 0) == pytest.approx(1e-2)


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


def test_dry_run_prints_the_papers_numbers_without_data(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    train.main([str(ROOT / "configs/learned.py"), "--dry_run"])
    learned = capsys.readouterr().out
    for number in (
        "1,812,039,680",
        "100,663,296",
        "262,144",
        "381,470",
        "100,000,071,680",
        "48,828,160",
    ):
        assert number in learned
    assert "2 ranks x 8 micro-steps x 8 sequences x 2048" in learned
    for name in ("binary16", "gf2"):
        train.main([str(ROOT / f"configs/{name}.py"), "--dry_run"])
        assert "1,711,376,384" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_recorded_loss_is_the_mean_over_the_batch_whatever_the_micro_batch(data, tmp_path):
    losses = {}
    for size in (1, 2, 4):
        changes = dict(micro_batch=size, max_updates=3, out_dir=str(tmp_path / str(size)))
        config = Config(**TINY_RUN | dict(data=data) | changes)
        run(config)
        losses[size] = losses_of(config.out_dir)
    opened = open_shards(data, "train")
    windows = update_windows(10, 4, config.seed, 0)
    ids, targets = read_windows(opened, windows, LENGTH)
    whole = Transformer(config).losses(ids, targets).mean().item()
    assert losses[4][1] == pytest.approx(whole, rel=1e-6)
    for size in (1, 2):
        assert losses[size] == pytest.approx(losses[4], rel=1e-5)
        assert len(losses[size]) == 3


def test_three_interfaces_train_through_the_same_batches(data, tmp_path, monkeypatch):
    seen = []

    def noting(opened, windows, length):
        seen.append(windows)
        return read_windows(opened, windows, length)

    monkeypatch.setattr(train, "read_windows", noting)
    monkeypatch.setattr(held_out, "read_windows", noting)
    batches = {}
    hashes = set()
    for name in ("learned", "binary16", "gf2"):
        changes = dict(data=data, out_dir=str(tmp_path / name), input_layer=name, eval_interval=8)
        run(Config(**TINY_RUN | changes))
        batches[name] = list(seen)
        seen.clear()
        step = newest(tmp_path / name)
        hashes.add(read_json(step / "state.json")["backbone_hash"])
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
    monkeypatch.setattr(train, "held_out_sum", noting("validate", train.held_out_sum))
    changes = dict(data=data, out_dir=str(tmp_path / "run"), max_updates=5)
    run(Config(**TINY_RUN | changes))
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
    assert all(0 < m["mfu"] < 1 for m in training)  # also of a model as small as this one
    assert [m["update"] for m in validation] == [4, 8]
    val = open_shards(undisturbed.data, "val")
    model = load_checkpoint(undisturbed.out_dir)
    ids, targets = read_windows(val, range(7), LENGTH)
    with torch.no_grad():
        nats = model.losses(ids, targets).double().mean().item()
    assert validation[-1]["val_loss"] == pytest.approx(nats, rel=1e-6)
    # 118 held-out tokens stand for 354 bytes.
    assert validation[-1]["bits_per_byte"] == pytest.approx(nats / math.log(2) / 3, rel=1e-6)
    assert Path(undisturbed.out_dir, "loss.png").read_bytes().startswith(b"\x89PNG")


def test_three_updates_equal_adamw_written_out(data, tmp_path):
    changes = dict(data=data, out_dir=str(tmp_path / "run"), max_updates=3, grad_clip=0.5)
    config = Config(**TINY_RUN | changes | dict(weight_decay=0.3, beta1=0.8, beta2=0.9))
    run(config)
    model, opened = Transformer(config).double(), open_shards(data, "train")
    means = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for update in range(3):
        lr = learning_rate(config, update)
        windows = update_windows(10, 4, config.seed, update)
        model.zero_grad()
        model(*read_windows(opened, windows, LENGTH))[1].backward()
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
        hooks = [
            part.register_forward_hook(lambda m, i, out: dtypes.add(out.dtype)) for part in products
        ]
        result = original(model, *given)
        dtypes.update(part.dtype for part in model.head_inputs(given[0]))
        for hook in hooks:
            hook.remove()
        return result

    monkeypatch.setattr(Transformer, "forward", noting)
    changes = dict(data=data, out_dir=str(tmp_path / "run"), dtype="bfloat16", max_updates=2)
    run(Config(**TINY_RUN | changes))
    assert dtypes == {torch.bfloat16}
    tensors = read_state(newest(tmp_path / "run"))
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
    config = Config(**TINY_RUN | changes)
    run(config)
    assert [type(model) for model in compiled] == [Transformer]
    saved = load_file(newest(config.out_dir) / "model.safetensors")
    assert saved.keys() == {name for name, _ in Transformer(config).named_parameters()}
    assert losses_of(config.out_dir) == pytest.approx(losses_of(undisturbed.out_dir), rel=1e-5)


def test_checkpointed_activations_change_no_number(undisturbed, tmp_path):
    changes = dict(out_dir=str(tmp_path / "run"), checkpoint_activations=True)
    config = dataclasses.replace(undisturbed, **changes)
    run(config)
    assert_same_run(config, undisturbed)


def test_what_a_checkpoint_holds(undisturbed):
    step = newest(undisturbed.out_dir)
    names = ["config.json", "model.safetensors", "state.json", "training_state.pt"]
    assert sorted(path.name for path in step.iterdir()) == names
    weights = load_file(step / "model.safetensors")
    assert weights.keys() == Transformer(undisturbed).state_dict().keys()
    assert read_json(step / "config.json") == dataclasses.asdict(undisturbed)
    assert read_json(step.parent / "config.json") == dataclasses.asdict(undisturbed)
    tokenizer = Path(undisturbed.data) / "tokenizer.json"
    assert (step.parent / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    state = read_json(step / "state.json")
    sums = state.pop("sha256")
    assert state == dict(
        update=8,
        targets=512,
        backbone_hash=backbone_hash(Transformer(undisturbed)),
        tokenizer_sha256=sha256(tokenizer),
        data_sha256=sha256(Path(undisturbed.data) / "meta.json"),
        torch=torch.__version__,
    )
    assert sums == {name: sha256(step / name) for name in names if name != "state.json"}


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (9, [2, 4, 5]), (-1, [2, 4, 5])])
def test_newest_checkpoints_are_kept(keep, kept, data, tmp_path):
    changes = dict(data=data, out_dir=str(tmp_path / "run"), keep_checkpoints=keep)
    run(Config(**TINY_RUN | dict(max_updates=5, save_interval=2) | changes))
    assert steps_of(tmp_path / "run") == kept
    assert not list((tmp_path / "run").glob("*.partial"))


def test_model_may_have_room_for_more_ids(tmp_path):
    narrow = write_windows(tmp_path / "narrow", 10, vocab_size=64)
    changes = dict(data=str(narrow), out_dir=str(tmp_path / "run"), vocab_size=80, max_updates=1)
    run(Config(**TINY_RUN | changes))
    assert steps_of(tmp_path / "run")[-1] == 1


def test_data_shorter_than_an_update_is_gone_through_again(tmp_path):
    short = write_windows(tmp_path / "short", 3)
    changes = dict(data=str(short), out_dir=str(tmp_path / "run"), max_updates=2)
    run(Config(**TINY_RUN | changes))
    assert len(losses_of(tmp_path / "run")) == 2
