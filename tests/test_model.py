"""python -m pytest tests/test_model.py

The model against the paper's counts, a plain float64 reference written here, and transformers.
"""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_shards import refused
from torch.nn import functional as F

import codes
import model as model_file
from model import (
    Attention,
    ModelConfig,
    SwiGLU,
    Transformer,
    load_checkpoint,
    rope_tables,
    rotate,
)

FIXED = ("binary16", "gf2")
V = 97
INTERFACES = ("learned", "binary16", "gf2", "signs32")


def small(**changes):
    sizes = dict(vocab_size=V, d_model=32, n_layers=3, n_heads=4, d_ff=40, max_seq_len=24)
    return ModelConfig(**{**sizes, "input_layer": "binary16", **changes})


def lively(model, seed=0, gain=1.0):
    """Weights so large that every part shows in the logits, which 0.02 would hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, gain / parameter.shape[1] ** 0.5, generator=generator)
    return model


@pytest.fixture
def float64():
    """Models made inside have float64 weights and float64 rotary tables."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def double(config, gain=1.0):
    return lively(Transformer(config).double(), gain=gain)


def random_ids(*shape, seed=0, least=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, V, shape, generator=generator)


def gradients(model, ids, targets):
    model.zero_grad()
    loss = model(ids, targets)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -----------------------------------------------------------------------------
# Counts, the initial weights, what is stored


def default_model(input_layer):
    with torch.device("meta"):
        return Transformer(ModelConfig(input_layer=input_layer))


