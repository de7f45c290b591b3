"""Train one model: shards -> checkpoints.

    torchrun --nproc_per_node=2 train.py configs/learned.py         the paper's run
    python train.py configs/gf2.py configs/smoke.py --lr=1e-3       later files and options win
    python train.py configs/gf2.py configs/smoke.py --resume        go on where it stopped
    python train.py configs/learned.py --dry_run                    the plan; needs no data

An update is one step of the optimizer. Its targets are dealt out to the ranks, and each rank
goes through its share in micro-steps, one forward and backward pass each.
"""

import math
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import ModelConfig, Transformer, load_checkpoint
from nanocodes.batches import read_windows, update_windows, validation_windows, window_count
from nanocodes.checkpoint import (
    backbone_hash,
    newest_intact_step,
    read_optimizer_state,
    save_checkpoint,
    step_folders,
)
from nanocodes.command import catch_stop, make_parser, refusals
from nanocodes.config import add_options, read_values
from nanocodes.device import autocast, peak_flops, pick_device, pick_dtype
from nanocodes.files import locked, read_json, sha256, write_json
from nanocodes.held_out import bits_per_byte, held_out_sum
from nanocodes.metrics import append_metrics, draw_losses, rewind_metrics
from nanocodes.plan import flops_per_target, parameter_counts, plan
from nanocodes.ranks import from_rank_0, join_ranks
from nanocodes.shards import Shards, open_shards

# ---------------- Config


@dataclass(kw_only=True)
class Config(ModelConfig):
    """The model's fields and the recipe's, by default the paper's or, where it is silent, ours."""

    data: str = "data/fineweb-edu-dedup"  # folder made by prepare.py
    out_dir: str | None = None  # run folder; none means out/<names of the config files>
    seed: int = 1337  # seed of the order of the data
    max_updates: int = 381_470  # optimizer steps; the paper's 100e9 targets
    targets_per_update: int = 262_144  # predictions per update, on all ranks
    micro_batch: int = 8  # sequences per rank in one forward and backward
    lr: float = 1.5e-4  # peak learning rate
    min_lr: float = 1.5e-5  # learning rate of the last update
    warmup_updates: int = 2000  # updates of linear warmup
    weight_decay: float = 0.1  # of matrices; vectors have none
    beta1: float = 0.9  # AdamW's decay of the mean
    beta2: float = 0.95  # AdamW's decay of the mean square
    grad_clip: float = 1.0  # largest norm of the whole gradient
    eval_interval: int = 1000  # updates between validations
    eval_windows: int = 512  # validation windows; 0 means all
    save_interval: int = 1000  # updates between checkpoints
    log_interval: int = 10  # updates between log lines
    keep_checkpoints: int = 2  # newest checkpoints to keep; -1 or 0 means all
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of the matrix products: auto, float32 or bfloat16
    compile: bool = True  # torch.compile the training step
    checkpoint_activations: bool = False  # less memory: recompute blocks going backward


# What a resume may change: speed, reporting and paths, but nothing of what is learned.
MAY_CHANGE = {
    "out_dir",
    "data",
    "micro_batch",
    "eval_interval",
    "save_interval",
    "log_interval",
    "keep_checkpoints",
    "device",
    "compile",
    "checkpoint_activations",
}


def make_config(files, options):
    """Lay config files, left to right, then options {key: text} over the defaults."""
    values = read_values(Config, files, options)
    if not values.get("out_dir"):
        names = [Path(path).stem for path in files] or [str(values.get("input_layer", "learned"))]
        values["out_dir"] = "out/" + "-".join(names)
    return Config(**values)


# ---------------- The recipe


def micro_steps(config, world):
    """How many forward and backward passes each rank makes for one update."""
    targets = config.micro_batch * config.max_seq_len * world  # of one micro-step on all ranks
    if config.targets_per_update % targets:
        raise ValueError(
            f"targets_per_update {config.targets_per_update} is no multiple of {targets} = "
            f"micro_batch {config.micro_batch} x max_seq_len {config.max_seq_len} x {world} ranks; "
            "change micro_batch or the number of ranks"
        )
    return config.targets_per_update // targets


