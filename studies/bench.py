"""How fast nanocodes is beside its peers and the machine's limits: one run, interleaved timings.

    python studies/bench.py step --shape small-vocab           training steps, their parts, memory
    python studies/bench.py step --shape large-vocab --programs learned/compile llama/compile
    python studies/bench.py start decode prepare --shape large-vocab --out bench.json
    python studies/bench.py gradients                          ours against eager float64

Each program has its own process, and in each round all take a turn, one after another: a ratio is
of two turns of one round. Shown are medians, with quartiles in brackets. A program of `step` is
learned, binary16, gf2, llama (of transformers), litgpt or nanogpt (--nanogpt names its model.py),
and then /compile, /own (AdamW fused on CUDA alone, as in its README) or /keep (glibc keeps freed
memory, as in our Makefile). For scoring there is tests/compare_hflm.py.
"""

import argparse
import hashlib
import itertools
import math
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from functools import partial
from importlib import metadata, util
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import convert
import prepare
import shards
import tokenizer
from device import measure_peak, pick_device, pick_dtype, refusals
from model import INPUT_LAYERS, ModelConfig, Transformer
from train import Config, accumulate_gradients, make_optimizer, read_config_file

SHAPES = {  # laid over the paper's
    "tiny": dict(vocab_size=512, d_model=64, n_layers=2, n_heads=4, d_ff=256, max_seq_len=64,
                 targets_per_update=512, micro_batch=4),
    "small-vocab": dict(vocab_size=8192, d_model=256, n_layers=6, n_heads=4, d_ff=1024,
                        max_seq_len=256, targets_per_update=8192, micro_batch=32),
    "large-vocab": dict(d_model=512, n_layers=8, n_heads=8, d_ff=2048, max_seq_len=512,
                        targets_per_update=4096, micro_batch=8),
    "paper": dict(targets_per_update=131_072),  # the share of one of two GPUs
}  # fmt: skip
PARTS = ("data", "forward", "backward", "clip", "optimizer")
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
SETTINGS = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "LD_PRELOAD", *KEEP)
PACKAGES = ("torch", "transformers", "litgpt", "tokenizers", "tiktoken", "numpy")


def make_config(args, **values):
    """The shape that was asked for, a name in SHAPES or a config file, as train.py's Config."""
    if args.shape not in SHAPES and not Path(args.shape).is_file():
        raise ValueError(f"there is no shape {args.shape}; give a file or {', '.join(SHAPES)}")
    shape = SHAPES[args.shape] if args.shape in SHAPES else read_config_file(args.shape)
    given = {key: value for key in ("d_ff", "micro_batch") if (value := getattr(args, key))}
    return Config(**shape | given | values)


# ---------------- Turns: a program is a function that makes ready and returns its turn


