"""The study of cost. Run with: python -m pytest tests/unit/test_cost.py"""

from dataclasses import asdict, replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import edit_json, read_json_file, refused_main
from torch.utils.flop_counter import FlopCounterMode

import train
from model import Transformer
from nanocodes.checkpoint import save_checkpoint
from nanocodes.plan import flops_per_target
from studies import cost

CONFIG = train.Config(
    vocab_size=300,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=96,
    max_seq_len=16,
    targets_per_update=128,
    micro_batch=4,
    norm_eps=0.1,
    device="cpu",
    dtype="float32",
    compile=False,
)
WIDTHS = {"learned": 64, "binary16": 16, "gf2": 16, "signs32": 32, "signs64": 64}  # K
INPUTS = tuple(WIDTHS)
LAYER = 64 * (64 + 32 + 32)  # weights of the first q, k and v projections
EVERY_ID = torch.arange(CONFIG.vocab_size)


def make_model(name):
    """A model in float64 whose norms are not all 1."""
    model = Transformer(replace(CONFIG, input_layer=name)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 2, generator=generator)
    return model


def codes_of(model):
    """The numbers of all ids before they are tiled, (V, K)."""
    return model.input.table()[:, : model.config.d_model // model.input.tiles]


# ---------------- Counted


def code_bytes(width):
    """A (K, 16), b (K,), low and high, in float32."""
    return 4 * (16 * width + width + 2)


def test_the_papers_counts():
    found = {name: cost.count(train.Config(input_layer=name)) for name in cost.interfaces(2048)}
    assert list(found) == ["learned", "binary16", "gf2", "signs2048"]
    widths = {"learned": 2048, "binary16": 16, "gf2": 16, "signs2048": 2048}
    for name, counts in found.items():
        learned = name == "learned"
        assert counts["parameters"] == (1_812_039_680 if learned else 1_711_376_384)
        assert counts["input"] == (100_663_296 if learned else 0)
        assert counts["exchanged"] == 4 * counts["parameters"]
        assert counts["K"] == widths[name]
        assert counts["code"] == (0 if learned else code_bytes(widths[name]))
    layer, attention = 3 * 2048**2, 24 * 2048**2
    matrices = 1_711_376_384 - 49 * 2048  # the rest are norms
    share = Fraction(layer, matrices + attention)
    for counts in found.values():
        assert counts["layer, of a pass"] == pytest.approx(float(share))
        folded = share * Fraction(2048 - counts["K"], 2048)
        assert counts["folding saves"] == pytest.approx(float(folded)) and folded < 0.007
        assert counts["all q, k and v"] == 4 * 49_152 * 3 * 2048


def test_the_widest_code_divides_the_width():
    widest = [cost.interfaces(width)[-1] for width in (256, 768, 96)]
    assert widest == ["signs256", "signs256", "signs32"]


@pytest.mark.parametrize("name", INPUTS)
def test_bytes_are_those_of_a_real_checkpoint_and_of_real_tensors(name, tmp_path):
    config = replace(CONFIG, input_layer=name)
    counts = cost.count(config)
    model = Transformer(config)
    optimizer = train.make_optimizer(model, config)
    model(EVERY_ID[None, :16], EVERY_ID[None, 1:17])[1].backward()
    optimizer.step()
    save_checkpoint(model, optimizer, tmp_path, asdict(config), {"update": 1}, keep=0)
    parameters = list(model.parameters())
    step = tmp_path / "step_00000001"
    weights = (step / "model.safetensors").read_bytes()
    stored = len(weights) - 8 - int.from_bytes(weights[:8], "little")  # less the header
    state = torch.load(step / "training_state.pt", weights_only=True)["state"].values()
    moments = sum(one[key].nbytes for one in state for key in ("exp_avg", "exp_avg_sq"))
    assert len(state) == len(parameters) and moments == counts["moments"]
    assert stored + moments == counts["checkpoint"]
    for written, size in (("model.safetensors", stored), ("training_state.pt", moments)):
        assert size < (step / written).stat().st_size < size + 20_000
    gradients = sum(parameter.grad.nbytes for parameter in parameters)
    assert gradients == stored == counts["exchanged"]
    code = sum(buffer.nbytes for buffer in model.input.buffers())
    assert code == counts["code"] == (0 if name == "learned" else code_bytes(WIDTHS[name]))
    assert counts["state"] == stored + gradients + moments + code


def test_a_code_takes_as_many_bytes_for_any_vocabulary():
    for name in ("binary16", "gf2", "signs64"):
        sizes = {
            cost.count(replace(CONFIG, input_layer=name, vocab_size=vocab_size))["code"]
            for vocab_size in (300, 3000, 2**16)
        }
        assert len(sizes) == 1


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", INPUTS)
def test_the_shares_are_those_of_counted_flops(name):
    model, learned = make_model(name), make_model("learned")
    counts, ids = cost.count(model.config), EVERY_ID[None, :16]
    products = flops_per_target(model) / 6
    # A code's own product, which the shares leave out.
    of_code = 0 if name == "learned" else 2 * 16 * WIDTHS[name] * 16

    def step(model):
        return flops(lambda: model(ids, ids)[1].backward())

    # The gradient of the first norm's weight needs as much as a table's.
    assert step(model) == step(learned) + of_code
    for other in (learned, model):
        other.blocks[0].attention_norm.weight.requires_grad_(False)
    assert step(learned) - step(model) + of_code == (name != "learned") * 2 * LAYER * 16
    x, folded = model.input(ids).detach(), cost.fold(model)
    plain = flops(lambda: cost.plain_qkv(model, x))
    short = flops(lambda: cost.folded_qkv(folded, x[..., : folded.shape[1]], 0.1))
    assert plain == 2 * LAYER * 16 == pytest.approx(counts["layer, of a pass"] * 2 * products * 16)
    assert plain - short == pytest.approx(counts["folding saves"] * 2 * products * 16)


# ---------------- Folding


@pytest.mark.parametrize("name", INPUTS)
def test_folding_is_exact_on_every_id(name):
    model = make_model(name)
    folded = cost.fold(model)
    assert folded.shape == (128, WIDTHS[name])
    found = cost.folded_qkv(folded, codes_of(model), CONFIG.norm_eps)  # (V, q + k + v)
    expected = torch.cat(cost.plain_qkv(model, model.input(EVERY_ID[None])), dim=-1)[0]
    assert found.shape == expected.shape == (300, 128)
    error = (found - expected).norm(dim=1)
    assert (error <= 1e-12 * expected.norm(dim=1)).all()
    assert (expected[1:].norm(dim=1) > 0.01).all()
    assert found[0].any() == (name not in ("binary16", "gf2"))  # which have the zero code


def test_the_plain_way_is_what_the_model_does():
    model = make_model("gf2")
    seen = []
    for projection in cost.first_projections(model):
        projection.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(EVERY_ID[None, :16])
    expected = list(seen)
    found = cost.plain_qkv(model, model.input(EVERY_ID[None, :16]))
    for values, others in zip(found, expected, strict=True):
        assert torch.equal(values, others)


def test_folding_serves_in_training():
    model, ids = make_model("gf2"), EVERY_ID[None, :16]
    block, slope = model.blocks[0], torch.randn(1, 16, 128, dtype=torch.float64)
    weights = [projection.weight for projection in cost.first_projections(model)]
    weights.append(block.attention_norm.weight)
    plain = torch.cat(cost.plain_qkv(model, model.input(ids)), dim=-1)
    folded = cost.folded_qkv(cost.fold(model), codes_of(model)[ids], CONFIG.norm_eps)
    gradients = [torch.autograd.grad((way * slope).sum(), weights) for way in (plain, folded)]
    for expected, found in zip(*gradients, strict=True):
        assert expected.norm() > 0.01
        assert (found - expected).norm() < 1e-12 * expected.norm()


# ---------------- Measured


@pytest.mark.parametrize("name", INPUTS)
def test_only_the_input_layer_is_watched(name, monkeypatch):
    model, events = make_model(name), []
    seconds = {"input forward": 0, "input backward": 0}

    def clock():
        events.append("clock")
        return len(events)

    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=clock))
    cost.watch(model.input, seconds, torch.device("cpu"))
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda *_: events.append("block"))
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    for _ in range(2):
        model(EVERY_ID[None, :16], EVERY_ID[None, :16])[1].backward()
    backward = ["clock"] * 2 * (name == "learned")
    assert events == (["clock", "clock", "block"] + ["gradient"] * 9 + backward) * 2
    assert seconds == {"input forward": 2, "input backward": len(backward)}