def learning_rate(config, update):
    """Linear warmup, then a cosine that is min_lr at the last update. `update` counts from 0."""
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    last = config.max_updates - 1
    left = (last - update) / max(1, last - config.warmup_updates)  # from 1 down to 0
    return config.min_lr + (config.lr - config.min_lr) * (1 - math.cos(math.pi * left)) / 2


def make_optimizer(model, config):
    """AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=1e-8,
        weight_decay=config.weight_decay,
        fused=True,
    )


def accumulate_gradients(model, data, config, update, rank, world, dtype):
    """Forward and backward through this rank's share of an update; returns its mean loss.

    Each gradient is then that of the mean loss over all ranks. `data` is the train split.
    """
    device = next(model.parameters()).device
    steps = micro_steps(config, world)
    windows_per_update = config.targets_per_update // config.max_seq_len
    windows_of_data = window_count(data, config.max_seq_len)
    windows = update_windows(windows_of_data, windows_per_update, config.seed, update)
    mean_loss = torch.zeros((), device=device)
    for micro_step in range(steps):
        first = (micro_step * world + rank) * config.micro_batch
        share = windows[first : first + config.micro_batch]
        ids, targets = read_windows(data, share, config.max_seq_len)
        # The ranks exchange gradients once, in the last backward pass.
        no_sync = world > 1 and micro_step < steps - 1
        with model.no_sync() if no_sync else nullcontext():
            with autocast(device, dtype):
                _, loss = model(ids.to(device), targets.to(device))
            (loss / steps).backward()
        mean_loss += loss.detach() / steps
    return mean_loss


# ---------------- A run: set up


@dataclass
class Run:
    """What the loop works with. Only `rank` differs between the ranks."""

    config: Config
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype  # of the matrix products
    data: Shards  # the train split
    val_data: Shards
    val_windows: list
    raw_model: Transformer
    model: torch.nn.Module  # the same, compiled and distributed as the config and ranks have it
    optimizer: torch.optim.Optimizer
    start: int  # how many updates have been made
    provenance: dict  # what every checkpoint says of where it comes from
    peak_flops: float = 0.0  # of all ranks together, per second


def open_data(config):
    """Both splits of config.data, refused if the model has no room for their ids."""
    data, val_data = open_shards(config.data, "train"), open_shards(config.data, "val")
    ids = data.meta["vocab_size"]
    if ids > config.vocab_size:
        raise ValueError(
            f"{config.data} has {ids} token ids and the model {config.vocab_size}; "
            f"set --vocab_size={ids}"
        )
    for split in (data, val_data):
        window_count(split, config.max_seq_len)  # refuses one that is too short
    return data, val_data


def changed_fields(folder, config):
    """The fields that a resume must not change and whose values in folder/config.json differ,
    each as "name value"."""
    # A field that is younger than the run had its default then.
    before = asdict(Config()) | read_json(folder / "config.json")
    return [
        f"{name} {before[name]}"
        for name, value in asdict(config).items()
        if name not in MAY_CHANGE and before[name] != value
    ]


def open_run_folder(config, resume):
    """Begin a run's folder or, with `resume`, check that it holds this very run."""
    out = Path(config.out_dir)
    tokenizer = Path(config.data) / "tokenizer.json"
    if not (out / "config.json").exists() and not step_folders(out):
        shutil.copyfile(tokenizer, out / "tokenizer.json")
        write_json(out / "config.json", asdict(config))
    elif not resume:
        raise ValueError(f"{out} holds a run; go on with --resume or choose another --out_dir")
    changed = changed_fields(out, config)
    if changed:
        raise ValueError(f"{out} was begun with {', '.join(changed)}; change that back")
    if sha256(out / "tokenizer.json") != sha256(tokenizer):
        raise ValueError(f"{out} and {config.data} have different tokenizers; use the run's data")


def newest_step(config):
    """The newest intact step folder of this run, or None where there is none yet."""
    return newest_intact_step(config.out_dir, lambda step: changed_fields(step, config))


