"""The model written again, plainly, in float64 and one row at a time; and the small models that
are compared with it."""

import math

import numpy as np
import torch
from helpers import lively

from model import ModelConfig, Transformer

V = 97
FIXED = ("binary16", "gf2")
INPUT_LAYERS = ("learned", "binary16", "gf2", "signs32")


def small(**changes):
    """The config of a model of three blocks, by default with binary16."""
    sizes = dict(vocab_size=V, d_model=32, n_layers=3, n_heads=4, d_ff=40, max_seq_len=24)
    return ModelConfig(**{**sizes, "input_layer": "binary16", **changes})


def double(config, gain=1.0):
    """A lively model in float64."""
    return lively(Transformer(config).double(), gain=gain)


def gradients(model, ids, targets):
    """The loss and the gradient of every parameter, by name."""
    model.zero_grad()
    loss = model(ids, targets)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def reference_norm(x, weight, eps):  # (d,)
    return weight * x / math.sqrt(sum(value**2 for value in x) / len(x) + eps)


def reference_rotate(x, position, theta):  # (head_dim,)
    half, turned = len(x) // 2, np.empty(len(x))
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def reference_attention(x, weights, config, zeros):  # (T, d_model)
    """`zeros` positions in front, whose keys and values are 0, add 1 each to every denominator."""
    T, width = len(x), config.d_model // config.n_heads
    share = config.n_heads // (config.n_kv_heads or config.n_heads)
    q, k, v = (np.einsum("td,ed->te", x, weights[f"{name}_proj.weight"]) for name in "qkv")
    y = np.zeros((T, config.d_model))
    for h in range(config.n_heads):
        mine, others = slice(h * width, (h + 1) * width), (h // share) * width
        others = slice(others, others + width)
        for t in range(T):
            query = reference_rotate(q[t, mine], zeros + t, config.rope_theta)
            scale = zeros  # exp(0) each
            for s in range(t + 1):
                key = reference_rotate(k[s, others], zeros + s, config.rope_theta)
                weight = math.exp(query @ key / math.sqrt(width))
                scale += weight
                y[t, mine] += weight * v[s, others]
            y[t, mine] /= scale
    return np.einsum("td,ed->te", y, weights["o_proj.weight"])


def reference_swiglu(x, weights):  # (T, d_model)
    gate = np.einsum("td,fd->tf", x, weights["gate_proj.weight"])
    up = np.einsum("td,fd->tf", x, weights["up_proj.weight"])
    return np.einsum("tf,df->td", gate / (1 + np.exp(-gate)) * up, weights["down_proj.weight"])


def part_of(weights, prefix):
    cut = len(prefix)
    return {name[cut:]: value for name, value in weights.items() if name.startswith(prefix)}


def numpy_weights(module):
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def reference_input(token_id, weights, config):  # (d_model,)
    if config.input_layer == "learned":
        return weights["input.weight"][token_id]
    return np.array([token_id >> (j % 16) & 1 for j in range(config.d_model)], dtype=float)


def reference_logits(model, ids, zeros=0):
    """A row of ids (T,) -> (T, V), behind `zeros` positions whose residual is 0."""
    config, weights, eps = model.config, numpy_weights(model), model.config.norm_eps
    x = np.stack([reference_input(i, weights, config) for i in ids])
    for i in range(config.n_layers):
        block = part_of(weights, f"blocks.{i}.")
        attention, mlp = part_of(block, "attention."), part_of(block, "mlp.")
        h = np.stack([reference_norm(row, block["attention_norm.weight"], eps) for row in x])
        x = x + reference_attention(h, attention, config, zeros)
        h = np.stack([reference_norm(row, block["mlp_norm.weight"], eps) for row in x])
        x = x + reference_swiglu(h, mlp)
    x = np.stack([reference_norm(row, weights["norm.weight"], eps) for row in x])
    return torch.from_numpy(x @ weights["head.weight"].T)
