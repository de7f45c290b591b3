"""Train one model: shards -> checkpoints.

    torchrun --nproc_per_node=2 train.py configs/learned.py         the paper's run
    python train.py configs/gf2.py configs/smoke.py --lr=1e-3       later files and options win
    python train.py configs/gf2.py configs/smoke.py --resume        go on where it stopped
    python train.py configs/learned.py --dry_run                    the plan; needs no data
"""

import argparse
import ast
import json
import math
import os
import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import shards
from device import (
    catch_stop,
    from_rank_0,
    hold,
    join_ranks,
    measure_peak,
    named,
    pick_device,
    pick_dtype,
    refusals,
)
from loss import LOGITS_AT_ONCE
from model import ModelConfig, Transformer, load_checkpoint, option, step_folders

# ---------------- Config: the defaults, then each file, then each --key=value


@dataclass(kw_only=True)
class Config(ModelConfig):
    """The model's fields and the recipe's, by default the paper's or, where it is silent, ours."""

    data: str = option("data/fineweb-edu-dedup", "folder made by prepare.py")
    out_dir: str | None = option(None, "run folder; none means out/<names of the config files>")
    seed: int = option(1337, "seed of the order of the data")
    max_updates: int = option(381_470, "optimizer steps; the paper's 100e9 targets", least=1)
    targets_per_update: int = option(262_144, "predictions per update, on all ranks", least=1)
    micro_batch: int = option(8, "sequences per rank in one forward and backward", least=1)
    lr: float = option(1.5e-4, "peak learning rate")
    min_lr: float = option(1.5e-5, "learning rate of the last update")
    warmup_updates: int = option(2000, "updates of linear warmup")
    weight_decay: float = option(0.1, "of matrices; vectors have none")
    beta1: float = option(0.9, "AdamW's decay of the mean")
    beta2: float = option(0.95, "AdamW's decay of the mean square")
    grad_clip: float = option(1.0, "largest norm of the whole gradient", least=1e-6)
    eval_interval: int = option(1000, "updates between validations", least=1)
    eval_windows: int = option(512, "validation windows; 0 means all")
    save_interval: int = option(1000, "updates between checkpoints", least=1)
    log_interval: int = option(10, "updates between log lines", least=1)
    keep_checkpoints: int = option(2, "newest checkpoints to keep; -1 or 0 means all", least=-1)
    device: str = option("auto", "auto, cuda, mps or cpu")
    dtype: str = option("auto", "of the matrix products: auto, float32 or bfloat16")
    compile: bool = option(True, "torch.compile the training step")
    checkpoint_activations: bool = option(False, "less memory: recompute blocks going backward")


FIELDS = {f.name: f for f in fields(Config)}
# What a resume may change, since it alters speed, reporting or paths, and not what is learned.
FREE = """out_dir data micro_batch eval_interval save_interval log_interval keep_checkpoints
device compile checkpoint_activations""".split()


def read_config_file(path):
    """The assignments in a config file as a dict. It is Python: whatever it holds is run."""
    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}; options are written --key=value")
    values = {}
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), values)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be read as a config ({error!r}); mend it") from None
    values = {name: values[name] for name in values if not name.startswith("_")}
    if unknown := [name for name in values if name not in FIELDS]:
        raise ValueError(f"{path}: {unknown[0]} is no config key; `python train.py --help` has all")
    return values