def set_up(config, resume, data, val_data, rank, world, device, dtype):
    """The Run, at its start or at its newest checkpoint. On all ranks; rank 0 acts on the disk."""
    data_sha256 = sha256(data.folder / "meta.json")
    from_rank_0(open_run_folder, config, resume)
    step = from_rank_0(newest_step, config)
    if step is None:
        start = 0
        raw_model = Transformer(config)
        first_hash = backbone_hash(raw_model)
    else:
        state = read_json(step / "state.json")
        if state["data_sha256"] != data_sha256:
            raise ValueError(
                f"{config.data} is other data than {config.out_dir} was begun with; use that"
            )
        start = state["update"]
        raw_model = load_checkpoint(step)
        first_hash = state["backbone_hash"]

    raw_model.to(device).train()
    raw_model.checkpoint_activations = config.checkpoint_activations
    optimizer = make_optimizer(raw_model, config)
    if step is not None:
        read_optimizer_state(step, optimizer)

    model = torch.compile(raw_model) if config.compile else raw_model
    if world > 1:
        # Gradients then lie in the buckets that are exchanged, and not a second time beside them.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    return Run(
        config=config,
        rank=rank,
        world=world,
        device=device,
        dtype=dtype,
        data=data,
        val_data=val_data,
        val_windows=validation_windows(val_data, config.max_seq_len, config.eval_windows),
        raw_model=raw_model,
        model=model,
        optimizer=optimizer,
        start=start,
        provenance={
            "backbone_hash": first_hash,
            "tokenizer_sha256": data.meta["tokenizer_sha256"],
            "data_sha256": data_sha256,
            "torch": torch.__version__,
        },
    )


# ---------------- A run: what it says


def say(run, text):
    """Print on rank 0, above the progress bar."""
    if run.rank == 0:
        tqdm.write(text)


def describe(run, dtype_reason):
    """Say what was decided."""
    config = run.config
    steps = micro_steps(config, run.world)
    windows = window_count(run.data, config.max_seq_len)
    begin = f"after step_{run.start:08d}" if run.start else "from the start"
    say(run, f"run        {config.out_dir}, {begin}")
    say(
        run,
        f"device     {run.world} x {run.device}, products in {run.dtype} ({dtype_reason}), "
        "weights in float32",
    )
    say(
        run,
        f"model      {config.input_layer}: {parameter_counts(run.raw_model)}, "
        f"{run.data.meta['vocab_size']} ids in data",
    )
    say(run, f"backbone   sha256 {run.provenance['backbone_hash']} at the start")
    say(run, f"data       {windows:,} windows, {len(run.val_windows)} for val")
    say(
        run,
        f"update     {run.world} ranks x {steps} micro-steps x {config.micro_batch} sequences "
        f"x {config.max_seq_len}",
    )


def record(run, update, **values):
    """Put a line into metrics.jsonl."""
    targets = update * run.config.targets_per_update
    append_metrics(run.config.out_dir, {"update": update, "targets": targets, **values})


def log_update(run, update, loss, norm, seconds):
    """Print and record an update, the number `update` from 1, that took so many seconds."""
    if run.rank > 0:
        return
    config = run.config
    lr = learning_rate(config, update - 1)
    speed = config.targets_per_update / seconds
    mfu = speed * flops_per_target(run.raw_model) / run.peak_flops
    left = timedelta(seconds=round(seconds * (config.max_updates - update)))
    say(
        run,
        f"update {update:,}/{config.max_updates:,}  loss {loss:.4f}  lr {lr:.3g}  "
        f"norm {norm:.3f}  {speed:,.0f} targets/s  mfu {mfu:.1%}  left {left}",
    )
    record(run, update, loss=loss, lr=lr, grad_norm=norm, targets_per_s=speed, mfu=mfu)


def validate(run, update):
    """Print and record the loss on the validation windows after so many updates."""
    config = run.config

    def nats(ids, targets):
        with autocast(run.device, run.dtype):
            return run.raw_model.losses(ids, targets).sum()

    total = held_out_sum(
        nats, run.val_data, run.val_windows, config.max_seq_len, config.micro_batch, run.device
    )
    if run.rank == 0:
        loss = total.item() / (len(run.val_windows) * config.max_seq_len)
        bits = bits_per_byte(loss, run.val_data)
        say(run, f"update {update:,}  validation {loss:.4f} nats, {bits:.4f} bits per byte")
        record(run, update, val_loss=loss, bits_per_byte=bits)
        draw_losses(config.out_dir)


# ---------------- A run: the loop


