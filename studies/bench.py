"""How fast is nanocodes beside its peers and the machine's limits?

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

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import util
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convert import hf_state
from model import INPUT_LAYERS, ModelConfig, Transformer
from nanocodes.command import make_parser, refusals
from nanocodes.config import read_values
from nanocodes.device import autocast, measure_peak, pick_device, pick_dtype
from nanocodes.encoder import make_encoder
from nanocodes.files import write_json
from nanocodes.sources import documents_of
from nanocodes.tokenizer import load_tokenizer, make_tokenizer
from prepare import encoded
from studies.peers import llama_continuation, make_llama, make_peer
from studies.turns import (
    KEEP_MEMORY,
    PARTS,
    Program,
    circumstances,
    count_weights,
    interleave,
    matrices,
    median_and_quartiles,
    timed,
    training_turn,
)
from train import Config, make_optimizer

ROOT = Path(__file__).resolve().parent.parent

# Laid over the paper's.
SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "d_ff": 256,
        "max_seq_len": 64,
        "targets_per_update": 512,
        "micro_batch": 4,
    },
    "small-vocab": {
        "vocab_size": 8192,
        "d_model": 256,
        "n_layers": 6,
        "n_heads": 4,
        "d_ff": 1024,
        "max_seq_len": 256,
        "targets_per_update": 8192,
        "micro_batch": 32,
    },
    "large-vocab": {
        "d_model": 512,
        "n_layers": 8,
        "n_heads": 8,
        "d_ff": 2048,
        "max_seq_len": 512,
        "targets_per_update": 4096,
        "micro_batch": 8,
    },
    "paper": {"targets_per_update": 131_072},  # the share of one of two GPUs
}


def make_config(args, **changes):
    """train.py's Config of --shape, a name in SHAPES or a config file, with --d_ff and so on."""
    if args.shape in SHAPES:
        values = dict(SHAPES[args.shape])
    elif Path(args.shape).is_file():
        values = read_values(Config, [args.shape], {})
    else:
        raise ValueError(f"there is no shape {args.shape}; give a file or {', '.join(SHAPES)}")
    for name in ("d_ff", "micro_batch"):
        if getattr(args, name):
            values[name] = getattr(args, name)
    return Config(**values | {"device": args.device, "dtype": args.dtype} | changes)


def compare(results, names, columns):
    """A row of a table for each program: its time beside the first one's, then columns(program).

    Raises ValueError unless all that give ids have given the same ones.
    """
    first = results[names[0]]
    rows = []
    for name in names:
        program = results[name]
        if not np.array_equal(program.get("ids"), first.get("ids")):
            raise ValueError(f"{name} and {names[0]} give different ids; mend that first")
        ratio = median_and_quartiles(program["seconds"] / first["seconds"])
        rows.append({"program": name, f"time / {names[0]}": ratio, **columns(program)})
    return rows


# ---------------- Training steps

# What a program of this name needs: a package or an option.
NEEDS = dict.fromkeys(INPUT_LAYERS, "torch")
NEEDS |= {"llama": "transformers", "litgpt": "litgpt", "nanogpt": "--nanogpt"}
STEP_MODELS = ("learned", "gf2", "llama", "litgpt", "nanogpt")


def at_hand(programs, nanogpt_file):
    """Those of some programs that can run here; says what the others lack."""
    found = []
    for program in programs:
        need = NEEDS.get(program.split("/")[0])
        if need is None:
            raise ValueError(f"there is no program {program}; choose from {', '.join(NEEDS)}")
        if nanogpt_file if need == "--nanogpt" else util.find_spec(need):
            found.append(program)
        else:
            print(f"{program} is left out: {need} is missing", file=sys.stderr)
    return found


def make_training(program, config, steps, nanogpt_file):
    """The function of a turn of training: see training_turn."""
    name, *options = program.split("/")
    if name in INPUT_LAYERS:
        raw_model = Transformer(config)
    else:
        raw_model = make_peer(name, config, nanogpt_file)
    device = pick_device(config.device)
    raw_model.to(device).train()
    model = torch.compile(raw_model) if "compile" in options else raw_model
    if "own" in options:
        fused = device.type == "cuda" or None
        optimizer = torch.optim.AdamW(raw_model.parameters(), config.lr, fused=fused)
    else:
        optimizer = make_optimizer(raw_model, config)
    return training_turn(raw_model, model, optimizer, config, steps)