@pytest.mark.parametrize(
    "input_layer, total, table",
    [
        ("learned", 1_812_039_680, 100_663_296),
        ("binary16", 1_711_376_384, 0),
        ("gf2", 1_711_376_384, 0),
    ],
)
def test_parameters_of_the_paper(input_layer, total, table):
    model = default_model(input_layer)
    block = 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    counts = {"input": table, "backbone": 24 * block + 2048, "head": 49_152 * 2048}
    assert model.parameter_counts() == counts
    assert sum(p.numel() for p in model.parameters()) == sum(counts.values()) == total
    # One multiply-add is 2 operations, and the backward pass costs twice the forward one. Attention
    # compares a query with half the context on average, for the scores and again for the values.
    forward = 2 * (24 * (4 * 2048**2 + 3 * 2048 * 8192) + 49_152 * 2048)
    forward += 24 * 2 * (2 * 2048 * (2048 // 2))
    assert model.flops_per_target() == 3 * forward == 10_871_635_968


def test_table_is_a_hundred_million_parameters_and_5_56_percent():
    assert round(100 * 100_663_296 / 1_812_039_680, 2) == 5.56
    assert 49_152 * 2048 == 100_663_296


def test_backbone_is_the_same_bits_in_every_interface():
    models = [Transformer(small(input_layer=name)) for name in INTERFACES]
    assert len({model.backbone_hash() for model in models}) == 1
    learned = models[0].state_dict()
    del learned["input.weight"]
    for model in models[1:]:
        assert model.state_dict().keys() == learned.keys()
        assert all(torch.equal(model.state_dict()[name], learned[name]) for name in learned)


def test_backbone_hash_sees_the_seed_and_every_weight():
    model = Transformer(small())
    hashes = {model.backbone_hash(), Transformer(small(init_seed=1338)).backbone_hash()}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        hashes.add(model.backbone_hash())
    assert len(hashes) == 2 + len(list(model.parameters()))


def test_backbone_hash_does_not_see_the_table():
    model = Transformer(small(input_layer="learned"))
    before = model.backbone_hash()
    torch.nn.init.zeros_(model.input.weight)
    assert model.backbone_hash() == before


def test_learned_table_is_not_the_backbones_numbers():
    model = Transformer(small(input_layer="learned"))
    first = model.blocks[0].attention.q_proj.weight.flatten()
    table = model.input.weight.flatten()[: len(first)]
    assert not (first == table).any()
    correlation = torch.corrcoef(torch.stack((first, table)))[0, 1]
    assert abs(correlation) < 5 / len(first) ** 0.5


@pytest.mark.parametrize("input_layer", INTERFACES)
def test_two_constructions_are_equal_bitwise(input_layer):
    one = Transformer(small(input_layer=input_layer)).state_dict()
    torch.rand(7)  # the global generator plays no part
    two = Transformer(small(input_layer=input_layer)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("input_layer", INTERFACES)
def test_state_dict_holds_exactly_the_parameters(input_layer):
    model = Transformer(small(input_layer=input_layer))
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert ("input.weight" in state) == (input_layer == "learned")


def distributions(n_layers):
    """The table in the docstring of initialise: last words of a name -> (mean, std)."""
    table = {}
    for line in Transformer.initialise.__doc__.splitlines():
        row = re.fullmatch(r" {12}(\S.*?) {2,}(\S.*)", line)
        if row:
            what, law = row.groups()
            if law.startswith("N("):
                mean, std = law.removeprefix("N(").removesuffix(")").split(",", 1)
                std = std.replace("sqrt(2 n_layers)", str(math.sqrt(2 * n_layers)))
                numerator, _, denominator = std.partition("/")
                law = float(mean), float(numerator) / float(denominator or 1)
            else:
                law = float(law), 0.0
            table.update({name: law for name in what.split(", ")})
    return table


def test_initial_weights_follow_the_table_in_the_docstring():
    config = small(input_layer="learned", d_model=128, d_ff=256, vocab_size=512)
    table = distributions(config.n_layers)
    assert set(table) == {"norms", "o_proj", "down_proj", "every other matrix"}
    assert table["norms"] == (1, 0)
    used = set()
    for name, parameter in Transformer(config).named_parameters():
        part = name.split(".")[-2]
        row = "norms" if part.endswith("norm") else part if part in table else "every other matrix"
        used.add(row)
        mean, std = table[row]
        if std == 0:
            assert torch.equal(parameter, torch.full_like(parameter, mean)), name
            continue
        x, n = parameter.double().flatten(), parameter.numel()
        assert abs(x.mean() - mean) < 4.5 * std / n**0.5, name
        assert abs(x.std() / std - 1) < 4.5 / (2 * n) ** 0.5, name
        assert abs((((x - mean) / std) ** 4).mean() - 3) < 4.5 * (96 / n) ** 0.5, name
    assert used == set(table)


# -----------------------------------------------------------------------------
# A plain float64 reference, one row at a time


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


@pytest.mark.parametrize("theta, width", [(10_000.0, 64), (500_000.0, 8)])
def test_rope_tables_hold_the_angles(theta, width):
    length = 2048
    cos, sin = rope_tables(length, width, theta)
    assert cos.shape == sin.shape == (length, width // 2) and cos.dtype == torch.float32
    positions, i = np.arange(length)[:, None], np.arange(width // 2)
    angles = torch.from_numpy(positions * theta ** (-2 * i / width))
    # An angle in float32 is off by 2^-24 of itself for each of its two roundings, and the power's
    # own error; cosine and sine then differ by no more than the angle.
    allowed = (angles + 1) * 2.0**-21
    assert ((cos.double() - angles.cos()).abs() <= allowed).all()
    assert ((sin.double() - angles.sin()).abs() <= allowed).all()


def test_rope_equals_the_reference(float64):
    x = torch.randn(2, 3, 7, 10)
    turned = rotate(x, *rope_tables(7, 10, 100.0))
    for b, h, t in np.ndindex(2, 3, 7):
        expected = torch.from_numpy(reference_rotate(x[b, h, t].numpy(), t, 100.0))
        assert_close(turned[b, h, t], expected, 1e-13)


def test_rope_keeps_the_type():
    x = torch.randn(1, 1, 7, 10).bfloat16()
    turned = rotate(x, *rope_tables(7, 10, 100.0))
    assert turned.dtype == torch.bfloat16
    exact = rotate(x.float(), *rope_tables(7, 10, 100.0))
    assert torch.equal(turned, exact.bfloat16())


def test_rope_makes_scores_depend_on_distance_alone(float64):
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = rope_tables(20, 8, 100.0)
    q, k = (rotate(x.expand(1, 1, 20, 8), cos, sin)[0, 0] for x in (q, k))
    for distance in range(20):
        scores = torch.stack([q[t + distance] @ k[t] for t in range(20 - distance)])
        assert_close(scores, scores[:1].expand_as(scores), 1e-12)


def test_rmsnorm_equals_the_reference(float64):
    model = double(small(norm_eps=0.03))
    norms = [model.norm, *(block.attention_norm for block in model.blocks)]
    norms += [block.mlp_norm for block in model.blocks]
    x = torch.randn(5, 32) * torch.tensor([0, 1e-3, 0.1, 1, 100]).view(5, 1)
    for norm in norms:
        weight = norm.weight.detach().numpy()
        expected = np.stack([reference_norm(row, weight, 0.03) for row in x.numpy()])
        assert_close(norm(x), torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize("n_kv_heads", [None, 4, 2, 1])
def test_attention_equals_the_reference(n_kv_heads, float64):
    config = small(n_kv_heads=n_kv_heads, rope_theta=50.0)
    attention, x = lively(Attention(config), gain=2), torch.randn(2, 9, 32)
    assert attention.k_proj.weight.shape == ((n_kv_heads or 4) * 8, 32)
    y = attention(x, *rope_tables(9, 8, 50.0))
    for b in range(2):
        expected = reference_attention(x[b].numpy(), numpy_weights(attention), config, 0)
        assert_close(y[b], torch.from_numpy(expected), 1e-12)


def test_swiglu_equals_the_reference(float64):
    mlp, x = lively(SwiGLU(small()), gain=2), torch.randn(6, 32)
    expected = reference_swiglu(x.numpy(), numpy_weights(mlp))
    assert_close(mlp(x), torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize("n_kv_heads", [None, 2])
@pytest.mark.parametrize("input_layer", ["learned", "binary16"])
def test_forward_equals_the_reference(input_layer, n_kv_heads, float64):
    model = double(small(input_layer=input_layer, n_kv_heads=n_kv_heads, norm_eps=1e-3))
    ids = random_ids(2, 11)
    logits, loss = model(ids)
    assert loss is None and logits.std() > 0.5
    for b in range(2):
        assert_close(logits[b], reference_logits(model, ids[b].tolist()), 1e-11)


@pytest.mark.parametrize("input_layer", INTERFACES)
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_logits_equal_those_of_transformers(input_layer, n_kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = lively(Transformer(small(input_layer=input_layer, n_kv_heads=n_kv_heads)))
    config = model.config
    llama_config = LlamaConfig(
        vocab_size=V,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=n_kv_heads or config.n_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )
    llama = LlamaForCausalLM(llama_config).eval()
    if input_layer == "learned":
        table = model.input.weight
    else:
        table = torch.from_numpy(codes.code_table(input_layer, V)).repeat(1, model.input.tiles)
    state = {"model.embed_tokens.weight": table.detach(), "lm_head.weight": model.head.weight}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            for ours, theirs in {
                "blocks.": "model.layers.",
                ".attention.": ".self_attn.",
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            }.items():
                name = name.replace(ours, theirs)
            state[name] = parameter.detach()
    state["model.norm.weight"] = model.norm.weight
    llama.load_state_dict(state)
    ids = random_ids(3, 24, least=0)
    ids[0, :3] = 0
    with torch.no_grad():
        assert_close(model(ids)[0], llama(ids).logits, 1e-5)


# -----------------------------------------------------------------------------
# The loss


def test_loss_equals_cross_entropy(float64):
    model = double(small())
    ids, targets = random_ids(3, 8), random_ids(3, 8, seed=1, least=0)
    logits, loss = model(ids, targets)
    assert logits is None and loss.shape == ()
    logits = model(ids)[0]
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), 1e-12)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    assert_close(model.losses(ids, targets), each.view(3, 8), 1e-12)


def test_bfloat16_autocast_is_close_and_its_losses_are_float32():
    model = lively(Transformer(small()))
    ids, targets = random_ids(4, 24), random_ids(4, 24, seed=1)
    exact, losses = model(ids)[0], model.losses(ids, targets)
    residuals = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: residuals.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rough, rough_losses = model(ids)[0], model.losses(ids, targets)
        loss = model(ids, targets)[1]
    assert rough.dtype == torch.bfloat16
    assert rough_losses.dtype == loss.dtype == torch.float32
    assert set(residuals) == {torch.float32}
    relative = (rough.float() - exact).norm() / exact.norm()
    assert 0 < relative < 0.02
    assert abs(rough_losses.mean() - losses.mean()) < 0.01
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_losses_of_bfloat16_weights_are_float32():
    model = lively(Transformer(small(input_layer="learned"))).bfloat16()
    ids, targets = random_ids(2, 9), random_ids(2, 9, seed=1)
    logits = model(ids)[0]
    assert logits.dtype == torch.bfloat16
    losses = model.losses(ids, targets)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    assert losses.dtype == torch.float32
    assert_close(losses, expected.view(2, 9), 1e-6)


@pytest.mark.parametrize("input_layer", INTERFACES)
def test_recomputed_activations_give_the_same_gradients_bitwise(input_layer):
    model = lively(Transformer(small(input_layer=input_layer)))
    ids, targets = random_ids(2, 12, least=0), random_ids(2, 12, seed=1)
    ids[0, :2] = 0
    loss, plain = gradients(model, ids, targets)
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    model.checkpoint_activations = True
    recomputed_loss, recomputed = gradients(model, ids, targets)
    assert len(calls) == 2 * len(model.blocks)
    assert torch.equal(loss, recomputed_loss)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


# -----------------------------------------------------------------------------
# Generation


def greedy(model, ids, steps):
    """Without a cache: the whole row again for every token."""
    for _ in range(steps):
        ids = torch.cat((ids, model(ids)[0][:, -1:].float().argmax(dim=-1)), dim=1)
    return ids[:, -steps:]


def generated(model, ids, steps, **options):
    return torch.stack(list(model.generate(ids, steps, **options)), dim=1)


@pytest.mark.parametrize("n_kv_heads, vocab_size", [(None, V), (2, V), (None, 192)])
@pytest.mark.parametrize("input_layer", INTERFACES)
def test_generation_with_cache_equals_recomputation(input_layer, n_kv_heads, vocab_size, float64):
    shape = dict(n_kv_heads=n_kv_heads, vocab_size=vocab_size)  # 192: the head in 64 pieces
    model = double(small(input_layer=input_layer, **shape), gain=3)
    prompts = random_ids(5, 4)
    prompts[0, 0] = prompts[1, :2] = prompts[2, 2] = 0
    expected = greedy(model, prompts, 20)
    assert len(expected.unique()) > 10
    assert torch.equal(generated(model, prompts, 20, temperature=0), expected)
    assert torch.equal(generated(model, prompts, 20, top_k=1), expected)


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 13], [1, 6, 1, 9, 3], [2, 18]])
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_cached_continuation_equals_the_whole_row(pieces, n_kv_heads, float64):
    model = double(small(n_kv_heads=n_kv_heads))
    ids = random_ids(2, 20)
    ids[0, :3] = ids[1, 5] = 0
    cache = [[] for _ in model.blocks]
    hidden = torch.cat([model.hidden(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    assert_close(hidden, model.hidden(ids), 1e-11)


def test_sampling_repeats_with_its_seed():
    model, ids = Transformer(small()), random_ids(3, 2)

    def sample(seed):
        return generated(model, ids, 10, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_sampling_follows_the_softmax():
    model, rows = lively(Transformer(small())), 20_000
    ids = random_ids(1, 3)
    logits = model(ids)[0][0, -1].detach()
    for temperature, top_k in [(1.0, None), (0.5, None), (2.0, 7)]:
        probabilities = (logits / temperature).softmax(dim=-1)
        if top_k:
            chosen = torch.zeros(V).index_fill(0, logits.topk(top_k).indices, 1)
            probabilities = probabilities * chosen / (probabilities * chosen).sum()
        options = dict(temperature=temperature, top_k=top_k)
        options["generator"] = torch.Generator().manual_seed(0)
        drawn = generated(model, ids.expand(rows, 3), 1, **options)[:, 0]
        counts = drawn.bincount(minlength=V)
        assert (counts[probabilities == 0] == 0).all()
        spread = (rows * probabilities * (1 - probabilities)).sqrt()
        assert ((counts - rows * probabilities).abs() <= 5 * spread + 1).all()


def test_generation_ends_where_asked_and_streams():
    model = Transformer(small())
    assert list(model.generate(random_ids(2, 3), 0)) == []
    stream = model.generate(random_ids(2, 3), 10**9, temperature=0)
    assert [next(stream).shape for _ in range(4)] == [(2,)] * 4


def test_positions_past_max_seq_len_are_refused():
    model = Transformer(small(max_seq_len=8))
    assert generated(model, random_ids(1, 3), 6, temperature=0).shape == (1, 6)
    refused(lambda: generated(model, random_ids(1, 3), 7, temperature=0), "max_seq_len 8")
    refused(lambda: model(random_ids(1, 9)), "max_seq_len 8")
    assert model(random_ids(1, 8))[0].shape == (1, 8, V)


# -----------------------------------------------------------------------------
# The zero code


@pytest.mark.parametrize("input_layer", FIXED)
@pytest.mark.parametrize("length", [1, 3])
def test_zero_code_alone_gives_uniform_logits(input_layer, length):
    model = lively(Transformer(small(input_layer=input_layer)))
    ids, targets = torch.zeros(1, length, dtype=torch.int64), random_ids(1, length)
    assert torch.equal(model(ids)[0], torch.zeros(1, length, V))
    assert_close(model(ids, targets)[1], torch.tensor(math.log(V)), 1e-6)
    residuals = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: residuals.append(output))
    model.input.zero_id = None  # 0 in every block of itself, not only by the mask
    assert torch.equal(model(ids)[0], torch.zeros(1, length, V))
    assert len(residuals) == 3 and not any(residual.any() for residual in residuals)


def test_uniform_loss_of_the_papers_vocabulary():
    model = Transformer(small(vocab_size=49_152))
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert abs(model(zero, zero)[1].item() - 10.8027) < 5e-5


def test_learned_row_of_zeros_is_not_uniform():
    model = Transformer(small(input_layer="learned"))
    assert model.input.zero_id is None
    for length in (1, 3):
        ids = torch.zeros(1, length, dtype=torch.int64)
        assert (model(ids)[0].std(dim=-1) > 1e-3).all()
        assert abs(model(ids, ids)[1].item() - math.log(V)) > 1e-4


@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_leading_zeros_add_one_each_to_the_softmax_denominator(zeros, float64):
    model, row = double(small()), [45, 7, 0, 19]
    logits = model(torch.tensor([[0] * zeros + row]))[0][0]
    assert torch.equal(logits[:zeros], torch.zeros(zeros, V))
    assert_close(logits[zeros:], reference_logits(model, row, zeros), 1e-11)
    assert (logits[zeros:] - reference_logits(model, row)).abs().max() > 0.05


@pytest.mark.parametrize("input_layer", FIXED)
def test_padding_with_id_0_is_neutral_on_the_right_only(input_layer, float64):
    model = double(small(input_layer=input_layer))
    alone = model(torch.tensor([[45, 7]]))[0]
    right = model(torch.tensor([[45, 7, 0, 0]]))[0][:, :2]
    left = model(torch.tensor([[0, 0, 45, 7]]))[0][:, 2:]
    assert_close(right, alone, 1e-12)
    assert (left - alone).abs().amax(dim=-1).min() > 0.05


@pytest.mark.parametrize("input_layer", FIXED)
def test_separator_in_the_middle_takes_the_plain_mean(input_layer, float64):
    model = double(small(input_layer=input_layer))
    ids = torch.tensor([[45, 7, 0, 19]])
    block, seen = model.blocks[0], []
    block.attention.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(ids)
    values = block.attention.v_proj(block.attention_norm(model.input(ids)))
    assert torch.equal(values[0, 2], torch.zeros(32))
    mean = block.attention.o_proj((values[0, 0] + values[0, 1]) / 3)
    assert_close(seen[0][0, 2], mean, 1e-12)
    assert seen[1][0, 2].abs().max() > 0.05


def leading_zeros_model(n_layers, **changes):
    model = lively(Transformer(small(n_layers=n_layers, **changes)))
    ids, targets = random_ids(2, 12), random_ids(2, 12, seed=1, least=0)
    ids[0, :3] = ids[0, 6] = ids[1, 4] = 0
    return model, ids, targets


@pytest.mark.parametrize("input_layer", FIXED)
def test_deep_backward_is_finite_only_with_the_mask(input_layer):
    model, ids, targets = leading_zeros_model(24, input_layer=input_layer)
    assert model.input.zero_id == 0
    logits = model(ids)[0]
    loss, masked = gradients(model, ids, targets)
    assert all(gradient.isfinite().all() for gradient in masked.values())
    assert all(gradient.any() for gradient in masked.values())
    model.input.zero_id = None
    assert torch.equal(model(ids)[0], logits)
    unmasked_loss, unmasked = gradients(model, ids, targets)
    assert torch.equal(unmasked_loss, loss)
    assert not all(gradient.isfinite().all() for gradient in unmasked.values())


@pytest.mark.parametrize("input_layer", FIXED)
def test_deep_backward_is_finite_at_the_initial_weights(input_layer):
    model = Transformer(small(n_layers=24, input_layer=input_layer))
    ids = random_ids(1, 12)
    ids[0, 0] = 0
    _, masked = gradients(model, ids, random_ids(1, 12, seed=1))
    assert all(gradient.isfinite().all() for gradient in masked.values())


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_mask_changes_no_gradient(checkpoint_activations, float64):
    model, ids, targets = leading_zeros_model(2)
    model.double().checkpoint_activations = checkpoint_activations
    _, masked = gradients(model, ids, targets)
    model.input.zero_id = None
    _, unmasked = gradients(model, ids, targets)
    for name in masked:
        assert_close(masked[name], unmasked[name], 1e-11)


def residual_gradients(model, ids, targets):
    """The gradient of the loss at every block's output, (n_layers, B, T, d_model)."""
    outputs = []

    def keep(module, inputs, output):
        output.retain_grad()
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    gradients(model, ids, targets)
    for hook in hooks:
        hook.remove()
    return torch.stack([output.grad for output in outputs])


def test_gradient_at_a_leading_zero_grows_with_each_block_but_for_the_mask(float64):
    model, ids, targets = leading_zeros_model(6)
    model.double()
    masked = residual_gradients(model, ids, targets)
    assert torch.equal(masked[:, 0, :3], torch.zeros(6, 3, 32))
    assert (masked[:-1, 0, 6].norm(dim=-1) > 1e-6).all()  # a zero in the middle keeps its own
    assert (masked[:-1, 0, 3:].norm(dim=-1) > 1e-6).all()
    model.input.zero_id = None
    unmasked = residual_gradients(model, ids, targets)
    assert_close(unmasked[:, 0, 3:], masked[:, 0, 3:], 1e-11)
    assert_close(unmasked[:, 1], masked[:, 1], 1e-11)
    sizes = unmasked[:, 0, 0].norm(dim=-1)
    assert (sizes[:-1] / sizes[1:] > 30).all()


def test_offset_moves_the_zero_code_to_another_id(float64):
    word = int(codes.ids_from_codes(codes.code_table("gf2", V).astype(np.uint8))[5])
    model = double(small(input_layer="gf2", code_offset=word))
    assert model.input.zero_id == 5
    assert model.input(torch.tensor([[0]])).any() and not model.input(torch.tensor([[5]])).any()
    assert torch.equal(model(torch.tensor([[5, 5]]))[0], torch.zeros(1, 2, V))
    ids, targets = torch.tensor([[5, 5, 0, 9]]), torch.tensor([[1, 2, 3, 4]])
    masked = residual_gradients(model, ids, targets)
    assert not masked[:, 0, :2].any() and masked[0, 0, 2].any()
    ids = torch.tensor([[0, 0, 5, 9]])  # nothing is masked here
    assert residual_gradients(model, ids, targets)[0].norm(dim=-1).min() > 1e-6


def test_offset_whose_zero_code_lies_beyond_the_vocabulary_leaves_no_mask():
    word = int(codes.ids_from_codes(codes.code_table("gf2", V + 1).astype(np.uint8))[V])
    model = lively(Transformer(small(input_layer="gf2", code_offset=word)))
    assert model.input.zero_id is None
    assert model.input(torch.arange(V)[None]).any(dim=-1).all()
    assert (model(torch.tensor([[0, 0]]))[0].std(dim=-1) > 0.1).all()


# -----------------------------------------------------------------------------
# The input layer


def test_fixed_codes_are_tiled_to_the_width():
    ids = torch.tensor([[0, 1, 6, 96]])
    x = Transformer(small()).input(ids)
    expected = [[[float(i >> (j % 16) & 1) for j in range(32)] for i in ids[0].tolist()]]
    assert x.dtype == torch.float32 and torch.equal(x, torch.tensor(expected))


def test_matrix_by_hand_equals_the_drawn_one():
    drawn = Transformer(small(input_layer="gf2", code_seed=7))
    rows = codes.invertible_matrix(16, 7)
    words = [sum(int(bit) << j for j, bit in enumerate(row)) for row in rows]
    config = small(input_layer="gf2", code_matrix=" ".join(f"{word:04x}" for word in words))
    given_by_hand = Transformer(config)
    assert torch.equal(given_by_hand.input.weight, drawn.input.weight)
    other = Transformer(small(input_layer="gf2"))
    assert not torch.equal(other.input.weight, drawn.input.weight)
    for i in (0, 1, 6, 96):
        bits = [(word & i).bit_count() % 2 for word in words]
        assert drawn.input.weight[i].tolist() == bits


def test_identity_matrix_makes_gf2_the_binary_code():
    identity = " ".join(f"{1 << i:04x}" for i in range(16))
    gf2 = Transformer(small(input_layer="gf2", code_matrix=identity))
    binary16 = Transformer(small())
    assert torch.equal(gf2.input.weight, binary16.input.weight)
    ids = random_ids(1, 9)
    assert torch.equal(gf2(ids)[0], binary16(ids)[0])


# -----------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, value) for name in ("vocab_size", "d_model", "n_layers") for value in (0, -1)),
        *((name, value) for name in ("n_heads", "d_ff", "max_seq_len") for value in (0, -1)),
        *((name, value) for name in ("n_kv_heads", "code_bits") for value in (0, -1)),
        *(("rope_theta", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("norm_eps", value) for value in (-1e-5, math.inf, math.nan)),
        *((name, -1) for name in ("init_seed", "code_seed", "code_offset")),
        ("d_model", 30),
        ("d_model", 36),  # heads of width 9 have no pairs
        ("n_heads", 3),
        ("n_heads", 32),
        ("n_kv_heads", 3),
        ("n_kv_heads", 8),
        ("input_layer", "gf3"),
        ("input_layer", ""),
    ],
)
def test_config_refuses(name, value):
    refused(lambda: small(**{name: value}), name, str(value))


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(d_model=40), "16"),
        (dict(vocab_size=65_537), "65537"),
        (dict(vocab_size=65_537, input_layer="gf2"), "65537"),
        (dict(code_bits=6, d_model=48), "6"),
        (dict(code_offset=3), "offset"),
        (dict(input_layer="learned", code_offset=3), "a learned table has neither"),
        (dict(input_layer="learned", code_matrix="1"), "a learned table has neither"),
        (dict(code_matrix=" ".join(f"{1 << i:04x}" for i in range(16))), "matrix"),
        (dict(input_layer="gf2", code_offset=1 << 16), "65536"),
        (dict(input_layer="gf2", code_matrix="0001 0002"), "matrix"),
        (dict(input_layer="gf2", code_matrix=""), "matrix"),
        (dict(input_layer="gf2", code_matrix="zzzz " * 16), "matrix"),
        (dict(input_layer="gf2", code_matrix="0001 " * 16), "matrix"),
        (dict(input_layer="gf2", code_matrix="10000 " * 16), ""),
    ],
)
def test_input_layer_refuses(changes, word):
    refused(lambda: Transformer(small(**changes)), word)


# -----------------------------------------------------------------------------
# Checkpoints


def save(model, step, **changes):
    step.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), step / "model.safetensors")
    values = dataclasses.asdict(model.config) | {"lr": 1e-3, "data": "data/text"} | changes
    (step / "config.json").write_text(json.dumps(values))
    return step