def parse_option(name, text):
    """The value of --name=text: true, false, none, a number or, where the field is text, text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words or FIELDS[name].type in (str, str | None) or len(text) > 99:
        return words.get(text.lower(), text)
    with suppress(SyntaxError, ValueError, TypeError):
        text = ast.literal_eval(text)
    return text  # where it still is text, Config refuses it by name


def make_config(files, options):
    """Lay config files, left to right, then options {key: text} over the defaults."""
    values = {}
    for path in files:
        values |= read_config_file(path)
    values |= {name: parse_option(name, text) for name, text in options.items()}
    if values.get("out_dir") is None:
        stems = [Path(path).stem for path in files] or [values.get("input_layer", "learned")]
        values["out_dir"] = "out/" + "-".join(map(str, stems))
    return Config(**values)


# ---------------- The recipe


def micro_steps(config, world):
    """How many forward and backward passes each rank makes for one update."""
    together = config.micro_batch * config.max_seq_len * world
    if config.targets_per_update % together:
        raise ValueError(
            f"targets_per_update {config.targets_per_update} is no multiple of {together} = "
            f"micro_batch {config.micro_batch} x max_seq_len {config.max_seq_len} x {world} ranks; "
            "change micro_batch or the number of ranks"
        )
    return config.targets_per_update // together


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
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, config.lr, betas, 1e-8, config.weight_decay, fused=True)


def accumulate_gradients(model, data, config, update, rank, world, autocast):
    """Forward and backward through this rank's share of an update; returns its mean loss.
    Each gradient is then that of the mean loss over all ranks. `data` is the train split."""
    length, size, steps = config.max_seq_len, config.micro_batch, micro_steps(config, world)
    device, per_update = next(model.parameters()).device, config.targets_per_update // length
    count = shards.window_count(data, length)
    windows = shards.update_windows(count, per_update, config.seed, update)
    total = torch.zeros((), device=device)
    for step in range(steps):
        first = (step * world + rank) * size
        ids, targets = shards.read_windows(data, windows[first : first + size], length)
        # The ranks exchange gradients once, in the last backward pass.
        quiet = world > 1 and step < steps - 1
        with model.no_sync() if quiet else nullcontext():
            with autocast():
                _, loss = model(ids.to(device), targets.to(device))
            (loss / steps).backward()
        total += loss.detach() / steps
    return total


# ---------------- Checkpoints: a folder is named step_<update> only once it is whole

SAVED = ("model.safetensors", "training_state.pt", "config.json")


def save_checkpoint(model, optimizer, config, update, facts):
    """Write the checkpoint after `update` finished updates, then remove the oldest."""
    step = Path(config.out_dir) / f"step_{update:08d}"
    unfinished = step.with_name(step.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        save_file(model.state_dict(), unfinished / "model.safetensors")
        torch.save(optimizer.state_dict(), unfinished / "training_state.pt")
    except (SafetensorError, RuntimeError) as error:
        shutil.rmtree(unfinished)
        raise ValueError(f"{step} cannot be written ({error}); make room, then --resume") from None
    shards.write_json(unfinished / "config.json", asdict(config))
    sums = {name: shards.sha256(unfinished / name) for name in SAVED}
    state = {"update": update, "targets": update * config.targets_per_update, **facts}
    shards.write_json(unfinished / "state.json", {**state, "sha256": sums})
    for path in unfinished.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    os.replace(unfinished, step)
    if config.keep_checkpoints > 0:
        for old in step_folders(config.out_dir)[: -config.keep_checkpoints]:
            shutil.rmtree(old)


def step_to_resume(config, tokenizer, resume):
    """The newest whole step folder of the run, or None to begin one; refuses a run to overwrite."""
    out, now = Path(config.out_dir), asdict(config)
    if not (out / "config.json").exists() and not step_folders(out):
        shutil.copyfile(Path(config.data) / "tokenizer.json", out / "tokenizer.json")
        shards.write_json(out / "config.json", now)
    elif not resume:
        raise ValueError(f"{out} holds a run; go on with --resume or choose another --out_dir")

    def changed(folder):
        then = shards.read_json(folder / "config.json")
        return [f"{n} {then.get(n)}" for n in now if n not in FREE and then.get(n) != now[n]]

    if values := changed(out):
        raise ValueError(f"{out} was begun with {', '.join(values)}; change that back")
    if shards.sha256(out / "tokenizer.json") != tokenizer:
        raise ValueError(f"{out} and {config.data} have different tokenizers; use the run's data")
    for step in reversed(step_folders(out)):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            state = shards.read_json(step / "state.json")
            sums = {name: shards.sha256(step / name) for name in SAVED}
            same = repr(state) == repr({**state, "update": int(step.name[5:]), "sha256": sums})
            if same and {"backbone_hash", "data_sha256"} <= state.keys() and not changed(step):
                return step
        print(f"passing over {step}: its files are not as they were saved; set aside as .damaged")
        step.rename(f"{step}.damaged-{time.time_ns()}")
    return None


# ---------------- What it says


def read_metrics(run):
    """The lines of a run's metrics.jsonl; one that a kill or a disk has torn is left out."""
    path, metrics = Path(run) / "metrics.jsonl", []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with suppress(ValueError, RecursionError):
            metrics.append(json.loads(line))
    return [m for m in metrics if isinstance(m, dict) and type(m.get("update")) is int
            and all(type(v) in (int, float) and not abs(v) > 1e30 for v in m.values())]  # fmt: skip


