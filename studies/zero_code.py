"""The zero code: what a separator whose code is all zeros does in a model without biases.

    python studies/zero_code.py        under a minute; needs data/stdlib, or --data DIR

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

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shards
from codes import code_table, ids_from_codes
from device import refusals
from evaluate import COLOURS, table
from model import ModelConfig, Transformer

SHAPE = dict(vocab_size=49_152, d_model=64, n_heads=4, d_ff=256, max_seq_len=64)
DEPTH, DEPTHS = 24, range(4, 49, 4)  # the paper's; those of the second panel
SCALES = {1: "initial weights", 2: "matrices twice as large"}
DTYPES = ("float64", "float32", "bfloat16")
TITLES = dict(
    alone="1. A row of separators alone keeps a residual of 0: the loss is ln V",
    padding="2. n separators on the left are n more in each denominator, on the right nothing",
    middle="3. A separator in the middle takes the plain mean in the first block",
    mask="4. Norm of the gradient at a leading separator after the first block; all gradients",
    without="5. Inputs without a zero code beside gf2: 8 separators alone; no mask; n = 1",
    rows="6. Windows of the train split that begin with the separator",
)


def make_model(input_layer, n_layers=DEPTH, scale=1, **changes):
    """A Transformer with matrices of the paper's size, times `scale`; a table stays as drawn."""
    model = Transformer(ModelConfig(input_layer=input_layer, n_layers=n_layers, **SHAPE, **changes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "input.weight":
            parameter.data *= scale * (2048 / model.config.d_model) ** 0.5
    return model


def draw_ids(length, seed):
    """A row of ids without the separator, (1, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SHAPE["vocab_size"], (1, length), generator=generator)


# ---------------- Forward


@torch.no_grad()
def only_separators(model, length):
    """Greatest |residual| after a block, greatest |logit| and mean loss of a row of separators."""
    ids, greatest = torch.zeros(1, length, dtype=torch.int64), 0.0
    x = model.input(ids)
    for block in model.blocks:  # 0 by itself: the mask is in model.hidden
        x = block(x, model.cos[:length], model.sin[:length])
        greatest = max(greatest, x.abs().max().item())
    loss = model(ids, draw_ids(length, 0))[1].item()
    return {"residual": greatest, "logit": model(ids)[0].abs().max().item(), "loss": loss,
            "loss - ln V": loss - math.log(SHAPE["vocab_size"])}  # fmt: skip


@torch.no_grad()
def softmax_plus(model, ids, n):
    """Logits (T, V) of ids (T,) by the statement: nothing is in front, but each softmax has n more
    in its denominator and positions count from n. A pair of RoPE is a complex number here."""
    T, head_dim = len(ids), model.config.d_model // model.config.n_heads
    turns = torch.complex(model.cos, model.sin)[n : n + T, None]  # (T, 1, head_dim / 2)
    x = model.input.weight[ids].repeat(1, model.input.tiles)  # (T, d_model)
    for block in model.blocks:
        attention, h = block.attention, block.attention_norm(x)
        q, k, v = ((h @ projection.weight.T).view(T, -1, head_dim)  # (T, h, head_dim)
                   for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = (torch.complex(*part.chunk(2, dim=-1)) * turns for part in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k.conj()).real / head_dim**0.5  # (h, T, T)
        weights = scores.exp().tril()
        weights = weights / (n + weights.sum(dim=-1, keepdim=True))
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ attention.o_proj.weight.T
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


@torch.no_grad()
def padding(model, ids, n):
    """How far the logits of ids (1, T) are, with n separators on the left, from softmax plus n and
    from those of ids alone, and with n on the right from those of ids alone."""
    zeros, alone = ids.new_zeros(1, n), model(ids)[0][0]
    left = model(torch.cat((zeros, ids), dim=1))[0][0, n:]
    right = model(torch.cat((ids, zeros), dim=1))[0][0, :-n]
    differences = {"left, from softmax plus n": left - softmax_plus(model, ids[0], n),
                   "left, from none": left - alone, "right, from none": right - alone}  # fmt: skip
    return {name: values.abs().max().item() for name, values in differences.items()}


@torch.no_grad()
def middle_separator(model, ids, place):
    """How far the first attention's output at a separator in ids (1, T) is from that of the plain
    mean of all values up to there, and how large that is."""
    ids, attention, T = ids.clone(), model.blocks[0].attention, ids.shape[1]
    ids[0, place] = 0
    h = model.blocks[0].attention_norm(model.input(ids))
    mean = attention.o_proj(attention.v_proj(h)[0, : place + 1].mean(dim=0))
    taken = attention(h, model.cos[:T], model.sin[:T])[0, place]
    return {"difference": (taken - mean).abs().max().item(), "size": mean.abs().max().item()}


# ---------------- Backward


def leading_separator(model, dtype, masked):
    """A backward pass of a row that begins with a separator: the norm of the gradient that arrives
    there in the residual after each block, and the gradients of all parameters. bfloat16 is
    autocast over float32."""
    ids, targets, residuals, zero_id = draw_ids(64, 1), draw_ids(64, 2), [], model.input.zero_id
    ids[0, 0] = 0

    def keep(module, inputs):
        inputs[0].retain_grad()
        residuals.append(inputs[0])

    hooks = [part.register_forward_pre_hook(keep) for part in (*model.blocks[1:], model.norm)]
    model.to(torch.float64 if dtype == "float64" else torch.float32).zero_grad()
    model.input.zero_id = zero_id if masked else None
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = model(ids, targets)[1]
    loss.backward()
    model.input.zero_id = zero_id
    for hook in hooks:
        hook.remove()
    norms = [residual.grad[0, 0].double().norm().item() for residual in residuals]
    return norms, {name: parameter.grad for name, parameter in model.named_parameters()}


def compare_mask(model, dtype):
    """(row of the page, norms without the mask, with it); what is not finite is None, as in JSON.
    Same bits: how many of the finite gradients without the mask are equal to those with it."""
    (bare, off), (kept, on) = (leading_separator(model, dtype, masked) for masked in (False, True))
    bare = [norm if math.isfinite(norm) else None for norm in bare]
    finite = [[name for name, g in found.items() if g.isfinite().all()] for found in (off, on)]
    same = sum(torch.equal(off[name], on[name]) for name in finite[0])
    row = {"no mask": bare[0], "finite down to block": bare.count(None) + 1, "mask": kept[0],
           "parameters": len(off), "finite, no mask": len(finite[0]), "same bits": same,
           "finite, mask": len(finite[1])}  # fmt: skip
    return row, bare, kept


def without_zero_code():
    """name -> model: gf2 for comparison, and three inputs in which the separator is not 0."""
    V = SHAPE["vocab_size"]
    offset = int(ids_from_codes(code_table("gf2", V + 1))[V])  # gives the id V the zero code
    signs = make_model("binary16")
    signs.input.weight.mul_(2).sub_(1)
    signs.input.zero_id = None
    moved = make_model("gf2", code_offset=offset)
    return {"gf2": make_model("gf2"), f"gf2, offset {offset}": moved, "binary16, -1 and 1": signs,
            "learned": make_model("learned")}  # fmt: skip


# ---------------- Real rows


def leading_runs(folder, length):
    """How many windows of the train split begin with a run of separators, and how long it is.
    Raises ValueError if the data or the length do not fit."""
    if length < 1:
        raise ValueError(f"length is {length}; give 1 or more")
    train = shards.open_shards(folder, "train")
    windows, entry = shards.window_count(train, length), train.meta["splits"]["train"]
    runs = Counter()
    for start in range(0, windows * length, length):
        separators = train.read(start, start + length) == train.meta["separator"]
        runs[length if separators.all() else int(separators.argmin())] += 1
    share = entry["documents"] / entry["tokens"]  # a separator ends each document
    begin = windows - runs.pop(0, 0)
    return {"of tokens": length, "windows": windows, "begin so": begin, "expected": windows * share,
            "share": begin / windows, "1 / mean document": share,
            "by length of the run": dict(sorted(runs.items()))}  # fmt: skip


# ---------------- The page


def measure(folder, length):
    """(name in TITLES -> row -> column -> value, two curves). Raises ValueError to refuse."""
    found = dict(rows={str(folder): leading_runs(folder, length)}, mask={}, without={})
    models, ids = {name: make_model(name) for name in ("binary16", "gf2")}, draw_ids(16, 3)
    found["alone"] = {f"{name}, {count} of them": only_separators(model, count)
                      for name, model in models.items() for count in (1, 8)}  # fmt: skip
    doubles = {name: model.double() for name, model in models.items()}
    found["padding"] = {f"{name}, n = {n}": padding(model, ids, n)
                        for name, model in doubles.items() for n in (1, 2, 5)}  # fmt: skip
    found["middle"] = {name: middle_separator(model, ids, 8) for name, model in doubles.items()}
    for name, model in without_zero_code().items():
        norms, row = leading_separator(model, "float64", masked=False)[0], found["without"]
        row[name] = only_separators(model.float(), 8)
        row[name]["growth per block"] = (norms[0] / norms[-1]) ** (1 / (len(norms) - 1))
        row[name] |= padding(model.double(), ids, 1)
    by_block, by_depth = {}, {}
    for scale, words in SCALES.items():
        for depth in (DEPTH, 2 * DEPTH):
            for dtype in DTYPES:
                name, model = f"{depth} blocks, {words}, {dtype}", make_model("gf2", depth, scale)
                found["mask"][name], *by_block[name] = compare_mask(model, dtype)
        deep = [make_model("gf2", depth, scale) for depth in DEPTHS]
        by_depth[words] = [leading_separator(m, "float64", masked=False)[0][0] for m in deep]
    return found, by_block, by_depth


def in_words(value):
    """A value as text, with as many digits as it deserves."""
    if value is None:
        return "not finite"
    if isinstance(value, float) and value:
        return f"{value:.7g}" if 1e-2 < abs(value) < 1e5 else f"{value:.1e}"
    return str(value)


def draw(by_block, by_depth, path):
    """The gradient from block to block, and after the first block against depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for colour, words in zip(COLOURS, SCALES.values(), strict=False):
        for dtype, line, marker in zip(DTYPES, ("-", "", ""), ("", "o", "x"), strict=True):
            bare, masked = by_block[f"{DEPTH} blocks, {words}, {dtype}"]
            left.plot(range(1, DEPTH + 1), bare, color=colour, linestyle=line, marker=marker,
                      fillstyle="none", label=f"{words}, {dtype}")  # fmt: skip
        left.plot(range(1, DEPTH + 1), masked, color=colour, linestyle=":", label=f"{words}, mask")
        right.plot(DEPTHS, by_depth[words], color=colour, marker="o", markersize=4, label=words)
    left.set(xlabel="after block", ylabel="norm of the gradient at a leading separator",
             yscale="log", title=f"{DEPTH} blocks")  # fmt: skip
    right.set(xlabel="blocks", title="After the first block, float64, without the mask")
    for axis in (left, right):
        axis.axhline(torch.finfo(torch.float32).max, color="black", linewidth=0.8,
                     label="largest of float32 and bfloat16")  # fmt: skip
        axis.grid(True, alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--data", metavar="DIR", default="data/stdlib", help="see prepare.py")
    parser.add_argument("--length", type=int, default=256, help="max_seq_len, of the windows")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/zero_code"))
    args = parser.parse_args(argv)
    with refusals(parser):
        found, by_block, by_depth = measure(args.data, args.length)
        for name, title in TITLES.items():
            columns = list(next(iter(found[name].values())))
            lines = [[row, *map(in_words, values.values())] for row, values in found[name].items()]
            print(f"{title}\n\n{table(['', *columns], lines)}\n")
        args.out.mkdir(parents=True, exist_ok=True)
        shards.write_json(args.out / "zero_code.json",
                          dict(torch=torch.__version__, shape=SHAPE, **found, by_block=by_block,
                               by_depth=by_depth))  # fmt: skip
        draw(by_block, by_depth, args.out / "zero_code.png")
        print(f"Wrote zero_code.json and zero_code.png to {args.out}")


if __name__ == "__main__":
    main()
