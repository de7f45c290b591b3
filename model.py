"""The model: a decoder-only Transformer in which nothing varies but the input layer.

    ids (B, T) -> input layer -> n_layers x Block -> RMSNorm -> head -> logits (B, T, V)

The block is that of Llama: norms before attention and SwiGLU, rotary positions, no biases.

B    rows of a batch                       T    positions of a row, at most max_seq_len
V    vocab_size                            K    numbers in a fixed code, repeated to d_model
h    heads: n_heads, or n_kv_heads for keys and values; each has head_dim = d_model / n_heads
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import nn
from torch.nn import RMSNorm
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from codes import LINEAR_CODES, check_vocab_size, linear_code, matrix_from_hex, zero_id
from nanocodes.checkpoint import find_checkpoint, read_weights, refused_unless_whole
from nanocodes.config import check_fields
from nanocodes.files import read_json
from nanocodes.head_loss import last_logits, mean_loss, target_losses


@dataclass(kw_only=True)
class ModelConfig:
    """The model's shape, by default the paper's. Raises ValueError if it cannot be built."""

    vocab_size: int = 49_152  # V, entries of the vocabulary
    d_model: int = 2048  # width of the residual stream
    n_layers: int = 24  # blocks
    n_heads: int = 32  # query heads of an attention
    n_kv_heads: int | None = None  # key and value heads; none means n_heads
    d_ff: int = 8192  # width inside the SwiGLU
    max_seq_len: int = 2048  # the context length in tokens
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in every RMSNorm
    input_layer: str = "learned"  # learned, binary16, gf2, signs<K>: see INPUT_LAYERS
    code_bits: int = 16  # bits of a token id that enter its code
    code_seed: int = 12345  # seed of the matrix of gf2 and signs
    code_matrix: str | None = None  # the matrix of gf2 or signs16 by hand, 16 hex words
    code_offset: int = 0  # the vector b that gf2 and signs add, as an integer
    init_seed: int = 1337  # seed of the initial weights

    def __post_init__(self):
        check_fields(self)
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} is no multiple of 2 x n_heads {self.n_heads}")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads {self.n_kv_heads} must divide n_heads {self.n_heads}")
        if self.input_layer not in INPUT_LAYERS:
            names = ", ".join(INPUT_LAYERS)
            raise ValueError(f"input_layer {self.input_layer!r} is not one of {names}")


# ---------------- The input layer: all that the paper varies. There are two kinds


class LinearCodeInput(nn.Module):
    """Token id t -> A code(t) + b over GF(2), computed as it comes, and repeated to d_model.

    It holds the matrix A and nothing of the size of V, and no checkpoint stores it.
    """

    def __init__(self, code, vocab_size, d_model):
        super().__init__()
        width, bits = code.matrix.shape
        check_vocab_size(vocab_size, bits)
        self.vocab_size = vocab_size
        self.tiles = tiles_of(width, d_model)
        self.zero_id = zero_id(code, vocab_size)  # whose numbers are all 0
        constants = {
            "matrix": code.matrix,  # A, (K, bits)
            "offset": code.bits(np.array(0)),  # b, (K,), since code(0) is 0
            "low": np.array(code.low),
            "high": np.array(code.high),
        }
        for name, values in constants.items():
            # from_numpy, since it makes a tensor on the CPU also under torch.device("meta").
            buffer = torch.from_numpy(values.astype(np.float32))
            self.register_buffer(name, buffer, persistent=False)

    def values(self, ids):  # (B, T)
        """The numbers of LinearCode.values, here as a tensor on the ids' device."""
        places = torch.arange(self.matrix.shape[1], device=ids.device)
        bits = (ids.unsqueeze(-1) >> places) & 1  # (B, T, bits)
        # A sum of so few ones is exact in every dtype, also in the bfloat16 of autocast.
        sums = bits.to(self.matrix.dtype) @ self.matrix.T + self.offset  # (B, T, K)
        return torch.where(sums % 2 == 1, self.high, self.low)

    def forward(self, ids):  # (B, T)
        return self.values(ids).repeat(1, 1, self.tiles)  # (B, T, d_model)

    def table(self):
        """The vectors of all ids, (V, d_model), as a table would hold them."""
        ids = torch.arange(self.vocab_size, device=self.matrix.device)
        return self(ids[None])[0]


