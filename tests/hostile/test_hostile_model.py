"""Checkpoints that are torn, strange or at odds with themselves: refused, in one sentence.

python -m pytest tests/hostile/test_hostile_model.py
"""

import dataclasses
import json

import pytest
import torch
from helpers import lively, random_ids, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import INPUT_LAYERS, V, gradients, small
from safetensors.torch import save_file

import model as model_file
from model import ModelConfig, Transformer, load_checkpoint, rope_tables
from nanocodes.checkpoint import backbone_hash


def save(model, step, **changes):
    step.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), step / "model.safetensors")
    values = dataclasses.asdict(model.config) | {"lr": 1e-3, "data": "data/text"} | changes
    (step / "config.json").write_text(json.dumps(values))
    return step


def equal_weights(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("input_layer", INPUT_LAYERS)
def test_checkpoint_gives_the_model_back(input_layer, tmp_path):
    model = lively(Transformer(small(input_layer=input_layer, n_kv_heads=2)))
    step = save(model, tmp_path / "step_00000012")
    for path in (tmp_path, step, str(tmp_path), str(step)):
        loaded = load_checkpoint(path)
        assert type(loaded.config) is ModelConfig and loaded.config == model.config
        assert equal_weights(loaded, model) and not loaded.training
        assert backbone_hash(loaded) == backbone_hash(model)
        ids = random_ids(2, 9, vocab_size=V, least=0)
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

    def linear_code(name, *, bits, real=model_file.linear_code, **rest):
        assert bits < 2**10, "makes huge codes"
        return real(name, bits=bits, **rest)

    monkeypatch.setattr(model_file, "Block", block)
    monkeypatch.setattr(model_file, "rope_tables", tables)
    monkeypatch.setattr(model_file, "linear_code", linear_code)
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
