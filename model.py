"""The model: a decoder-only Transformer in which nothing varies but the input layer.

    ids (B, T) -> input layer -> n_layers x Block -> RMSNorm -> head -> logits (B, T, V)

The block is Llama's: norms before attention and SwiGLU, rotary positions, no biases.
Letters in the shapes: B rows, T positions, V vocabulary, K code width, h heads.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import RMSNorm
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from codes import CODES, code_table, matrix_from_hex
from loss import MeanLoss, target_losses

INPUT_LAYERS = ("learned", *CODES)


def option(default, line, least=0, most=2**31 - 1):
    """A config field: its default, the line that --help prints, and a number's range."""
    return field(default=default, metadata={"help": line, "range": (least, most)})


@dataclass(kw_only=True)
class ModelConfig:
    """The model's shape, by default the paper's. Raises ValueError if it cannot be built."""

    vocab_size: int = option(49_152, "V, entries of the vocabulary", least=1, most=2**20)
    d_model: int = option(2048, "width of the residual stream", least=1, most=2**16)
    n_layers: int = option(24, "blocks", least=1, most=1000)
    n_heads: int = option(32, "query heads of an attention", least=1)
    n_kv_heads: int | None = option(None, "key and value heads; none means n_heads", least=1)
    d_ff: int = option(8192, "width inside the SwiGLU", least=1, most=2**18)
    max_seq_len: int = option(2048, "T, the context length in tokens", least=1, most=2**20)
    rope_theta: float = option(10_000.0, "base of the rotary wavelengths", least=1)
    norm_eps: float = option(1e-5, "added to the mean square in every RMSNorm", least=1e-12)
    input_layer: str = option("learned", "one of " + ", ".join(INPUT_LAYERS))
    code_bits: int = option(16, "bits of a token id that enter its code", least=1, most=63)
    code_seed: int = option(12345, "seed of the matrix of gf2 and signs")
    code_matrix: str | None = option(None, "that matrix by hand: a hex word a row, bit 0 first")
    code_offset: int = option(0, "the vector b that gf2 and signs add, as an integer")
    init_seed: int = option(1337, "seed of the initial weights")

    def __post_init__(self):
        for f in fields(self):
            value, kinds = getattr(self, f.name), get_args(f.type) or (f.type,)
            least, most = f.metadata["range"]
            if kinds[0] is float and type(value) is int and abs(value) <= most:
                setattr(self, f.name, value := float(value))
            if type(value) not in kinds:
                raise ValueError(f"{f.name} is {value!r}; it must be of type {kinds[0].__name__}")
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"{f.name} is {value}; it must be from {least} to {most}")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} is no multiple of 2 x n_heads {self.n_heads}")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads {self.n_kv_heads} must divide n_heads {self.n_heads}")
        if self.input_layer not in INPUT_LAYERS:
            raise ValueError(f"input_layer {self.input_layer!r} is not one of {INPUT_LAYERS}")


