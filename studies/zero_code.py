"""The zero code: what a separator whose code is all zeros does in a model without biases.

    python studies/zero_code.py        under a minute; needs data/stdlib, or --data DIR
    python studies/zero_code.py --redraw       only the picture, from the zero_code.json in --out

Id 0, the separator, has the code 0 in binary16 and in gf2. The page that this prints demonstrates
what follows, and counts how often it happens in real shards. zero_code.json and zero_code.png go
to --out. A difference is the greatest one over all elements.

The models are small, with the paper's vocabulary and depth. Their matrices are those of
`Transformer.initialise` times sqrt(2048 / width), so that products are as large as at the paper's
width. At a leading separator RMSNorm's slope is 1/sqrt(eps), the MLP's is 0, and attention sees
the position itself alone. So going backward a block multiplies the gradient there by about

    1/sqrt(eps) x 0.02^2 x 2048 / sqrt(2 n_layers)

at the initial weights: 37 at 24 blocks. Where training doubles the matrices it is 4 times that.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from codes import LinearCode, code_table, ids_from_codes
from model import LinearCodeInput, ModelConfig, Transformer
from nanocodes.batches import window_count
from nanocodes.command import make_parser, refusals
from nanocodes.device import autocast
from nanocodes.files import read_json, write_json
from nanocodes.pictures import BLACK, GREY, ORANGE, colour_of, new_figure, save_figure
from nanocodes.report import table
from nanocodes.shards import open_shards
from studies.common import add_redraw_option, check_keys

SHAPE = {"vocab_size": 49_152, "d_model": 64, "n_heads": 4, "d_ff": 256, "max_seq_len": 64}
PAPER_WIDTH = 2048
DEPTH = 24  # the paper's
DEPTHS = range(4, 49, 4)  # of the picture's second panel
SCALES = {1: "initial weights", 2: "matrices twice as large"}
DTYPES = ("float64", "float32", "bfloat16")
FIXED = ("binary16", "gf2")

# ---------------- Models and ids


def make_model(input_layer, n_layers=DEPTH, scale=1, replacement=None, **changes):
    """A Transformer with matrices of the paper's size, times `scale`; a table stays as drawn.

    `replacement` takes the place of the input layer of that name.
    """
    config = ModelConfig(input_layer=input_layer, n_layers=n_layers, **SHAPE, **changes)
    model = Transformer(config, replacement)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "input.weight":
            parameter.data *= scale * (PAPER_WIDTH / config.d_model) ** 0.5
    return model


def draw_ids(length, seed):
    """A row of ids without the separator, (1, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SHAPE["vocab_size"], (1, length), generator=generator)


# ---------------- Forward


def largest(values):
    """The greatest absolute value of a tensor."""
    return values.abs().max().item()


@torch.no_grad()
def only_separators(model, length):
    """Of a row of separators: the greatest |residual| after a block, the greatest |logit| and the
    mean loss."""
    ids = torch.zeros(1, length, dtype=torch.int64)
    x = model.input(ids)
    residual = 0.0
    for block in model.blocks:  # 0 by itself: the mask is in model.hidden
        x = block(x, model.cos[:length], model.sin[:length])
        residual = max(residual, largest(x))
    loss = model(ids, draw_ids(length, 0))[1].item()
    return {
        "residual": residual,
        "logit": largest(model(ids)[0]),
        "loss": loss,
        "loss - ln V": loss - math.log(SHAPE["vocab_size"]),
    }


def attention_plus(attention, h, rotations, n):
    """An attention's output for h (T, d_model), with n more in each softmax's denominator.

    `rotations` (T, 1, head_dim / 2) are complex: a pair of RoPE is a complex number here.
    """
    head_dim = attention.head_dim
    q = (h @ attention.q_proj.weight.T).unflatten(1, (-1, head_dim))  # (T, h, head_dim)
    k = (h @ attention.k_proj.weight.T).unflatten(1, (-1, head_dim))
    v = (h @ attention.v_proj.weight.T).unflatten(1, (-1, head_dim))
    q = torch.complex(*q.chunk(2, dim=-1)) * rotations  # (T, h, head_dim / 2)
    k = torch.complex(*k.chunk(2, dim=-1)) * rotations
    scores = torch.einsum("qhd,khd->hqk", q, k.conj()).real / head_dim**0.5  # (h, T, T)
    weights = scores.exp().tril()
    weights = weights / (n + weights.sum(dim=-1, keepdim=True))
    y = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return y @ attention.o_proj.weight.T  # (T, d_model)