STEP_SECONDS = {
    "data": 0.0,
    "forward": 3.0,
    "backward": 6.0,
    "clip": 1.0,
    "optimizer": 2.0,
    "seconds": 12.0,
    "peak_bytes": 7e6,
    "input forward": 0.5,
    "input backward": 2.0,
}
INFERENCE_SECONDS = {"plain": 0.4, "folded": 0.1, "tabulated": 0.2, "pass": 4.0, "token": 0.5}


def two_rounds(seconds, scale):
    """Invented measurements: whatever takes time takes `scale` times as long, and twice that in
    the second round."""
    return {key: [scale * value, 2 * scale * value] for key, value in seconds.items()}


def test_figures_come_turn_by_turn():
    scales = dict(zip(cost.interfaces(256), (1, 0.5, 0.25, 2), strict=True))
    changes = {"targets_per_update": 1024}
    measured = {
        "training": {name: two_rounds(STEP_SECONDS, scale) for name, scale in scales.items()},
        "inference": {name: two_rounds(INFERENCE_SECONDS, scale) for name, scale in scales.items()},
    }
    found = cost.summarise("smoke", changes, measured)
    gf2 = found["gf2"]
    assert gf2["step / learned"].tolist() == gf2["token / learned"].tolist() == [0.25, 0.25]
    assert gf2["parameters / learned"] == 6_293_760 / 8_390_912
    learned = found["learned"]
    assert learned["full update"].tolist() == [4 * 9 + 3, 2 * (4 * 9 + 3)]  # 4,096 targets
    assert learned["other forward"].tolist() == [2.5, 5]
    assert learned["other backward"].tolist() == [4, 8]
    assert learned["plain / folded"] == pytest.approx([4, 4])
    assert learned["saved: folded"] == pytest.approx([0.075, 0.075])
    assert learned["saved: tabulated"] == pytest.approx([0.05, 0.05])
    page = "\n".join(cost.report("smoke", found, changes))
    assert "measured with targets_per_update 1,024" in page and page.count("| gf2") == 4
    assert "0.250 (0.250 to 0.250)" in page
    bare = "\n".join(cost.report("smoke", cost.summarise("smoke", {}, {}), {}))
    assert bare.count("| gf2") == 2 and "measured" not in bare
    assert " 1,096 |" in bare  # bytes of its code