class TableInput(nn.Module):
    """Token id -> its row of a table (V, K), repeated to d_model.

    A trainable table is a parameter; any other is a buffer, which no checkpoint stores.
    """

    def __init__(self, values, d_model, trainable=False):
        super().__init__()
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values.astype(np.float32))
        self.vocab_size, width = values.shape
        self.tiles = tiles_of(width, d_model)
        self.zero_id = None
        if trainable:
            self.weight = nn.Parameter(values)
        else:
            self.register_buffer("weight", values, persistent=False)
            zero_rows = (values == 0).all(dim=1).nonzero().flatten().tolist()
            self.zero_id = next(iter(zero_rows), None)

    def forward(self, ids):  # (B, T)
        return F.embedding(ids, self.weight).repeat(1, 1, self.tiles)  # (B, T, d_model)

    def table(self):
        """The vectors of all ids, (V, d_model)."""
        return self.weight.detach().repeat(1, self.tiles)


def tiles_of(width, d_model):
    """How often K numbers are repeated to fill d_model."""
    if d_model % width:
        raise ValueError(
            f"d_model {d_model} is no multiple of the code width {width}; "
            "choose an input_layer whose width divides it"
        )
    return d_model // width


def learned(config):
    """The trainable table, N(0, 0.02), drawn by a generator of its own: see initialise."""
    if config.code_matrix is not None or config.code_offset:
        raise ValueError("a learned table has neither matrix nor offset; drop them")
    table = torch.empty(config.vocab_size, config.d_model)
    if not table.is_meta:
        table.normal_(0, 0.02, generator=torch.Generator().manual_seed(config.init_seed + 1))
    return TableInput(table, config.d_model, trainable=True)


def coded(config):
    """The linear code of codes.py that input_layer names."""
    matrix = None
    if config.code_matrix is not None:
        matrix = matrix_from_hex(config.code_matrix, config.code_bits)
    code = linear_code(
        config.input_layer,
        bits=config.code_bits,
        seed=config.code_seed,
        matrix=matrix,
        offset=config.code_offset,
    )
    return LinearCodeInput(code, config.vocab_size, config.d_model)


# A name for each function from a config to an input layer; a new one is a line here.
INPUT_LAYERS = {"learned": learned} | dict.fromkeys(LINEAR_CODES, coded)


# ---------------- The backbone