def make_matmuls(config):
    """The function of a turn of bare products: the FLOP/s at which the model's matrices are
    multiplied with the rows of a micro-step."""
    device = pick_device(config.device)
    dtype, _ = pick_dtype(config.dtype, device)
    rows = config.micro_batch * config.max_seq_len
    with torch.device("meta"):
        shapes = matrices(Transformer(config))

    def take_turn():
        peak = {shape: measure_peak(device, dtype, rows, *shape) for shape in set(shapes)}
        weights = [inputs * outputs for inputs, outputs in shapes]
        # Up to a factor of all: what a matrix takes is as its weights over its FLOP/s.
        seconds = [count / peak[shape] for count, shape in zip(weights, shapes, strict=True)]
        return {"flop/s": sum(weights) / sum(seconds)}

    return take_turn


def training_program(program, args):
    """The Program that makes training steps under this name."""
    name, *options = program.split("/")
    config = make_config(args, input_layer=name if name in INPUT_LAYERS else "learned")
    return Program(
        make=partial(make_training, program, config, args.steps, args.nanogpt),
        environment=KEEP_MEMORY if "keep" in options else {},
    )


def step(args):
    """Training steps of several programs: a row for each, and all turns."""
    names = args.programs
    if not names:
        names = [name + option for option in ("", "/compile") for name in STEP_MODELS]
    names = at_hand(names, args.nanogpt)
    if not names:
        raise ValueError("no program is left; name one that is at hand")
    programs = {"matmuls": Program(partial(make_matmuls, make_config(args)))}
    programs |= {name: training_program(name, args) for name in names}
    results = interleave(programs, args.rounds, args.device)
    peak = results["matmuls"]["flop/s"]
    targets = make_config(args).targets_per_update

    def columns(program):
        seconds = program["seconds"]
        speed = program["flops"] / seconds
        return {
            "tokens/s": f"{np.median(targets / seconds):,.0f}",
            "GFLOP/s": f"{np.median(speed) / 1e9:,.0f}",
            "MFU": f"{np.median(speed / peak):.1%}",
            "peak GB": f"{program['peak_bytes'][-1] / 1e9:.2f}",
            **{part: f"{np.median(program[part] / seconds):.2%}" for part in PARTS},
        }

    reached = median_and_quartiles(peak / 1e9, 0)
    print(f"MFU is of the {reached} GFLOP/s of the bare matrix products.\n")
    return compare(results, names, columns), results


# ---------------- From the command to the first step

BEFORE_THE_LOOP = "update    "  # how the last line before the loop begins
FIRST_UPDATE = "update 1/1"  # and the first one in it


def time_a_start(command):
    """The seconds until train.py's loop begins and until its first update is made."""
    started = time.perf_counter()
    seconds = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            for beginning in (BEFORE_THE_LOOP, FIRST_UPDATE):
                if line.startswith(beginning):
                    seconds[beginning] = time.perf_counter() - started
    if len(seconds) < 2:
        raise ValueError("train.py made no step; mend what it says above")
    return seconds[BEFORE_THE_LOOP], seconds[FIRST_UPDATE]


def start(args):
    """train.py on a little data, without compile: the seconds until its first step begins."""
    config = make_config(args, compile=False, max_updates=1, eval_windows=1)
    options = [f"--{key}={value}" for key, value in vars(config).items() if value is not None]
    begins = []
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        data = ["--source=tests", "--tokenizer=bpe:512", "--val_share=0.3", f"--out={folder}/data"]
        subprocess.run([sys.executable, "prepare.py", *data], cwd=ROOT, check=True)
        for number in range(args.rounds):
            paths = [f"--data={folder}/data", f"--out_dir={folder}/{number}"]
            command = [sys.executable, "-u", "train.py", *options, *paths]
            begin, end = time_a_start(command)
            begins.append(begin)
            ends.append(end)
    row = {
        "s until the first step": median_and_quartiles(begins),
        "s until its end": median_and_quartiles(ends),
    }
    return [row], {"train.py": {"begins": np.array(begins), "ends": np.array(ends)}}