@pytest.fixture
def tiny_study(monkeypatch):
    """The study at one size, of two interfaces in a tiny shape."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that are timed
    shape = {
        "vocab_size": 300,
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 2,
        "d_ff": 32,
        "max_seq_len": 16,
        "targets_per_update": 128,
        "micro_batch": 4,
    }
    size = {"rounds": 2, "new_tokens": 4, "shapes": {"small": {"targets_per_update": 64}}}
    monkeypatch.setattr(cost, "recipe", lambda name: shape)
    monkeypatch.setattr(cost, "interfaces", lambda width: ["learned", "signs32"])
    monkeypatch.setitem(cost.SIZES, "smoke", size)
    return size


def test_a_part_that_is_there_is_not_made_again(tiny_study, tmp_path, monkeypatch, capsys):
    command, made, measure = ["--out", str(tmp_path)], [], cost.measure

    def counted(shape, part, size):
        made.append((shape, part))
        return measure(shape, part, size)

    monkeypatch.setattr(cost, "measure", counted)
    cost.main(command)
    runs, page = tmp_path / "runs", capsys.readouterr().out
    before = {path: path.read_bytes() for path in runs.iterdir()}
    assert {path.name for path in before} == {"small-training.json", "small-inference.json"}
    assert page.count("| signs32") == 8  # two tables of each shape, and two that are measured
    assert (tmp_path / "cost.md").read_text() in page
    picture = (tmp_path / "cost.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    found = read_json_file(tmp_path / "cost.json")["shapes"]
    assert list(found) == list(cost.SHAPES) and "step" not in found["paper"]["learned"]
    for name, figures in found["small"].items():
        parts = [key for key in figures if key.startswith(("input ", "other "))]
        total = np.sum([figures[key] for key in [*parts, "clip", "AdamW"]], axis=0)
        assert len(parts) == 4 and len(figures["token"]) == 2
        assert (total <= figures["step"]).all()
        assert all(spent > 0 for part in parts for spent in figures[part]) == (name == "learned")
    assert found["small"]["signs32"]["input backward"] == [0, 0]

    cost.main(command)
    assert made == [("small", "training"), ("small", "inference")]
    (runs / "small-inference.json").rename(tmp_path / "taken")
    again = read_json_file(tmp_path / "taken")["turns"]
    monkeypatch.setattr(cost, "measure", lambda shape, part, size: made.append(part) or again)
    cost.main(command)
    assert made[2:] == ["inference"]
    assert {path: path.read_bytes() for path in runs.iterdir()} == before

    (tmp_path / "cost.png").unlink()
    cost.main([*command, "--redraw"])
    assert (tmp_path / "cost.png").read_bytes() == picture

    record = read_json_file(runs / "small-training.json")
    record["circumstances"]["date"] = "2020-02-02"
    edit_json(runs / "small-training.json", record)
    cost.main(command)
    assert "torch" in (tmp_path / "cost.md").read_text().split(", 2020-02-02 and ")[0]

    monkeypatch.setitem(cost.SIZES, "smoke", tiny_study | {"rounds": 3})
    capsys.readouterr()
    error = refused_main(capsys, cost.main, *command)
    assert "is of another size or machine; choose another --out" in error