def rope_tables(length, head_dim, theta):
    """cos and sin of position t times frequency theta^(-2i/head_dim), (T, head_dim / 2) each."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(length, device="cpu"), frequencies)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):  # (B, h, T, head_dim), (T, head_dim / 2) twice
    """Turn the pair x[i], x[i + head_dim/2] by its position's angle: the half-split layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention. With fewer key/value heads than heads, neighbours share one."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.d_model // config.n_heads
        kv_width = (config.n_kv_heads or config.n_heads) * self.head_dim
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def split_heads(self, x):  # (B, T, h * head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, h, T, head_dim)

    def forward(self, x, cos, sin, cache=None):
        """x (B, T, d_model). `cache` is a list: empty, or the keys and values of all positions
        before these; it is brought up to date."""
        q = rotate(self.split_heads(self.q_proj(x)), cos, sin)
        k = rotate(self.split_heads(self.k_proj(x)), cos, sin)
        v = self.split_heads(self.v_proj(x))
        if cache is not None:
            if cache:
                k = torch.cat((cache[0], k), dim=2)
                v = torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
        T = q.shape[2]
        past = k.shape[2] - T
        mask = None
        if past:  # is_causal counts from the first key, not from the first new one
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not past, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, d_model)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x, cos, sin, cache=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The language model, initialised when constructed; state_dict holds exactly its parameters.

    `input_layer` replaces the one that config.input_layer names.
    """

    def __init__(self, config, input_layer=None):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # True: recompute each block in the backward pass
        self.input = input_layer or INPUT_LAYERS[config.input_layer](config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        head_dim = config.d_model // config.n_heads
        cos, sin = rope_tables(config.max_seq_len, head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        """Draw all weights but the input's from init_seed, on the CPU, so that all devices start
        alike:

            norms                  1
            o_proj, down_proj      N(0, 0.02 / sqrt(2 n_layers))
            every other matrix     N(0, 0.02)
        """
        # A generator that the input layer has no part in: with one seed, these weights are bit
        # for bit the same for every input layer.
        generator = torch.Generator().manual_seed(self.config.init_seed)
        for name, parameter in self.named_parameters():
            if name.startswith("input.") or parameter.is_meta:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.config.n_layers) ** 0.5 if into_residual else 0.02
                parameter.normal_(0, std, generator=generator)

    def hidden(self, ids, cache=None):
        """ids (B, T) -> what the head reads (B, T, d_model). `cache`: None, or a list per block."""
        past = cache[0][0].shape[2] if cache and cache[0] else 0
        end = past + ids.shape[1]
        if end > len(self.cos):
            raise ValueError(f"{end} tokens exceed max_seq_len {len(self.cos)}; use fewer")
        cos, sin = self.cos[past:end], self.sin[past:end]
        x = self.input(ids)
        # Positions before the first nonzero code are exactly 0 in every block: no parameter gets
        # a gradient from them. But RMSNorm's slope at 0 is 1/sqrt(eps), 316, and block upon block
        # of it overflows going backward. A factor 0 after each block cuts that and changes nothing.
        mask = None
        if self.input.zero_id is not None and cache is None:
            mask = ((ids != self.input.zero_id).cumsum(dim=1) > 0).unsqueeze(-1)  # (B, T, 1)
        for i, block in enumerate(self.blocks):
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin, None if cache is None else cache[i])
            x = x if mask is None else x * mask
        return self.norm(x)

    def head_inputs(self, ids):
        """The two factors of the logits: hidden (B x T, d_model) and the head's weight
        (V, d_model), both in the dtype of autocast where that is on."""
        hidden, weight = self.hidden(ids).flatten(0, 1), self.head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return hidden, weight

    def losses(self, ids, targets):
        """-ln p of every target in nats, (B, T), without gradients."""
        return target_losses(*self.head_inputs(ids), targets.flatten()).view_as(targets)

    def forward(self, ids, targets=None):
        """(logits (B, T, V), None), or with targets (None, their mean loss in nats)."""
        if targets is None:
            return self.head(self.hidden(ids)), None
        return None, mean_loss(*self.head_inputs(ids), targets.flatten())

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Yield the next ids (B,), on the CPU, one after another behind the prompt ids (B, T).
        temperature 0 takes the likeliest; top_k keeps so many; `generator` is of the CPU."""
        cache = [[] for _ in self.blocks]
        for _ in range(max_new_tokens):
            logits = last_logits(self.hidden(ids, cache)[:, -1], self.head.weight)  # (B, V)
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits[logits < least] = -torch.inf
            next_ids = logits.argmax(dim=-1)
            if temperature > 0:
                probabilities = (logits / temperature).softmax(dim=-1)
                next_ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            yield next_ids
            ids = next_ids[:, None].to(ids.device)


def load_checkpoint(path, device="cpu"):
    """The Transformer of a run or step folder, float32, in eval mode. Executes nothing."""
    step = find_checkpoint(path)
    with refused_unless_whole(step):
        saved = read_json(step / "config.json")
        config = ModelConfig(**{field.name: saved[field.name] for field in fields(ModelConfig)})
        with torch.device("meta"):  # takes no memory before the shapes are compared
            model = Transformer(config)
        weights = read_weights(step, model)
    model.load_state_dict(weights, assign=True)
    return model.to(device, torch.float32).eval()