@torch.no_grad()
def softmax_plus(model, ids, n):
    """Logits (T, V) of ids (T,) by the statement: nothing is in front, but each softmax has n more
    in its denominator and positions count from n."""
    rotations = torch.complex(model.cos, model.sin)[n : n + len(ids), None]  # (T, 1, head_dim / 2)
    x = model.input(ids[None])[0]  # (T, d_model)
    for block in model.blocks:
        x = x + attention_plus(block.attention, block.attention_norm(x), rotations, n)
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


@torch.no_grad()
def padding(model, ids, n):
    """How far the logits of ids (1, T) are, with n separators on the left, from softmax plus n and
    from those of ids alone, and with n on the right from those of ids alone."""
    zeros = ids.new_zeros(1, n)
    alone = model(ids)[0][0]
    left = model(torch.cat((zeros, ids), dim=1))[0][0, n:]
    right = model(torch.cat((ids, zeros), dim=1))[0][0, :-n]
    return {
        "left, from softmax plus n": largest(left - softmax_plus(model, ids[0], n)),
        "left, from none": largest(left - alone),
        "right, from none": largest(right - alone),
    }


@torch.no_grad()
def middle_separator(model, ids, place):
    """How far the first attention's output at a separator in ids (1, T) is from that of the plain
    mean of all values up to there, and how large that is."""
    ids = ids.clone()
    ids[0, place] = 0
    length = ids.shape[1]
    attention = model.blocks[0].attention
    h = model.blocks[0].attention_norm(model.input(ids))
    mean = attention.o_proj(attention.v_proj(h)[0, : place + 1].mean(dim=0))
    taken = attention(h, model.cos[:length], model.sin[:length])[0, place]
    return {"difference": largest(taken - mean), "size": largest(mean)}


# ---------------- Backward


@dataclass
class Gradients:
    """What a backward pass finds of a row that begins with a separator."""

    norms: list  # of the gradient that arrives there in the residual after each block
    parameters: dict  # name -> gradient


def leading_separator(model, dtype, masked):
    """The Gradients of a model, in float64, float32 or, as autocast over that, bfloat16."""
    ids = draw_ids(64, 1)
    ids[0, 0] = 0
    targets = draw_ids(64, 2)
    residuals = []

    def keep(module, inputs):
        inputs[0].retain_grad()
        residuals.append(inputs[0])

    hooks = [part.register_forward_pre_hook(keep) for part in (*model.blocks[1:], model.norm)]
    model.to(torch.float64 if dtype == "float64" else torch.float32).zero_grad()
    zero_id = model.input.zero_id
    if not masked:
        model.input.zero_id = None
    products = torch.bfloat16 if dtype == "bfloat16" else torch.float32  # of autocast
    with autocast(torch.device("cpu"), products):
        loss = model(ids, targets)[1]
    loss.backward()
    model.input.zero_id = zero_id
    for hook in hooks:
        hook.remove()
    return Gradients(
        norms=[residual.grad[0, 0].double().norm().item() for residual in residuals],
        parameters={name: parameter.grad for name, parameter in model.named_parameters()},
    )


def growth_per_block(norms):
    """By how much a block multiplies the gradient on its way backward."""
    return (norms[0] / norms[-1]) ** (1 / (len(norms) - 1))


def finite_names(gradients):
    """The parameters whose gradient is finite throughout."""
    return [name for name, gradient in gradients.items() if gradient.isfinite().all()]


@dataclass
class MaskComparison:
    row: dict  # of the page
    without: list  # norms after each block without the mask; None, as in JSON, if not finite
    masked: list  # the same with it


def compare_mask(model, dtype):
    """The MaskComparison of a model. "same bits" counts those finite gradients without the mask
    that are equal to those with it."""
    without = leading_separator(model, dtype, masked=False)
    masked = leading_separator(model, dtype, masked=True)
    norms = [norm if math.isfinite(norm) else None for norm in without.norms]
    finite = finite_names(without.parameters)
    same_bits = [
        name for name in finite if torch.equal(without.parameters[name], masked.parameters[name])
    ]
    row = {
        "no mask": norms[0],
        "finite down to block": norms.count(None) + 1,
        "mask": masked.norms[0],
        "parameters": len(without.parameters),
        "finite, no mask": len(finite),
        "same bits": len(same_bits),
        "finite, mask": len(finite_names(masked.parameters)),
    }
    return MaskComparison(row, norms, masked.norms)