class InputLayer(nn.Module):
    """Token id -> its row in a (V, K) table, repeated to fill d_model: what the paper varies.

    learned: a parameter with K = d_model. Any other name: a fixed table of K numbers from codes.py.
    The config alone makes it again, so that no checkpoint stores it."""

    def __init__(self, config):
        super().__init__()
        self.zero_id = None  # the id whose fixed code is all zeros, if any
        if config.input_layer == "learned":
            if config.code_matrix is not None or config.code_offset:
                raise ValueError("a learned table has neither matrix nor offset; drop them")
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        else:
            bits, hand = config.code_bits, config.code_matrix
            matrix = None if hand is None else matrix_from_hex(hand, bits)
            table = torch.from_numpy(code_table(config.input_layer, config.vocab_size, bits=bits,
                seed=config.code_seed, matrix=matrix, offset=config.code_offset))  # fmt: skip
            self.register_buffer("weight", table, persistent=False)
            self.zero_id = next(iter((table == 0).all(dim=1).nonzero().flatten().tolist()), None)
        self.tiles, rest = divmod(config.d_model, width := self.weight.shape[1])
        if rest:
            raise ValueError(f"d_model {config.d_model} is no multiple of the code width {width}; "
                             "choose an input_layer whose width divides it")  # fmt: skip

    def forward(self, ids):  # (B, T)
        return F.embedding(ids, self.weight).repeat(1, 1, self.tiles)  # (B, T, d_model)


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

    def forward(self, x, cos, sin, cache=None):
        B, T, d_model = x.shape
        q, k, v = (
            projection(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, h, T, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:  # a list: empty, or the keys and values of all positions so far
            if cache:
                k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
        past = k.shape[2] - T
        mask = None
        if past:  # is_causal counts from the first key, not from the first new one
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not past, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, d_model))


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
    """The language model, initialised when constructed; state_dict holds exactly its parameters."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # True: recompute each block in the backward pass
        self.input = InputLayer(config)
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
        """Draw every weight from init_seed, on the CPU, so that all devices start alike:

            norms                  1
            o_proj, down_proj      N(0, 0.02 / sqrt(2 n_layers))
            every other matrix     N(0, 0.02)
        """
        # The table has its own generator: all else is bit for bit the same in every interface.
        backbone = torch.Generator().manual_seed(self.config.init_seed)
        table = torch.Generator().manual_seed(self.config.init_seed + 1)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            elif not parameter.is_meta:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.config.n_layers) ** 0.5 if into_residual else 0.02
                parameter.normal_(0, std, generator=table if name == "input.weight" else backbone)

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
        alive = None
        if self.input.zero_id is not None and cache is None:
            alive = ((ids != self.input.zero_id).cumsum(dim=1) > 0).unsqueeze(-1)  # (B, T, 1)
        for i, block in enumerate(self.blocks):
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin, None if cache is None else cache[i])
            x = x if alive is None else x * alive
        return self.norm(x)

    def head_inputs(self, ids):
        """What a matrix product with the head takes: hidden (B x T, d_model) and its weights
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
        return None, MeanLoss.apply(*self.head_inputs(ids), targets.flatten())

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Yield the next ids (B,), on the CPU, step by step after the prompt ids (B, T).
        temperature 0 takes the likeliest; top_k keeps so many; `generator` is of the CPU."""
        cache = [[] for _ in self.blocks]
        # For one row a CPU makes one product on one core, but several products on all of them.
        pieces = self.head.weight.unflatten(0, (1 if self.config.vocab_size % 64 else 64, -1))
        for _ in range(max_new_tokens):
            last = self.hidden(ids, cache)[:, -1].T.expand(len(pieces), -1, -1)  # (n, d_model, B)
            logits = (pieces @ last).flatten(0, 1).T.float().cpu()  # (B, V)
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits[logits < least] = -torch.inf
            next_ids = logits.argmax(dim=-1)
            if temperature > 0:
                probabilities = (logits / temperature).softmax(dim=-1)
                next_ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            yield next_ids
            ids = next_ids[:, None].to(ids.device)

    def parameter_counts(self):
        """How many parameters the input, the backbone and the head have."""
        counts = {"input": 0, "backbone": 0, "head": 0}
        for name, parameter in self.named_parameters():
            part = name.split(".")[0]
            counts[part if part in counts else "backbone"] += parameter.numel()
        return counts

    def flops_per_target(self):
        """FLOPs of one training target at full context: 2 forward and 4 backward for each weight
        of a matrix and the causal half of attention. The input is looked up, not multiplied."""
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        matrices -= self.parameter_counts()["input"]
        attention = self.config.n_layers * self.config.max_seq_len * self.config.d_model
        return 6 * (matrices + attention)

    def backbone_hash(self):
        """sha256 of all weights but the input's: equal over interfaces at one init_seed."""
        digest = hashlib.sha256()
        for weight in (p for name, p in self.named_parameters() if name != "input.weight"):
            digest.update(weight.detach().cpu().view(torch.uint8).numpy())
        return digest.hexdigest()


def step_folders(run):
    """The step folders of a run folder, oldest first."""
    return sorted(Path(run).glob("step_" + "[0-9]" * 8))


def find_checkpoint(path):
    """The step folder that `path` means: itself, or the newest in a run folder."""
    for step in [Path(path), *reversed(step_folders(path))]:
        if (step / "model.safetensors").is_file():
            return step
    raise ValueError(f"{path} holds no checkpoint; give a run folder or a step folder in one")


def load_checkpoint(path, device="cpu"):
    """The Transformer of a run or step folder, float32, in eval mode. Executes nothing."""
    step = find_checkpoint(path)
    try:
        saved = json.loads((step / "config.json").read_bytes())
        config = ModelConfig(**{f.name: saved[f.name] for f in fields(ModelConfig)})
        with torch.device("meta"):  # takes no memory before the shapes are compared
            model = Transformer(config)
        with safe_open(step / "model.safetensors", "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
            if shapes != {name: list(p.shape) for name, p in model.named_parameters()}:
                raise ValueError("the weights do not have the shapes of config.json")
            state = {name: file.get_tensor(name) for name in shapes}
            if not all(w.is_floating_point() and w.abs().max() < torch.inf for w in state.values()):
                raise ValueError("some weights are no floats, or not finite")
    except (KeyError, ValueError, OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{step} is no whole checkpoint ({error}); use another") from None
    model.load_state_dict(state, assign=True)
    return model.to(device, torch.float32).eval()