def equal_weights(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("input_layer", INTERFACES)
def test_checkpoint_gives_the_model_back(input_layer, tmp_path):
    model = lively(Transformer(small(input_layer=input_layer, n_kv_heads=2)))
    step = save(model, tmp_path / "step_00000012")
    for path in (tmp_path, step, str(tmp_path), str(step)):
        loaded = load_checkpoint(path)
        assert type(loaded.config) is ModelConfig and loaded.config == model.config
        assert equal_weights(loaded, model) and not loaded.training
        assert loaded.backbone_hash() == model.backbone_hash()
        ids = random_ids(2, 9, least=0)
        assert torch.equal(loaded(ids)[0], model(ids)[0])
        gradients(loaded, ids, ids)
    assert not list(tmp_path.glob("*/*.partial"))


def test_run_folder_means_its_newest_step(tmp_path):
    for number in (2, 10, 9):
        save(lively(Transformer(small()), seed=number), tmp_path / f"step_{number:08d}")
    newest = load_checkpoint(tmp_path / "step_00000010")
    for name in ("step_00000099.partial", "step_99", "step_000000099", "older_step_00000099"):
        save(Transformer(small()), tmp_path / name)
    (tmp_path / "step_00000011").mkdir()  # holds no weights: not whole
    assert equal_weights(load_checkpoint(tmp_path), newest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_checkpoint_is_loaded_in_float32(dtype, tmp_path):
    model = lively(Transformer(small(input_layer="learned"))).to(dtype)
    loaded = load_checkpoint(save(model, tmp_path / "step_00000001"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert {b.dtype for b in loaded.buffers()} == {torch.float32}
    assert equal_weights(loaded, model.float())


def test_folder_without_checkpoint_is_refused(tmp_path):
    refused(lambda: load_checkpoint(tmp_path), str(tmp_path))
    refused(lambda: load_checkpoint(tmp_path / "nowhere"), "nowhere")
    (tmp_path / "step_00000001").mkdir()
    refused(lambda: load_checkpoint(tmp_path), str(tmp_path))
    refused(lambda: load_checkpoint(tmp_path / "step_00000001"), "step_00000001")


def test_damaged_weights_are_refused(tmp_path):
    step = save(Transformer(small()), tmp_path / "step_00000001")
    weights = step / "model.safetensors"
    whole = weights.read_bytes()
    for kept in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:kept])
        refused(lambda: load_checkpoint(step), "step_00000001")
    for damaged in (whole + b"\0", b"\xff" * len(whole), whole[8:], b"PK\x03\x04" + whole):
        weights.write_bytes(damaged)
        refused(lambda: load_checkpoint(step), "step_00000001")
    weights.write_bytes(whole)
    assert load_checkpoint(step)


def test_missing_config_is_refused(tmp_path):
    step = save(Transformer(small()), tmp_path / "step_00000001")
    (step / "config.json").unlink()
    refused(lambda: load_checkpoint(step), "step_00000001")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_config_without_a_field_is_refused(field, tmp_path):
    step = save(Transformer(small()), tmp_path / "step_00000001")
    saved = json.loads((step / "config.json").read_text())
    del saved[field]
    (step / "config.json").write_text(json.dumps(saved))
    refused(lambda: load_checkpoint(step), field)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{} {}"]
)
def test_config_that_is_no_json_object_is_refused(text, tmp_path):
    step = save(Transformer(small()), tmp_path / "step_00000001")
    (step / "config.json").write_bytes(text)
    refused(lambda: load_checkpoint(step), "step_00000001")


@pytest.mark.parametrize(
    "changes",
    [
        dict(vocab_size=96),
        dict(d_model=64),
        dict(d_ff=41),
        dict(n_layers=2),
        dict(n_layers=4),
        dict(n_kv_heads=2),
        dict(input_layer="learned"),
    ],
)
def test_weights_at_odds_with_the_config_are_refused(changes, tmp_path):
    step = save(Transformer(small()), tmp_path / "step_00000001", **changes)
    refused(lambda: load_checkpoint(step), "step_00000001")


def test_learned_table_under_a_fixed_code_is_refused(tmp_path):
    model = Transformer(small(input_layer="learned"))
    step = save(model, tmp_path / "step_00000001", input_layer="gf2")
    refused(lambda: load_checkpoint(step), "step_00000001")


@pytest.mark.parametrize("input_layer", ["learned", "gf2"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("vocab_size", 10**12),
        ("vocab_size", 10**20),
        ("d_model", 2**40),
        ("d_model", 2**70),
        ("n_layers", 10**9),
        ("d_ff", 10**15),
        ("d_ff", 10**20),
        ("max_seq_len", 10**12),
        ("max_seq_len", 10**20),
        ("code_bits", 10**6),
        ("code_bits", 10**12),
    ],
)
def test_huge_sizes_are_refused_before_anything_is_made(
    input_layer, name, value, tmp_path, monkeypatch
):
    if name == "code_bits" and input_layer == "learned":
        input_layer = "binary16"
    model = Transformer(small(input_layer=input_layer))
    step = save(model, tmp_path / "step_00000001", **{name: value})
    blocks = []

    def block(config, real=model_file.Block):
        blocks.append(real(config))
        assert len(blocks) < 1000, "goes on making blocks"
        return blocks[-1]

    def tables(length, *rest, real=rope_tables):
        assert length < 2**26, "makes huge rotary tables"
        return real(length, *rest)

    def table(name, vocab_size, *, bits, real=codes.code_table, **rest):
        assert bits < 2**10, "makes huge codes"
        return real(name, vocab_size, bits=bits, **rest)

    monkeypatch.setattr(model_file, "Block", block)
    monkeypatch.setattr(model_file, "rope_tables", tables)
    monkeypatch.setattr(model_file, "code_table", table)
    refused(lambda: load_checkpoint(step), "step_00000001")


@pytest.mark.parametrize(
    "name, value",
    [
        ("vocab_size", None),
        ("vocab_size", "97"),
        ("d_model", 32.5),
        ("d_model", [32]),
        ("n_layers", "3"),
        ("n_layers", 2.5),
        ("n_heads", {}),
        ("n_kv_heads", "2"),
        ("d_ff", None),
        ("max_seq_len", "24"),
        ("max_seq_len", None),
        ("rope_theta", "10000"),
        ("rope_theta", None),
        ("norm_eps", "1e-5"),
        ("norm_eps", []),
        ("input_layer", None),
        ("input_layer", ["gf2"]),
        ("code_bits", "16"),
        ("code_bits", 1.5),
        ("code_seed", "12345"),
        ("code_matrix", 5),
        ("code_matrix", ["0001"]),
        ("code_offset", "0"),
        ("init_seed", "1337"),
        ("init_seed", 1.5),
        ("init_seed", None),
        ("init_seed", 2**70),
    ],
)
def test_wrong_types_in_a_config_are_refused(name, value, tmp_path):
    model = Transformer(small(input_layer="gf2"))
    step = save(model, tmp_path / "step_00000001", **{name: value})
    refused(lambda: load_checkpoint(step), "step_00000001")


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(-3, 40), max_size=2),
    st.just({}),
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from([f.name for f in dataclasses.fields(ModelConfig)]), value=json_values)
def test_any_value_in_a_config_loads_or_is_refused_in_one_sentence(name, value, tmp_path):
    step = tmp_path / "step_00000001"
    if not step.exists():
        save(Transformer(small(input_layer="gf2", n_layers=1)), step)
        (tmp_path / "good.json").write_bytes((step / "config.json").read_bytes())
    good = json.loads((tmp_path / "good.json").read_text())
    (step / "config.json").write_text(json.dumps(good | {name: value}))
    try:
        model = load_checkpoint(step)
    except ValueError as error:
        assert "step_00000001" in str(error) and "\n" not in str(error)
    else:
        assert model(torch.tensor([[1]]))[0].shape == (1, 1, V)