def without_zero_code():
    """name -> model: gf2 for comparison, and three inputs in which the separator is not 0."""
    V = SHAPE["vocab_size"]
    offset = int(ids_from_codes(code_table("gf2", V + 1))[V])  # gives the id V the zero code
    signs = LinearCode(np.eye(16), low=-1.0, high=1.0)
    signs_input = LinearCodeInput(signs, V, SHAPE["d_model"])
    return {
        "gf2": make_model("gf2"),
        f"gf2, offset {offset}": make_model("gf2", code_offset=offset),
        "binary16, -1 and 1": make_model("binary16", replacement=signs_input),
        "learned": make_model("learned"),
    }


# ---------------- Real rows


def leading_runs(folder, length):
    """How many windows of the train split begin with a run of separators, and how long it is.

    Raises ValueError if the data or the length do not fit.
    """
    if length < 1:
        raise ValueError(f"length is {length}; give 1 or more")
    train = open_shards(folder, "train")
    windows = window_count(train, length)
    runs = Counter()  # {length of the run: windows}
    for start in range(0, windows * length, length):
        separators = train.read(start, start + length) == train.meta["separator"]
        runs[length if separators.all() else int(separators.argmin())] += 1
    begin_so = windows - runs.pop(0, 0)
    entry = train.meta["splits"]["train"]
    share = entry["documents"] / entry["tokens"]  # a separator ends each document
    return {
        "of tokens": length,
        "windows": windows,
        "begin so": begin_so,
        "expected": windows * share,
        "share": begin_so / windows,
        "1 / mean document": share,
        "by length of the run": dict(sorted(runs.items())),
    }


# ---------------- Measuring

TITLES = {
    "alone": "1. A row of separators alone keeps a residual of 0: the loss is ln V",
    "padding": "2. n separators on the left are n more in each denominator, on the right nothing",
    "middle": "3. A separator in the middle takes the plain mean in the first block",
    "mask": "4. Norm of the gradient at a leading separator after the first block; all gradients",
    "without": "5. Inputs without a zero code beside gf2: 8 separators alone; no mask; n = 1",
    "rows": "6. Windows of the train split that begin with the separator",
}


@dataclass
class Findings:
    tables: dict  # name in TITLES -> row -> column -> value
    by_block: dict  # model and dtype -> [norms without the mask, with it], after each block
    by_depth: dict  # words of SCALES -> norms without the mask after the first block, per DEPTHS


def measure_forward(tables):
    """Add the tables "alone", "padding" and "middle"."""
    models = {name: make_model(name) for name in FIXED}
    for name, model in models.items():
        for count in (1, 8):
            tables["alone"][f"{name}, {count} of them"] = only_separators(model, count)
    ids = draw_ids(16, 3)
    for name, model in models.items():
        model.double()
        for n in (1, 2, 5):
            tables["padding"][f"{name}, n = {n}"] = padding(model, ids, n)
        tables["middle"][name] = middle_separator(model, ids, 8)


def measure_without_zero_code(tables):
    """Add the table "without"."""
    ids = draw_ids(16, 3)
    for name, model in without_zero_code().items():
        norms = leading_separator(model, "float64", masked=False).norms
        row = only_separators(model.float(), 8)
        row["growth per block"] = growth_per_block(norms)
        tables["without"][name] = row | padding(model.double(), ids, 1)


def measure_mask(findings):
    """Add the table "mask" and the two curves."""
    for scale, words in SCALES.items():
        for depth in (DEPTH, 2 * DEPTH):
            for dtype in DTYPES:
                name = f"{depth} blocks, {words}, {dtype}"
                comparison = compare_mask(make_model("gf2", depth, scale), dtype)
                findings.tables["mask"][name] = comparison.row
                findings.by_block[name] = [comparison.without, comparison.masked]
        findings.by_depth[words] = []
        for depth in DEPTHS:
            model = make_model("gf2", depth, scale)
            norms = leading_separator(model, "float64", masked=False).norms
            findings.by_depth[words].append(norms[0])


def measure(folder, length):
    """The Findings, with the windows of a data folder. Raises ValueError to refuse."""
    rows = {str(folder): leading_runs(folder, length)}  # first, since it may refuse
    findings = Findings({name: {} for name in TITLES}, by_block={}, by_depth={})
    findings.tables["rows"] = rows
    measure_forward(findings.tables)
    measure_without_zero_code(findings.tables)
    measure_mask(findings)
    return findings