# ---------------- Decoding

PROMPT_LENGTH = 32


def make_decoding(name, config, new_tokens):
    """The function of a turn of decoding: a greedy continuation of one prompt, batch 1, float32,
    by ours or by llama of the same weights."""
    device = pick_device(config.device)
    ours = Transformer(config)
    prompt = torch.arange(1, PROMPT_LENGTH + 1, device=device)[None]  # (1, T)
    new_tokens = min(new_tokens, config.max_seq_len - PROMPT_LENGTH)
    if name == "llama":
        model = make_llama(config)
        model.load_state_dict(hf_state(ours))
    else:
        model = ours
    model.to(device).eval()

    def decode():
        if name == "llama":
            return llama_continuation(model, prompt, new_tokens)
        return [next_ids.item() for next_ids in model.generate(prompt, new_tokens, temperature=0)]

    def take_turn():
        seconds, ids = timed(decode, device)
        return {"seconds": seconds, "ids": ids, "bytes_per_token": 4 * count_weights(model)}

    return take_turn


def make_bandwidth(device_name):
    """The function of a turn of reading: the bytes per second of the best of eight sums over a
    gigabyte."""
    device = pick_device(device_name)
    numbers = torch.ones(2**28, device=device)

    def take_turn():
        seconds = min(timed(numbers.sum, device)[0] for _ in range(8))
        return {"bytes/s": 2**30 / seconds}

    return take_turn


def decode(args):
    """Greedy decoding beside a peer: a row for each, and all turns."""
    names = at_hand(["learned", "llama"], args.nanogpt)
    config = make_config(args)
    programs = {"bandwidth": Program(partial(make_bandwidth, args.device))}
    for name in names:
        programs[name] = Program(partial(make_decoding, name, config, args.new_tokens))
    results = interleave(programs, args.rounds, args.device)
    bandwidth = results["bandwidth"]["bytes/s"]

    def columns(program):
        reached = program["ids"].shape[1] / program["seconds"]
        limit = bandwidth / program["bytes_per_token"]
        return {
            "tokens/s": median_and_quartiles(reached, 1),
            "limit": f"{np.median(limit):,.1f}",
            "of it": f"{np.median(reached / limit):.1%}",
        }

    speed = median_and_quartiles(bandwidth / 1e9, 1)
    print(f"The limit is to read every matrix once a token, at {speed} GB/s.\n")
    return compare(results, names, columns), results


# ---------------- Preparation

ENCODERS = ("prepare.py", "encode_batch", "encode_batch_fast")


def opening_texts(source, megabytes):
    """The first megabytes of a source, document by document, as text."""
    texts = []
    room = megabytes * 1e6
    for document in documents_of(source):
        texts.append(document.decode("utf-8", "replace"))
        room -= len(document)
        if room <= 0:
            break
    return texts