def wait_for(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(function, device):
    """(the seconds of a call, what it returned)."""
    begun = time.perf_counter()
    result = function()
    wait_for(device)
    return time.perf_counter() - begun, result


def peak_bytes(device):
    """The most memory that this process has used: of its GPU, or else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def serve(pipe, make, name, args):
    """The life of a process: make ready, then take a turn whenever asked."""
    turn = make(name.split("/"), args)
    turn()  # compiles, and allocates what stays
    with suppress(EOFError):  # once the other end is closed
        pipe.send("ready")
        while pipe.recv():
            pipe.send(turn() | {"peak_bytes": peak_bytes(pick_device(args.device))})
            torch.cuda.empty_cache()  # for the next program


def interleave(programs, args):
    """{name: maker} -> {name: {what its turns measured: an array of --rounds values}}."""
    context, pipes, turns = multiprocessing.get_context("spawn"), {}, defaultdict(list)
    try:
        for name, make in programs.items():
            pipes[name], other = context.Pipe()
            child = context.Process(target=serve, args=(other, make, name, args), daemon=True)
            with patch.dict(os.environ, KEEP if "keep" in name.split("/") else {}):
                child.start()
            other.close()
            pipes[name].recv()  # ready, before the next one starts
        for _, name in itertools.product(range(args.rounds), programs):
            pipes[name].send("turn")
            turns[name].append(pipes[name].recv())
    except (EOFError, ConnectionError):
        raise ValueError(f"{name} has ended; mend what it says above or leave it out") from None
    return {name: {key: np.array([turn[key] for turn in several]) for key in several[0]}
            for name, several in turns.items()}  # fmt: skip


def middle(values, digits=2):
    """The median of some values and their quartiles, in words."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def compare(results, names, columns):
    """A row of a table for each program. Raises ValueError unless all have made the same ids."""
    first, rows = results[names[0]], []
    for name in names:
        program = results[name]
        if not np.array_equal(program.get("ids"), first.get("ids")):
            raise ValueError(f"{name} and {names[0]} give different ids; mend that first")
        times = middle(program["seconds"] / first["seconds"])
        rows.append({"program": name, f"time / {names[0]}": times} | columns(program))
    return rows


# ---------------- Models


class Peer(nn.Module):
    """Another library's model, called like ours: (ids, targets) -> (None, their mean loss)."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids, targets):
        return None, self.loss(self.model, ids, targets.contiguous())


def make_llama(config):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {theirs: getattr(config, ours) for ours, theirs in convert.FIELDS.items()}
    shape["num_key_value_heads"] = config.n_kv_heads or config.n_heads
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
    options = dict(bos_token_id=None, eos_token_id=None, attn_implementation="sdpa")
    return LlamaForCausalLM(LlamaConfig(**shape, **options))


def make_litgpt(config):
    import litgpt

    model = litgpt.GPT(litgpt.Config(
        block_size=config.max_seq_len, n_layer=config.n_layers, n_embd=config.d_model,
        n_head=config.n_heads, intermediate_size=config.d_ff, vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size, norm_class_name="RMSNorm", bias=False,
        mlp_class_name="LLaMAMLP", parallel_residual=False, rotary_percentage=1.0))  # fmt: skip
    return model.apply(model._init_weights)


def make_nanogpt(config, path):
    """nanoGPT's own: whatever d_ff is, a GELU of 4 d_model; learned positions, a tied head."""
    spec = util.spec_from_file_location("nanogpt", path)
    nanogpt = sys.modules["nanogpt"] = util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    return nanogpt.GPT(nanogpt.GPTConfig(
        block_size=config.max_seq_len, vocab_size=config.vocab_size, n_layer=config.n_layers,
        n_head=config.n_heads, n_embd=config.d_model, dropout=0.0, bias=False))  # fmt: skip


def make_model(name, config, args):
    """The model of a program: (ids, targets) -> (None, their mean loss)."""
    if name == "llama":
        return Peer(make_llama(config), lambda model, ids, targets: model(
            ids, labels=targets, shift_labels=targets, use_cache=False).loss)  # fmt: skip
    if name == "litgpt":
        return Peer(make_litgpt(config), lambda model, ids, targets: F.cross_entropy(
            model(ids).flatten(0, 1), targets.flatten()))  # fmt: skip
    if name == "nanogpt":
        return Peer(make_nanogpt(config, args.nanogpt), lambda model, *rows: model(*rows)[1])
    return Transformer(config)


def at_hand(names, args):
    """Those of some programs that can run here; says what the others lack."""
    sources = dict.fromkeys(INPUT_LAYERS, "torch")
    sources |= dict(llama="transformers", litgpt="litgpt", nanogpt="--nanogpt")
    for name in names:
        source = sources.get(name.split("/")[0])
        if source is None:
            raise ValueError(f"there is no program {name}; choose from {', '.join(sources)}")
        if args.nanogpt if source == "--nanogpt" else util.find_spec(source):
            yield name
        else:
            print(f"{name} is left out: {source} is missing", file=sys.stderr)


def matrices(model):
    """(inputs, outputs) of every matrix that a model multiplies by."""
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def count_weights(model):
    """How many weights these matrices have."""
    return sum(map(math.prod, matrices(model)))


# ---------------- Training steps


def training(words, args):
    """A turn is --steps steps as train.py makes them: the mean seconds of one and of its parts."""
    name, *how = words
    config = make_config(args, input_layer=name if name in INPUT_LAYERS else "learned")
    device = pick_device(args.device)
    dtype, _ = pick_dtype(args.dtype, device)
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    raw_model = make_model(name, config, args).to(device).train()
    model = torch.compile(raw_model) if "compile" in how else raw_model
    optimizer = make_optimizer(raw_model, config)
    if "own" in how:
        fused = device.type == "cuda" or None
        optimizer = torch.optim.AdamW(raw_model.parameters(), config.lr, fused=fused)
    ids = np.random.default_rng(0).integers(1, config.vocab_size, 2**22, np.uint16)
    meta = dict(vocab_size=config.vocab_size)
    data = shards.Shards(Path("random"), meta, [ids], [0], len(ids), len(ids))
    updates, since, parts = itertools.count(), 0.0, defaultdict(float)
    attention = config.n_layers * config.max_seq_len * config.d_model  # the causal half
    flops = 6 * (count_weights(raw_model) + attention) * config.targets_per_update

    def mark(part):
        """All since the last mark was this part."""
        nonlocal since
        wait_for(device)
        since, before = time.perf_counter(), since
        parts[part] += since - before

    def marked(function):
        def call(*arguments):
            mark("backward")  # of the micro-step before
            result = function(*arguments)
            mark("data")
            return result

        return call

    shards.update_windows = marked(shards.update_windows)
    shards.read_windows = marked(shards.read_windows)
    model.register_forward_pre_hook(lambda *_: mark("data"))
    model.register_forward_hook(lambda *_: mark("forward"))

    def turn():
        nonlocal since
        since = time.perf_counter()
        parts.clear()
        for update in itertools.islice(updates, args.steps):
            loss = accumulate_gradients(model, data, config, update, 0, 1, autocast)
            mark("backward")
            norm = nn.utils.clip_grad_norm_(raw_model.parameters(), config.grad_clip)
            loss, norm = torch.stack([loss, norm]).tolist()
            mark("clip")
            if not math.isfinite(loss + norm):
                raise ValueError(f"loss {loss} and norm {norm}: a step like that is not timed")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mark("optimizer")
        seconds = {part: parts[part] / args.steps for part in PARTS}
        return seconds | dict(seconds=sum(seconds.values()), flops=flops, loss=loss)

    return turn


def matmuls(words, args):
    """A turn is the FLOP/s of bare products: the model's matrices with the rows of a micro-step."""
    config, device = make_config(args), pick_device(args.device)
    dtype, _ = pick_dtype(args.dtype, device)
    rows = config.micro_batch * config.max_seq_len
    with torch.device("meta"):
        shapes = matrices(Transformer(config))

    def turn():
        peak = {shape: measure_peak(device, dtype, rows, *shape) for shape in set(shapes)}
        spent = [math.prod(shape) / peak[shape] for shape in shapes]
        return {"flop/s": sum(map(math.prod, shapes)) / sum(spent)}

    return turn


def step(args):
    every = ("learned", "gf2", "llama", "litgpt", "nanogpt")
    names = args.programs or [name + how for how in ("", "/compile") for name in every]
    names, targets = list(at_hand(names, args)), make_config(args).targets_per_update
    if not names:
        raise ValueError("no program is left; name one that is at hand")
    results = interleave({"matmuls": matmuls} | dict.fromkeys(names, training), args)
    peak = results["matmuls"]["flop/s"]

    def columns(program):
        seconds, speed = program["seconds"], program["flops"] / program["seconds"]
        return {"tokens/s": f"{np.median(targets / seconds):,.0f}",
                "GFLOP/s": f"{np.median(speed) / 1e9:,.0f}",
                "MFU": f"{np.median(speed / peak):.1%}",
                "peak GB": f"{program['peak_bytes'][-1] / 1e9:.2f}",
                **{part: f"{np.median(program[part] / seconds):.2%}" for part in PARTS}}

    print(f"MFU is of the {middle(peak / 1e9, 0)} GFLOP/s of the bare matrix products.\n")
    return compare(results, names, columns), results


def start(args):
    """train.py on a little data, without compile: the seconds until its first step begins."""
    shape = vars(make_config(args)) | dict(device=args.device, dtype=args.dtype, compile=False)
    shape |= dict(max_updates=1, eval_windows=1)
    options = [f"--{key}={value}" for key, value in shape.items() if value is not None]
    root, seconds = Path(__file__).resolve().parent.parent, {"update    ": [], "update 1/1": []}
    with tempfile.TemporaryDirectory() as folder:
        data = ["--source=tests", "--tokenizer=bpe:512", "--val_share=0.3", f"--out={folder}/data"]
        subprocess.run([sys.executable, "prepare.py", *data], cwd=root, check=True)
        for number in range(args.rounds):
            paths = [f"--data={folder}/data", f"--out_dir={folder}/{number}"]
            command = [sys.executable, "-u", "train.py", *options, *paths]
            begun = time.perf_counter()
            with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as child:
                for line in child.stdout:
                    if line[:10] in seconds:  # the last line before the loop, the first in it
                        seconds[line[:10]].append(time.perf_counter() - begun)
    begins, ends = seconds.values()
    if not len(begins) == len(ends) == args.rounds:
        raise ValueError("train.py made no step; mend what it says above")
    row = {"s until the first step": middle(begins), "s until its end": middle(ends)}
    return [row], {"train.py": dict(begins=np.array(begins), ends=np.array(ends))}


# ---------------- Decoding


def decoding(words, args):
    """A turn is a greedy continuation of one prompt, batch 1, float32, the same weights for all."""
    config, device = make_config(args), pick_device(args.device)
    model = Transformer(config)
    prompt = torch.arange(1, 33, device=device)[None]  # (1, T)
    new = min(args.new_tokens, config.max_seq_len - prompt.shape[1])
    if words == ["llama"]:
        weights = {convert.hf_name(name): weight for name, weight in model.state_dict().items()}
        model = make_llama(config)
        model.load_state_dict(weights)
    model.to(device).eval()

    def ours():
        return [next_ids.item() for next_ids in model.generate(prompt, new, temperature=0)]

    def theirs():
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return ids[0, prompt.shape[1] :].tolist()

    def turn():
        seconds, ids = timed(theirs if words == ["llama"] else ours, device)
        return dict(seconds=seconds, ids=ids, bytes_per_token=4 * count_weights(model))

    return turn


def bandwidth(words, args):
    """A turn is the bytes per second of the best of eight sums over a gigabyte."""
    device = pick_device(args.device)
    numbers = torch.ones(2**28, device=device)
    return lambda: {"bytes/s": 2**30 / min(timed(numbers.sum, device)[0] for _ in range(8))}


def decode(args):
    names = list(at_hand(["learned", "llama"], args))
    results = interleave({"bandwidth": bandwidth} | dict.fromkeys(names, decoding), args)
    speed = results["bandwidth"]["bytes/s"]

    def columns(program):
        reached = program["ids"].shape[1] / program["seconds"]
        limit = speed / program["bytes_per_token"]
        return {"tokens/s": middle(reached, 1), "limit": f"{np.median(limit):,.1f}",
                "of it": f"{np.median(reached / limit):.1%}"}  # fmt: skip

    print(f"The limit is to read every matrix once a token, at {middle(speed / 1e9, 1)} GB/s.\n")
    return compare(results, names, columns), results


# ---------------- Preparation


def some_texts(args):
    """The first --megabytes of the source, document by document."""
    texts, room = [], args.megabytes * 1e6
    for document in prepare.documents_of(args.source):
        texts.append(document.decode("utf-8", "replace"))
        room -= len(document)
        if room <= 0:
            break
    return texts


def encoding(words, args):
    """A turn is all texts to ids, by prepare.py's threads or one call of `tokenizers`."""
    texts, theirs = some_texts(args), tokenizer.load_tokenizer(args.tokenizer)
    encode, _ = tokenizer.make_encoder(theirs)

    def ours():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(prepare.encoded(texts, encode, pool))

    def peer():
        batch = getattr(theirs, words[0])(texts, add_special_tokens=False)
        return [encoded.ids for encoded in batch]

    def turn():
        seconds, rows = timed(ours if words == ["prepare.py"] else peer, torch.device("cpu"))
        ids = hashlib.sha256(repr([list(map(int, row)) for row in rows]).encode()).hexdigest()
        return dict(seconds=seconds, ids=ids, bytes=sum(len(text.encode()) for text in texts))

    return turn


def preparation(args):
    names = ["prepare.py", "encode_batch", "encode_batch_fast"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.make_tokenizer(args.tokenizer, path, some_texts(args))
        args = argparse.Namespace(**vars(args) | dict(tokenizer=path))
        results = interleave(dict.fromkeys(names, encoding), args)

    def columns(program):
        return {"MB/s": middle(program["bytes"] / 1e6 / program["seconds"])}

    return compare(results, names, columns), results


# ---------------- Gradients: what is fast must also be right

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # of |difference| / |gradient|
CASES = [  # also shared keys, and a loss in several chunks
    dict(input_layer="learned", vocab_size=512, d_model=64, n_layers=2, n_heads=4, d_ff=160,
         max_seq_len=48),
    dict(input_layer="gf2", vocab_size=1000, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2,
         d_ff=320, max_seq_len=64),
    dict(input_layer="binary16", d_model=64, n_layers=1, n_heads=2, d_ff=128, max_seq_len=512),
]  # fmt: skip


def worst_error(config, dtype, compiled, device, seeds):
    """(the greatest |difference| / |gradient| from eager float64, whose it is)."""
    exact, ours = Transformer(config).double().to(device), Transformer(config).to(device)
    model, errors = torch.compile(ours) if compiled else ours, {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (4, config.max_seq_len + 1), generator=generator)
        ids[0, :3] = 0  # the zero code in front of a row
        ids, targets = ids[:, :-1].to(device), ids[:, 1:].to(device)
        weights = {name: torch.randn(p.shape, generator=generator) * 0.05 + (p.dim() == 1)
                   for name, p in ours.named_parameters()}  # fmt: skip
        for copy in (exact, ours):
            copy.load_state_dict(weights)
            copy.zero_grad()
        F.cross_entropy(exact(ids)[0].flatten(0, 1), targets.flatten()).backward()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(ids, targets)
        loss.backward()
        for (name, p), q in zip(ours.named_parameters(), exact.parameters(), strict=True):
            error = (p.grad.double() - q.grad).norm() / q.grad.norm()
            errors[f"{name}, seed {seed}"] = error.nan_to_num(torch.inf).item()
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def gradients(args):
    """Every gradient of ours, eager and compiled. Raises ValueError if one is out of bounds."""
    device, rows = pick_device(args.device), []
    for case, dtype, compiled in itertools.product(CASES, BOUNDS, (False, True)):
        error, whose = worst_error(ModelConfig(**case), dtype, compiled, device, args.rounds)
        how = f"{case['input_layer']}, {dtype}, {'compiled' if compiled else 'eager'}"
        if error > BOUNDS[dtype]:
            what = f"the gradient of {whose}, of {how}, is off by {error:.2g} of its size"
            raise ValueError(f"{what}; mend that before timing anything")
        rows.append({"model": how, "worst error": f"{error:.1e}", "bound": BOUNDS[dtype],
                     "of": whose})  # fmt: skip
    return rows, {}


# ---------------- The report


def circumstances():
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = info.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    versions = {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)}
    return dict(machine=f"{cpu}, {torch.get_num_threads()} threads, GPU {gpu}",
                date=date.today().isoformat(), command=" ".join([*settings, "python", *sys.argv]),
                python=platform.python_version(), **versions)  # fmt: skip


WORKS = dict(step=step, start=start, decode=decode, prepare=preparation, gradients=gradients)


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("works", nargs="+", choices=WORKS, metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--shape", default="small-vocab", help=f"a config or {', '.join(SHAPES)}")
    parser.add_argument("--d_ff", type=int, help="instead of the shape's")
    parser.add_argument("--micro_batch", type=int, help="rows, instead of the shape's")
    parser.add_argument("--programs", nargs="+", help="of step; ratios are to the first")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, or seeds; 5")
    parser.add_argument("--steps", type=int, default=1, help="in a turn; default 1")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="of products: auto, float32 or bfloat16")
    parser.add_argument("--nanogpt", metavar="FILE", help="the model.py of a clone")
    parser.add_argument("--new_tokens", type=int, default=128, help="to decode; default 128")
    parser.add_argument("--source", default="stdlib", help="text to prepare; see prepare.py")
    parser.add_argument("--megabytes", type=float, default=10, help="of it; default 10")
    parser.add_argument("--tokenizer", default="bpe:8192", help="see prepare.py")
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args(argv)
    with refusals(parser):
        if min(args.rounds, args.steps, args.new_tokens) < 1:
            raise ValueError("--rounds, --steps or --new_tokens is below 1; give at least 1")
        if args.out:
            args.out.touch()  # what cannot be written fails before the work
        report = circumstances()
        print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
        for work in args.works:
            print(f"\n## {work}\n")
            rows, results = WORKS[work](args)
            print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
            print(*("| " + " | ".join(map(str, row.values())) + " |" for row in rows), sep="\n")
            turns = {name: {key: values.tolist() for key, values in program.items()}
                     for name, program in results.items()}  # fmt: skip
            report[work] = dict(table=rows, turns=turns)
        if args.out:
            shards.write_json(args.out, report)


if __name__ == "__main__":
    main()
