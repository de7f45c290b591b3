"""The backbone, the loss and generation, against a plain float64 reference and transformers.

python -m pytest tests/unit/test_model.py
"""

import math
import re

import numpy as np
import pytest
import torch
from helpers import assert_close, lively, random_ids, refused
from reference import (
    INPUT_LAYERS,
    V,
    double,
    gradients,
    numpy_weights,
    reference_attention,
    reference_logits,
    reference_norm,
    reference_rotate,
    reference_swiglu,
    small,
)
from torch.nn import functional as F

import codes
from model import Attention, SwiGLU, Transformer, rope_tables, rotate
from nanocodes.checkpoint import backbone_hash


def ids_of(*shape, seed=0, least=1):
    return random_ids(*shape, vocab_size=V, seed=seed, least=least)


# ---------------- Initial weights, what is stored


def test_backbone_hash_sees_the_seed_and_every_weight():
    model = Transformer(small())
    hashes = {backbone_hash(model), backbone_hash(Transformer(small(init_seed=1338)))}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        hashes.add(backbone_hash(model))
    assert len(hashes) == 2 + len(list(model.parameters()))


def test_backbone_hash_does_not_see_the_table():
    model = Transformer(small(input_layer="learned"))
    before = backbone_hash(model)
    torch.nn.init.zeros_(model.input.weight)
    assert backbone_hash(model) == before


def test_learned_table_is_not_the_backbones_numbers():
    model = Transformer(small(input_layer="learned"))
    first = model.blocks[0].attention.q_proj.weight.flatten()
    table = model.input.weight.flatten()[: len(first)]
    assert not (first == table).any()
    correlation = torch.corrcoef(torch.stack((first, table)))[0, 1]
    assert abs(correlation) < 5 / len(first) ** 0.5


@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
def test_two_constructions_are_equal_bitwise(input_layer):
    one = Transformer(small(input_layer=input_layer)).state_dict()
    torch.rand(7)  # the global generator plays no part
    two = Transformer(small(input_layer=input_layer)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
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


# ---------------- The reference


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
    ids = ids_of(2, 11)
    logits, loss = model(ids)
    assert loss is None and logits.std() > 0.5
    for b in range(2):
        assert_close(logits[b], reference_logits(model, ids[b].tolist()), 1e-11)


@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
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
    ids = ids_of(3, 24, least=0)
    ids[0, :3] = 0
    with torch.no_grad():
        assert_close(model(ids)[0], llama(ids).logits, 1e-5)


# ---------------- The loss


def test_loss_equals_cross_entropy(float64):
    model = double(small())
    ids, targets = ids_of(3, 8), ids_of(3, 8, seed=1, least=0)
    logits, loss = model(ids, targets)
    assert logits is None and loss.shape == ()
    logits = model(ids)[0]
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), 1e-12)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    assert_close(model.losses(ids, targets), each.view(3, 8), 1e-12)


def test_bfloat16_autocast_is_close_and_its_losses_are_float32():
    model = lively(Transformer(small()))
    ids, targets = ids_of(4, 24), ids_of(4, 24, seed=1)
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
    ids, targets = ids_of(2, 9), ids_of(2, 9, seed=1)
    logits = model(ids)[0]
    assert logits.dtype == torch.bfloat16
    losses = model.losses(ids, targets)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    assert losses.dtype == torch.float32
    assert_close(losses, expected.view(2, 9), 1e-6)


@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
def test_recomputed_activations_give_the_same_gradients_bitwise(input_layer):
    model = lively(Transformer(small(input_layer=input_layer)))
    ids, targets = ids_of(2, 12, least=0), ids_of(2, 12, seed=1)
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


# ---------------- Generation


def greedy(model, ids, steps):
    """Without a cache: the whole row again for every token."""
    for _ in range(steps):
        ids = torch.cat((ids, model(ids)[0][:, -1:].float().argmax(dim=-1)), dim=1)
    return ids[:, -steps:]


def generated(model, ids, steps, **options):
    return torch.stack(list(model.generate(ids, steps, **options)), dim=1)


@pytest.mark.parametrize("n_kv_heads, vocab_size", [(None, V), (2, V), (None, 192)])
@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
def test_generation_with_cache_equals_recomputation(input_layer, n_kv_heads, vocab_size, float64):
    shape = dict(n_kv_heads=n_kv_heads, vocab_size=vocab_size)  # 192: the head in 64 pieces
    model = double(small(input_layer=input_layer, **shape), gain=3)
    prompts = ids_of(5, 4)
    prompts[0, 0] = prompts[1, :2] = prompts[2, 2] = 0
    expected = greedy(model, prompts, 20)
    assert len(expected.unique()) > 10
    assert torch.equal(generated(model, prompts, 20, temperature=0), expected)
    assert torch.equal(generated(model, prompts, 20, top_k=1), expected)


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 13], [1, 6, 1, 9, 3], [2, 18]])
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_cached_continuation_equals_the_whole_row(pieces, n_kv_heads, float64):
    model = double(small(n_kv_heads=n_kv_heads))
    ids = ids_of(2, 20)
    ids[0, :3] = ids[1, 5] = 0
    cache = [[] for _ in model.blocks]
    hidden = torch.cat([model.hidden(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    assert_close(hidden, model.hidden(ids), 1e-11)


def test_sampling_repeats_with_its_seed():
    model, ids = Transformer(small()), ids_of(3, 2)

    def sample(seed):
        return generated(model, ids, 10, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_sampling_follows_the_softmax():
    model, rows = lively(Transformer(small())), 20_000
    ids = ids_of(1, 3)
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
    assert list(model.generate(ids_of(2, 3), 0)) == []
    stream = model.generate(ids_of(2, 3), 10**9, temperature=0)
    assert [next(stream).shape for _ in range(4)] == [(2,)] * 4


def test_positions_past_max_seq_len_are_refused():
    model = Transformer(small(max_seq_len=8))
    assert generated(model, ids_of(1, 3), 6, temperature=0).shape == (1, 6)
    refused(lambda: generated(model, ids_of(1, 3), 7, temperature=0), "max_seq_len 8")
    refused(lambda: model(ids_of(1, 9)), "max_seq_len 8")
    assert model(ids_of(1, 8))[0].shape == (1, 8, V)


# ---------------- Refusals


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
