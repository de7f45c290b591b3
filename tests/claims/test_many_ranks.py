"""Any number of ranks makes the same updates.

python -m pytest tests/claims/test_many_ranks.py
"""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from helpers import TINY_RUN, as_options, run_ranks, run_script, timeless_metrics
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel
from training import LENGTH, losses_of, run, steps_of, stop_during

import train
from model import Transformer
from nanocodes import checkpoint
from nanocodes.ranks import join_ranks
from nanocodes.shards import open_shards
from train import Config, micro_steps


def gradients_of(config, micro_batches, folder):
    """One update's gradients and mean loss for each micro-batch, saved by rank 0."""
    rank, world = join_ranks(torch.device("cpu"))
    opened = open_shards(config.data, "train")
    found = {}
    for size in micro_batches:
        raw = model = Transformer(config)
        sized = dataclasses.replace(config, micro_batch=size)
        passes = []
        exchanges = []
        raw.register_forward_pre_hook(lambda *given, passes=passes: passes.append(1))
        if world > 1:
            model = DistributedDataParallel(raw)

            def exchange(_, bucket, passes=passes, exchanges=exchanges):
                exchanges.append(len(passes))
                work = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
                return work.then(lambda done: done.value()[0])

            model.register_comm_hook(None, exchange)
        loss = train.accumulate_gradients(model, opened, sized, 0, rank, world, torch.float32)
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
    config, sizes = Config(**TINY_RUN | changes), (1, 2, 4, 6, 8)
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
    one = Config(**TINY_RUN | changes | dict(out_dir=str(tmp_path / "one")))
    three = dataclasses.replace(one, out_dir=str(tmp_path / "three"), eval_interval=5)
    run(one)
    ended, errors = run_ranks(3, tmp_path, train_and_leave, three)
    assert ended == [0] * 3 and errors == [""] * 3
    assert losses_of(three.out_dir) == pytest.approx(losses_of(one.out_dir), rel=1e-4)
    last = [timeless_metrics(config.out_dir)[-1]["val_loss"] for config in (one, three)]
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
    original = train.read_windows

    def failing(opened, windows, length):
        if os.environ["RANK"] == "1":
            raise ValueError("rank 1 cannot read its windows; mend the disk")
        return original(opened, windows, length)

    train.read_windows = failing
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

    checkpoint.save_file = full
    train.main(as_options(config))


def test_what_rank_0_refuses_all_ranks_refuse_in_its_words(undisturbed, tmp_path):
    ended, errors = run_ranks(2, tmp_path, train_and_leave, undisturbed)
    assert ended == [2, 2]
    assert (
        errors
        == [
            f"train.py: {undisturbed.out_dir} holds a run; go on with --resume or "
            "choose another --out_dir\n"
        ]
        * 2
    )
    config = dataclasses.replace(undisturbed, out_dir=str(tmp_path / "run"))
    ended, errors = run_ranks(2, tmp_path, fail_to_save, config)
    assert ended == [2, 2] and errors[0] == errors[1]
    assert errors[0].startswith(f"train.py: {config.out_dir}/step_00000003 cannot be written")
    assert errors[0].count("\n") == 1 and steps_of(config.out_dir) == []


def test_torchrun_gives_the_losses_of_one_process(more_data, tmp_path):
    changes = dict(data=more_data, targets_per_update=8 * LENGTH, max_updates=20, lr=1e-3)
    one = Config(**TINY_RUN | changes | dict(out_dir=str(tmp_path / "one"), input_layer="gf2"))
    two = dataclasses.replace(one, out_dir=str(tmp_path / "two"))
    run(one)
    done = run_script("train.py", *as_options(two), ranks=2, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update 20/20 ") == 1  # rank 0 alone speaks
    assert "2 ranks x 2 micro-steps x 2 sequences x 16" in done.stdout
    assert "destroy_process_group" not in done.stderr and "Warning" not in done.stderr
    assert losses_of(two.out_dir) == pytest.approx(losses_of(one.out_dir), rel=1e-4)
    assert len(losses_of(two.out_dir)) == 20