def make_encoding(name, source, megabytes, tokenizer_file):
    """The function of a turn of encoding: all texts to ids, by prepare.py's threads or in one
    call of `tokenizers`."""
    texts = opening_texts(source, megabytes)
    tokenizer = load_tokenizer(tokenizer_file)
    encode_one, _ = make_encoder(tokenizer)

    def encode():
        if name == "prepare.py":
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(encoded(texts, encode_one, pool))
        batch = getattr(tokenizer, name)(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def take_turn():
        seconds, rows = timed(encode, torch.device("cpu"))
        lists = [[int(token_id) for token_id in row] for row in rows]
        digest = hashlib.sha256(repr(lists).encode()).hexdigest()
        size = sum(len(text.encode()) for text in texts)
        return {"seconds": seconds, "ids": digest, "bytes": size}

    return take_turn


def preparation(args):
    """Text to ids: a row for each way, and all turns."""
    programs = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        make_tokenizer(args.tokenizer, path, opening_texts(args.source, args.megabytes))
        for name in ENCODERS:
            make = partial(make_encoding, name, args.source, args.megabytes, path)
            programs[name] = Program(make)
        results = interleave(programs, args.rounds, args.device)

    def columns(program):
        return {"MB/s": median_and_quartiles(program["bytes"] / 1e6 / program["seconds"])}

    return compare(results, ENCODERS, columns), results


# ---------------- Gradients: what is fast must also be right

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # of |difference| / |gradient|

# Also shared keys, and a loss in several chunks.
CASES = [
    ModelConfig(
        input_layer="learned",
        vocab_size=512,
        d_model=64,
        n_layers=2,
        n_heads=4,
        d_ff=160,
        max_seq_len=48,
    ),
    ModelConfig(
        input_layer="gf2",
        vocab_size=1000,
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        d_ff=320,
        max_seq_len=64,
    ),
    ModelConfig(
        input_layer="binary16",
        d_model=64,
        n_layers=1,
        n_heads=2,
        d_ff=128,
        max_seq_len=512,
    ),
]


def draw_case(model, seed):
    """(ids, targets, weights) of one comparison, drawn from a seed."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(config.vocab_size, (4, config.max_seq_len + 1), generator=generator)
    rows[0, :3] = 0  # the zero code in front of a row
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.05
        weights[name] = noise + (parameter.dim() == 1)
    return rows[:, :-1], rows[:, 1:], weights


def worst_error(config, dtype, compiled, device, seeds):
    """(the greatest |difference| / |gradient| from eager float64, whose it is)."""
    exact = Transformer(config).double().to(device)
    ours = Transformer(config).to(device)
    model = torch.compile(ours) if compiled else ours
    errors = {}
    for seed in range(seeds):
        ids, targets, weights = draw_case(ours, seed)
        ids, targets = ids.to(device), targets.to(device)
        for copy in (exact, ours):
            copy.load_state_dict(weights)
            copy.zero_grad()
        F.cross_entropy(exact(ids)[0].flatten(0, 1), targets.flatten()).backward()
        with autocast(device, dtype):
            _, loss = model(ids, targets)
        loss.backward()
        pairs = zip(ours.named_parameters(), exact.parameters(), strict=True)
        for (name, parameter), reference in pairs:
            difference = parameter.grad.double() - reference.grad
            error = difference.norm() / reference.grad.norm()
            errors[f"{name}, seed {seed}"] = error.nan_to_num(torch.inf).item()
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def gradients(args):
    """Every gradient of ours, eager and compiled. Raises ValueError if one is out of bounds."""
    device = pick_device(args.device)
    rows = []
    for config, dtype, compiled in itertools.product(CASES, BOUNDS, (False, True)):
        error, whose = worst_error(config, dtype, compiled, device, args.rounds)
        how = f"{config.input_layer}, {dtype}, {'compiled' if compiled else 'eager'}"
        if error > BOUNDS[dtype]:
            raise ValueError(
                f"the gradient of {whose}, of {how}, is off by {error:.2g} of its size; "
                "mend that before timing anything"
            )
        row = {"model": how, "worst error": f"{error:.1e}", "bound": BOUNDS[dtype], "of": whose}
        rows.append(row)
    return rows, {}


# ---------------- The command

WORKS = {
    "step": step,
    "start": start,
    "decode": decode,
    "prepare": preparation,
    "gradients": gradients,
}


def markdown(rows):
    """Rows {column: value} as a Markdown table."""
    cells = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    header, *others = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([header, "|---" * len(rows[0]) + "|", *others])


def bench(args):
    """Do all works that were asked for, print their tables and write --out."""
    if min(args.rounds, args.steps, args.new_tokens) < 1:
        raise ValueError("--rounds, --steps or --new_tokens is below 1; give at least 1")
    if args.out:
        args.out.touch()  # what cannot be written fails before the work
    report = circumstances()
    for key, value in report.items():
        print(f"{key}: {value}", flush=True)
    for work in args.works:
        print(f"\n## {work}\n")
        rows, results = WORKS[work](args)
        print(markdown(rows))
        turns = {
            name: {key: values.tolist() for key, values in program.items()}
            for name, program in results.items()
        }
        report[work] = {"table": rows, "turns": turns}
    if args.out:
        write_json(args.out, report)


def main(argv=None):
    parser = make_parser(__doc__)
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
        bench(args)


if __name__ == "__main__":
    main()