def draw_losses(run):
    """loss.png: the losses of a run over the targets it has seen."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(m["targets"], m[key]) for m in read_metrics(run) if key in m and "targets" in m]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="targets", ylabel="nats per token")
    axes.legend()
    axes.figure.savefig(Path(run) / "loss.png", dpi=120)


def plan(config, world, peak=989e12, mfu=0.4):
    """The run in numbers, a page of text. `peak` is an H100's in dense bfloat16, in FLOP/s."""
    with torch.device("meta"):
        model = Transformer(config)
    counts, flops = model.parameter_counts(), model.flops_per_target()
    total, targets = sum(counts.values()), config.max_updates * config.targets_per_update
    steps, rows, gib = micro_steps(config, world), config.micro_batch * config.max_seq_len, 2**30
    # Bytes kept per position and block: in float32 the inputs of the norms; in bfloat16 their
    # outputs, q, k, v, q and k turned, attention, and four of d_ff.
    block = 24 * config.d_model + 8 * config.d_ff
    if config.checkpoint_activations:
        block = 4 * config.d_model + block / config.n_layers
    activations = block * config.n_layers * rows / gib
    logits = (10 * min(LOGITS_AT_ONCE, rows * config.vocab_size) + 6 * counts["head"]) / gib
    days = targets * flops / (peak * mfu) / 86_400
    return f"""input layer         {config.input_layer}
parameters          {total:,}: {", ".join(f"{name} {n:,}" for name, n in counts.items())}
targets per update  {config.targets_per_update:,} = {world} ranks x {steps} micro-steps x \
{config.micro_batch} sequences x {config.max_seq_len}
updates             {config.max_updates:,}: {targets:,} targets in \
{targets // config.max_seq_len:,} windows
FLOPs               {flops * targets:.3e}, {flops:,} per target
days                {days:.1f} on one device, at {mfu:.0%} of {peak / 1e12:.0f} TFLOP/s, an H100's
memory of a rank    {4 * total / gib:.1f} GiB weights, as much gradients, twice it for AdamW;
                    roughly {activations:.1f} GiB activations and {logits:.1f} GiB logits
disk                {12 * total / gib:.1f} GiB a checkpoint, {2 * targets / gib:.1f} GiB shards"""


# ---------------- The run