# ---------------- The page


def figure_in_words(value):
    """A value as text, with as many digits as it deserves."""
    if value is None:
        return "not finite"
    if isinstance(value, float) and value:
        return f"{value:.7g}" if 1e-2 < abs(value) < 1e5 else f"{value:.1e}"
    return str(value)


def report(tables):
    """The page, as Markdown."""
    for name, title in TITLES.items():
        rows = tables[name]
        columns = list(next(iter(rows.values())))
        cells = [[row, *map(figure_in_words, values.values())] for row, values in rows.items()]
        yield f"{title}\n\n{table(['', *columns], cells)}\n"


# All curves are of gf2: one has its colour, the other one that is no input layer's.
SCALE_COLOURS = dict(zip(SCALES.values(), (colour_of("gf2"), ORANGE), strict=True))
DTYPE_LOOKS = {
    "float64": {"linestyle": "-"},
    "float32": {"linestyle": "", "marker": "o", "fillstyle": "none"},
    "bfloat16": {"linestyle": "", "marker": "x"},
}
MASK_LOOK = {"linestyle": ":"}


def draw_blocks(axes, by_block):
    """The gradient after each block, without the mask in each dtype, and with it."""
    for words, colour in SCALE_COLOURS.items():
        for dtype, look in DTYPE_LOOKS.items():
            without, masked = by_block[f"{DEPTH} blocks, {words}, {dtype}"]
            blocks = range(1, len(without) + 1)
            norms = [math.nan if norm is None else norm for norm in without]
            axes.plot(blocks, norms, color=colour, **look)
        axes.plot(blocks, masked, color=colour, **MASK_LOOK)
    for name, look in DTYPE_LOOKS.items():
        axes.plot([], [], color=BLACK, label=f"{name}, without the mask", **look)
    axes.plot([], [], color=BLACK, label="bfloat16, with the mask", **MASK_LOOK)
    axes.set_xlabel("after block")
    axes.set_title(f"{DEPTH} blocks of gf2")


def draw_depths(axes, by_depth):
    """The gradient after the first block of models of more and more blocks."""
    for words, colour in SCALE_COLOURS.items():
        axes.plot(DEPTHS, by_depth[words], color=colour, marker="o", markersize=4, label=words)
    axes.set_xlabel("blocks of the model")
    axes.set_title("After the first block, float64, without the mask")


def draw(by_block, by_depth, path):
    """The gradient from block to block, and after the first block against depth."""
    figure, panels = new_figure(panels=2, width=6.5, height=5.2)
    left, right = panels
    left.sharey(right)
    left.set_yscale("log")
    draw_blocks(left, by_block)
    draw_depths(right, by_depth)
    left.set_ylabel("norm of the gradient at a leading separator")
    left.set_yticks([10.0**exponent for exponent in range(0, 101, 20)])
    largest_number = torch.finfo(torch.float32).max
    for axes in panels:
        label = "largest of float32 and bfloat16"
        axes.axhline(largest_number, color=GREY, linewidth=1, linestyle="--", label=label)
    left.legend(frameon=False, loc="upper right")
    right.legend(frameon=False, loc="upper left")
    save_figure(figure, path)


# ---------------- The command


def study(folder, length, out):
    """Measure, print the page, and write the files. Raises ValueError to refuse."""
    findings = measure(folder, length)
    print("\n".join(report(findings.tables)))
    out.mkdir(parents=True, exist_ok=True)
    values = {"torch": torch.__version__, "shape": SHAPE, **findings.tables}
    values |= {"by_block": findings.by_block, "by_depth": findings.by_depth}
    write_json(out / "zero_code.json", values)
    draw(findings.by_block, findings.by_depth, out / "zero_code.png")
    print(f"Wrote zero_code.json and zero_code.png to {out}")


def redraw(out):
    """Draw zero_code.png from the zero_code.json in `out`."""
    found = read_json(out / "zero_code.json")
    check_keys(out / "zero_code.json", found, {"by_block", "by_depth"})
    draw(found["by_block"], found["by_depth"], out / "zero_code.png")
    print(f"Wrote zero_code.png to {out}")


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    parser.add_argument("--length", type=int, default=256, help="max_seq_len, of the windows")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/zero_code"))
    add_redraw_option(parser, "zero_code")
    args = parser.parse_args(argv)
    with refusals(parser):
        if args.redraw:
            redraw(args.out)
        else:
            study(args.data, args.length, args.out)


if __name__ == "__main__":
    main()