def make_update(run, update, stop_requested):
    """Make one update: returns its loss and gradient norm, and whether any rank is to stop.

    Raises ValueError, on all ranks and before the optimizer's step, if the loss or a gradient is
    not finite.
    """
    config = run.config
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, update)
    loss = accumulate_gradients(run.model, run.data, config, update, run.rank, run.world, run.dtype)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip)
    # One exchange tells all ranks the same, so that they go on or stop together.
    stops = torch.full_like(loss, len(stop_requested))
    sums = torch.stack([loss / run.world, norm / run.world, stops])
    if run.world > 1:
        dist.all_reduce(sums)
    loss, norm, stops = sums.tolist()
    if not math.isfinite(loss + norm):
        raise ValueError(
            f"update {update + 1} has loss {loss} and gradient norm {norm} and was not made; "
            f"what {config.out_dir} holds still stands, try a lower lr"
        )
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return loss, norm, stops > 0


def train(config, resume=False, stop_requested=()):
    """Run all updates of `config`, with `resume` from the newest intact checkpoint on.

    `stop_requested` is a list that a signal's handler appends to: once it holds anything, the run
    stops after its update, with a checkpoint.
    """
    device = pick_device(config.device)
    dtype, dtype_reason = pick_dtype(config.dtype, device)
    rank, world = join_ranks(device)
    # All that can be refused is refused before there is a run folder.
    micro_steps(config, world)
    data, val_data = open_data(config)
    with torch.device("meta"):
        make_optimizer(Transformer(config), config)

    with locked(Path(config.out_dir)):
        run = set_up(config, resume, data, val_data, rank, world, device, dtype)
        if rank == 0:
            rewind_metrics(config.out_dir, run.start)
            run.peak_flops = world * peak_flops(device, dtype)
        describe(run, dtype_reason)
        run_updates(run, stop_requested)


def run_updates(run, stop_requested):
    """The loop: validate, update, log, save. Updates count from 0, `done` counts those made."""
    config = run.config
    seconds, logged = 0.0, run.start  # in updates since the last log line, and when that was
    progress = tqdm(
        range(run.start, config.max_updates),
        initial=run.start,
        total=config.max_updates,
        unit="update",
        disable=True if run.rank > 0 else None,  # None: where there is no terminal
    )
    for update in progress:
        if update > 0 and update % config.eval_interval == 0:
            validate(run, update)

        started = time.perf_counter()
        loss, norm, stop = make_update(run, update, stop_requested)
        seconds += time.perf_counter() - started
        done = update + 1
        is_last = done == config.max_updates

        if is_last or done % config.log_interval == 0:
            log_update(run, done, loss, norm, seconds / (done - logged))
            seconds, logged = 0.0, done
        # Saved before its validation, so that no failure there can lose it.
        if stop or is_last or done % config.save_interval == 0:
            save(run, done)
        if stop:
            say(run, f"stopped after update {done:,} as asked; --resume goes on from there")
            return

    validate(run, config.max_updates)
    say(run, f"{config.out_dir} is finished after {config.max_updates:,} updates")


def save(run, update):
    """Write the checkpoint after so many updates, from rank 0."""
    config = run.config
    state = {"update": update, "targets": update * config.targets_per_update, **run.provenance}
    from_rank_0(
        save_checkpoint,
        run.raw_model,
        run.optimizer,
        config.out_dir,
        asdict(config),
        state,
        config.keep_checkpoints,
    )


# ---------------- The command


def main(argv=None):
    parser = make_parser(__doc__, "train.py")
    parser.usage = "train.py [CONFIG.py ...] [--key=value ...] [--resume] [--dry_run]"
    parser.add_argument("files", nargs="*", metavar="CONFIG.py", help="laid over each other")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    add_options(parser, Config)
    options = vars(parser.parse_intermixed_args(argv))
    files = options.pop("files")
    resume = options.pop("resume")
    dry_run = options.pop("dry_run")
    with refusals(parser):
        config = make_config(files, options)
        if dry_run:
            print_plan(config)
        else:
            train(config, resume, catch_stop())


def print_plan(config):
    """Print what a run of this config costs on as many ranks as torchrun has started."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    with torch.device("meta"):
        model = Transformer(config)
    print(plan(model, config, world, micro_steps(config, world)))


if __name__ == "__main__":
    main()