def train(config, resume=False, asked=()):
    """Run all updates of `config`, with `resume` from the newest whole checkpoint on.
    Once `asked` holds anything, the run stops after its update, with a checkpoint."""
    device, out, length = pick_device(config.device), Path(config.out_dir), config.max_seq_len
    dtype, reason = pick_dtype(config.dtype, device)
    rank, world = join_ranks(device)
    steps, size = micro_steps(config, world), config.micro_batch
    say = tqdm.write if rank == 0 else lambda text: None
    data, val = (shards.open_shards(config.data, split) for split in shards.SPLITS)
    if (ids := data.meta["vocab_size"]) > config.vocab_size:
        what = f"{config.data} has {ids} token ids and the model {config.vocab_size}"
        raise ValueError(f"{what}; set --vocab_size={ids}")
    val_windows = shards.validation_windows(val, length, config.eval_windows)

    with torch.device("meta"):
        make_optimizer(Transformer(config), config)  # refuses before the run folder is made
    tokenizer, made = data.meta["tokenizer_sha256"], shards.sha256(data.folder / "meta.json")
    held, metrics = hold(out), out / "metrics.jsonl"  # held from other runs, until this one ends
    step, start = from_rank_0(step_to_resume, config, tokenizer, resume), 0
    if step is None:
        raw_model = Transformer(config)
        backbone = raw_model.backbone_hash()
    else:
        raw_model, state = load_checkpoint(step), shards.read_json(step / "state.json")
        start, backbone = state["update"], state["backbone_hash"]
        if state["data_sha256"] != made:
            raise ValueError(f"{config.data} is other data than {out} was begun with; use that")
    raw_model.to(device).train().checkpoint_activations = config.checkpoint_activations
    optimizer = make_optimizer(raw_model, config)
    if step is not None:
        optimizer.load_state_dict(torch.load(step / "training_state.pt", "cpu", weights_only=True))
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    model = torch.compile(raw_model) if config.compile else raw_model
    if world > 1:
        model = DistributedDataParallel(model)
        model.broadcast_buffers = False  # each rank makes the same ones from the config

    # What was decided
    facts = dict(backbone_hash=backbone, tokenizer_sha256=tokenizer, data_sha256=made)
    facts["torch"] = torch.__version__
    if rank == 0:
        # What came after the checkpoint is made again, its own validation included.
        kept = [m for m in read_metrics(out) if m["update"] + ("val_loss" in m) <= start]
        shards.write_whole(metrics, "".join(json.dumps(m) + "\n" for m in kept).encode())
        shape = size * length, config.d_model, config.d_ff
        peak = measure_peak(device, dtype, *shape) * world
        say(f"run        {out}, {f'after {step.name}' if step else 'from the start'}")
        say(f"device     {world} x {device}, products in {dtype} ({reason}), weights in float32")
        say(f"model      {config.input_layer}: {raw_model.parameter_counts()}, {ids} ids in data")
        say(f"backbone   sha256 {backbone} at the start")
        say(f"data       {shards.window_count(data, length):,} windows, {len(val_windows)} for val")
        say(f"update     {world} ranks x {steps} micro-steps x {size} sequences x {length}")

    def record(update, **values):
        values = {"update": update, "targets": update * config.targets_per_update, **values}
        with named(metrics), open(metrics, "a") as file:
            file.write(json.dumps(values) + "\n")

    def nats(ids, targets):
        with autocast():
            return raw_model.losses(ids, targets).sum()

    bar = tqdm(total=config.max_updates, initial=start, unit="update", disable=rank != 0 or None)
    busy, since = 0.0, start  # seconds in updates since the last log line
    for update in range(start, config.max_updates + 1):
        last = update == config.max_updates
        if last or update and update % config.eval_interval == 0:
            total = shards.held_out_sum(nats, val, val_windows, length, size, device)
            if rank == 0:
                val_loss = total.item() / (len(val_windows) * length)
                bits = shards.bits_per_byte(val_loss, val)
                say(f"update {update:,}  validation {val_loss:.4f} nats, {bits:.4f} bits per byte")
                record(update, val_loss=val_loss, bits_per_byte=bits)
                draw_losses(out)
        if last:
            say(f"{out} is finished after {update:,} updates")
            break
        begun, lr, done = time.perf_counter(), learning_rate(config, update), update + 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = accumulate_gradients(model, data, config, update, rank, world, autocast)
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config.grad_clip)
        # One exchange tells all ranks the same, so that they go on or stop together.
        news = torch.stack([loss / world, norm / world, torch.full_like(loss, len(asked))])
        if world > 1:
            dist.all_reduce(news)
        loss, norm, stop = news.tolist()
        if not math.isfinite(loss + norm):
            what = f"update {done} has loss {loss} and gradient norm {norm} and was not made"
            raise ValueError(f"{what}; what {out} holds still stands, try a lower lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update()
        busy += time.perf_counter() - begun
        if rank == 0 and (done % config.log_interval == 0 or done == config.max_updates):
            speed = config.targets_per_update * (done - since) / busy
            mfu = speed * raw_model.flops_per_target() / peak
            left = timedelta(seconds=round(busy / (done - since) * (config.max_updates - done)))
            say(f"update {done:,}/{config.max_updates:,}  loss {loss:.4f}  lr {lr:.3g}  "
                f"norm {norm:.3f}  {speed:,.0f} targets/s  mfu {mfu:.1%}  left {left}")  # fmt: skip
            record(done, loss=loss, lr=lr, grad_norm=norm, targets_per_s=speed, mfu=mfu)
            busy, since = 0.0, done
        if stop or done % config.save_interval == 0 or done == config.max_updates:
            from_rank_0(save_checkpoint, raw_model, optimizer, config, done, facts)
        if stop:
            say(f"stopped after update {done:,} as asked; --resume goes on from there")
            break
    bar.close()
    held.close()


def main(argv=None):
    parser = argparse.ArgumentParser("train.py", allow_abbrev=False, description="Train one model.")
    parser.usage = "train.py [CONFIG.py ...] [--key=value ...] [--resume] [--dry_run]"
    parser.error = lambda message: parser.exit(2, f"train.py: {message}\n")
    parser.add_argument("files", nargs="*", metavar="CONFIG.py", help="laid over each other")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    for name, f in FIELDS.items():
        line = f"{f.metadata['help']} (default {f.default})"
        parser.add_argument(f"--{name}", metavar="", default=argparse.SUPPRESS, help=line)
    options = vars(parser.parse_intermixed_args(argv))
    files, resume, dry_run = (options.pop(name) for name in ("files", "resume", "dry_run"))
    with refusals(parser):
        config = make_config(files, options)
        if dry_run:
            print(plan(config, int(os.environ.get("WORLD_SIZE", 1))))
        else:
            train(config, resume, catch_stop())


if __name__ == "__main__":
    main()
