"""Files from strangers: each reader takes one whole or refuses it in one sentence that names it.

Run with `python -m pytest tests/hostile/test_strangers.py`. What once failed is kept as an example.
"""

import copy
import gzip
import json
import lzma
import os
import pickle
import shutil
from dataclasses import asdict, fields
from io import BytesIO

import numpy as np
import pyarrow
import pytest
import torch
from fuzzing import (
    DEEP,
    changed_bytes,
    changes,
    dumped,
    fuzzed,
    json_files,
    json_values,
    read,
    tensor_file,
    tensor_files,
    write,
)
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import save, save_file

import codes
import convert
import evaluate
import train
from model import ModelConfig, Transformer, load_checkpoint
from nanocodes import benchmarks, results
from nanocodes.batches import read_windows, window_count
from nanocodes.checkpoint import save_checkpoint
from nanocodes.encoder import make_encoder
from nanocodes.files import read_json, sha256, write_json
from nanocodes.metrics import draw_losses, read_metrics
from nanocodes.plan import parameter_counts
from nanocodes.report import report, tasks_part
from nanocodes.results import MeasuredRun, Results
from nanocodes.shards import SPLITS, open_shards
from nanocodes.sources import file_documents, parse_source
from nanocodes.tokenizer import load_tokenizer, train_bpe, vocabulary

SHAPE = dict(vocab_size=300, d_model=16, n_layers=1, n_heads=2, d_ff=8, max_seq_len=16)

MODEL = Transformer(ModelConfig(**SHAPE))

CONFIG = vars(MODEL.config) | {"data": "corpus"}

LLAMA = {theirs: CONFIG[ours] for ours, theirs in convert.FIELDS.items()}
LLAMA |= {"num_key_value_heads": 2, "model_type": "llama", "rope_parameters": {"rope_theta": 1e4}}

LLAMA_STATE = {convert.hf_name(name): weight for name, weight in MODEL.state_dict().items()}
OURS = save(MODEL.state_dict())
THEIRS = save(LLAMA_STATE)

TOKENIZER = json.loads(train_bpe("bpe:300", ["def hello(): return 1\n"]))

LINE = {"update": 1, "targets": 64, "loss": 3.5, "val_loss": 3.4, "bits_per_byte": 1.2}

RECORD = benchmarks.TaskRecord(
    metric="acc",
    value=50.0,
    stderr=1.5,
    num_fewshot=0,
    versions={"piqa": 1},
    requests=4,
    seconds=1.0,
    documents=[(1.0, 1), (0.0, 1)],
)

TALL = {"max_seq_len": 2**20, "d_model": 2**24, "n_heads": 1, "n_kv_heads": 1}  # cosines of 32 TB


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("strangers")


def write_corpus(folder, ids=bytes(200), tokens=100):
    write(folder, tokenizer__json=dumped(TOKENIZER), train_00000__bin=ids, val_00000__bin=ids)
    meta = dict(vocab_size=300, separator=0, tokenizer="bpe:300", sources=[], splits={})
    for split in SPLITS:
        shard = dict(file=f"{split}_00000.bin", tokens=tokens, max_id=0, sha256="")
        meta["splits"][split] = dict(documents=1, tokens=tokens, bytes=9, shards=[shard])
    meta["tokenizer_sha256"] = sha256(folder / "tokenizer.json")
    write_json(folder / "meta.json", meta)


near_ids = st.lists(st.integers(0, 305)).map(lambda ids: np.array(ids, dtype="<u2").tobytes())


@fuzzed(150, (st.binary(max_size=99) | near_ids, st.none() | st.integers(1, 60)))
def test_shards_give_their_very_ids_or_are_refused(place, data, tokens):
    write_corpus(place / "corpus", data, tokens or len(data) // 2)

    def all_ids():
        split = open_shards(place / "corpus", "train")
        ids, targets = read_windows(split, range(window_count(split, 4)), 4)
        return ids.flatten().tolist() + targets[-1, -1:].tolist()

    if ids := read("corpus", all_ids):
        assert len(data) == 2 * (tokens or len(data) // 2) and max(ids) < 300
        assert ids == np.frombuffer(data, "<u2")[: len(ids)].tolist()


def write_step(place, config=None, weights=None, state=None):
    shutil.rmtree(place / "run", ignore_errors=True)
    step = write(place / "run/step_00000001", tokenizer__json=dumped(TOKENIZER))
    (step / "config.json").write_bytes(dumped(CONFIG) if config is None else config)
    (step / "model.safetensors").write_bytes(OURS if weights is None else weights)
    (step / "state.json").write_bytes(b"{}" if state is None else state)
    return step


def write_llama(place, config=None, weights=None, index=None):
    folder = write(place / "hub/llama", tokenizer__json=dumped(TOKENIZER))
    (folder / "config.json").write_bytes(dumped(LLAMA) if config is None else config)
    name = "model.safetensors" if index is None else "part.safetensors"
    (folder / name).write_bytes(THEIRS if weights is None else weights)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    return folder


def report_of(run):
    """The run as evaluate.py reports it, once its weights are read."""
    run = evaluate.open_run(str(run))
    counts = parameter_counts(evaluate.load_run(run, "cpu"))
    measured = MeasuredRun(**vars(run), parameters=counts, held_out=None, tasks={})
    return report(results_of([measured]))


def results_of(runs, harness=None):
    """The Results of some runs, without held-out loss."""
    return Results(
        torch="",
        device="cpu",
        dtype="float32",
        harness=harness,
        limit=None,
        held_out=None,
        runs=runs,
    )


def same_head(model, files):
    return "weights" in files or torch.equal(model.head.weight, MODEL.head.weight)


TWO_LINES = tensor_file(dumped({"a": dict(dtype="F\nX", shape=[1], data_offsets=[0, 4])}), bytes(4))

STEPS = changes(
    config=json_files(CONFIG),
    weights=tensor_files(OURS),
    state=json_files({"update": 1, "targets": 64, "sha256": {}}),
)

BAD_STEPS = [
    dict(weights=TWO_LINES),
    dict(config=dumped(CONFIG | TALL)),
    dict(config=dumped(CONFIG | {"n_heads": 1, "d_model": 2**31 - 2})),
]


@fuzzed(300, (STEPS,), *((files,) for files in BAD_STEPS))
def test_step_folders(place, files):
    step = write_step(place, **files)
    model = read("step_00000001", load_checkpoint, step)
    assert model is None or same_head(model, files)
    read("step_00000001", report_of, step)


INDEX = {"weight_map": {"lm_head.weight": "part.safetensors"}}

LLAMAS = changes(config=json_files(LLAMA), weights=tensor_files(THEIRS), index=json_files(INDEX))

BAD_LLAMAS = [dict(weights=TWO_LINES), dict(weights=save(LLAMA_STATE | {"a\nb": torch.zeros(1)}))]
BAD_LLAMAS += [
    dict(index=dumped({"weight_map": {"a": file}}))
    for file in ("", "..", "x\ny", "../beside.safetensors")
]
BAD_LLAMAS += [
    dict(config=dumped(LLAMA | changed))
    for changed in (
        {convert.FIELDS[name]: value for name, value in TALL.items()},
        {"hidden_act": "a\nb"},
        {"input_layer": [1]},
        {"hidden_size": 10**400, "num_attention_heads": 2.5},
        {"hidden_size": 2**31 - 2, "num_attention_heads": 2**30 - 1, "num_key_value_heads": 1},
    )
]


@fuzzed(120, (LLAMAS,), *((files,) for files in BAD_LLAMAS))
def test_llama_folders(place, files):
    other = {name: weight + 1 for name, weight in LLAMA_STATE.items()}
    folder = write_llama(place, **files)
    save_file(other, place / "hub/beside.safetensors")  # outside the folder
    model = read("llama", convert.load_hf, folder)
    assert model is None or same_head(model, files)
    read("llama", report_of, folder)
    shutil.rmtree(place / "from-hf", ignore_errors=True)
    read("llama", convert.from_hf, folder, place / "from-hf")
    assert (place / "from-hf").exists() == (model is not None)


@pytest.mark.parametrize("dtype", "int8 bool int64 complex64 float8_e4m3fn".split())
def test_weights_that_are_no_plain_floats_are_refused(place, dtype):
    states = MODEL.state_dict(), LLAMA_STATE
    ours, theirs = ({k: v.to(getattr(torch, dtype)) for k, v in s.items()} for s in states)
    if dtype != "float8_e4m3fn":  # ours without a scale are plain numbers
        assert read("step_00000001", load_checkpoint, write_step(place, weights=save(ours))) is None
    assert read("llama", convert.load_hf, write_llama(place, weights=save(theirs))) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(place, value):
    weights = {name: weight.clone() for name, weight in MODEL.state_dict().items()}
    weights["head.weight"][5, 7] = value
    assert read("step_00000001", load_checkpoint, write_step(place, weights=save(weights))) is None


@pytest.mark.parametrize("there", [0, 2**40])
def test_tensors_of_a_terabyte_are_refused_without_taking_memory(place, there):
    huge = dict(dtype="U8", shape=[2**40], data_offsets=[0, 2**40])
    data = tensor_file(dumped({"head.weight": huge}), b"")
    step, folder = write_step(place, weights=data), write_llama(place, weights=data)
    for reader, part in (load_checkpoint, step), (convert.load_hf, folder):
        os.truncate(part / "model.safetensors", len(data) + there)  # a hole takes no room on a disk
        with pytest.raises(ValueError, match=part.name):
            reader(part)


def saved_run(place):
    """A run of one update on a small corpus: its config and its step folder."""
    write_corpus(place / "corpus")
    options = dict(targets_per_update=16, micro_batch=1, max_updates=2, warmup_updates=0)
    options |= dict(device="cpu", dtype="float32", compile=False)
    config = train.Config(
        data=str(place / "corpus"), out_dir=str(write(place / "run")), **SHAPE, **options
    )
    model = Transformer(config)
    optimizer = train.make_optimizer(model, config)
    model(torch.ones(1, 4, dtype=int), torch.ones(1, 4, dtype=int))[1].backward()
    optimizer.step()
    state = dict(update=1, backbone_hash="", data_sha256=sha256(place / "corpus/meta.json"))
    save_checkpoint(model, optimizer, config.out_dir, asdict(config), state, keep=2)
    shutil.copyfile(place / "run/step_00000001/config.json", place / "run/config.json")
    shutil.copyfile(place / "corpus/tokenizer.json", place / "run/tokenizer.json")
    return config, place / "run/step_00000001"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The update at which train.py resumes, with other files in place of the run's own."""
    config, step = saved_run(tmp_path_factory.mktemp("resume"))

    def step_to_resume():
        train.open_run_folder(config, True)
        return train.newest_step(config)

    def with_file(name, change):
        file = step.parent / name
        whole = file.read_bytes()
        file.write_bytes(change(json.loads(whole)))
        found = read("run", step_to_resume)
        update = found and read_json(found / "state.json")["update"]
        for aside in step.parent.glob("*.damaged-*"):
            aside.rename(step)
        file.write_bytes(whole)
        return update

    return with_file


@fuzzed(150, (st.sampled_from(["step_00000001/state.json", "config.json"]), st.data()))
def test_state_and_config_of_a_run_to_resume(resumed, name, data):
    update = resumed(name, lambda whole: data.draw(json_files(whole)))
    assert update is None or type(update) is int


@pytest.mark.parametrize("update", [1.0, True])
def test_an_update_that_is_no_integer_is_not_resumed(resumed, update):
    change = {"update": update}
    assert resumed("step_00000001/state.json", lambda whole: dumped(whole | change)) is None


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return open, ("marker", "w")


@pytest.mark.parametrize(
    "value",
    [
        pickle.dumps(Evil()),
        Evil(),
        {"state": Evil()},
        b"\x80\x02a\nb",
        b"",
        [1],
        {},
        {"param_groups": []},
        {"state": {0: 5}},
    ],
    ids=range(9),
)
def test_training_state_of_a_stranger_runs_nothing(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    config, step = saved_run(tmp_path)
    file = step / "training_state.pt"
    buffer = BytesIO()
    if not isinstance(value, bytes):
        whole = torch.load(file, weights_only=True)
        torch.save(whole | value if value and isinstance(value, dict) else value, buffer)
    file.write_bytes(value if isinstance(value, bytes) else buffer.getvalue())
    state = read_json(step / "state.json")  # with a sum that fits: no accident, but intent
    state["sha256"][file.name] = sha256(file)
    write_json(step / "state.json", state)
    with pytest.raises(ValueError, match="step_00000001 is no whole checkpoint"):
        train.train(config, resume=True)
    assert not (tmp_path / "marker").exists() and not (tmp_path / "run/step_00000002").exists()


RUN = results.Run(
    name="a",
    checkpoint="",
    hugging_face=False,
    input_layer="gf2",
    vocab_size=300,
    max_seq_len=16,
    data=None,
    data_sha256=None,
    update=1,
    targets=64,
    tokenizer="",
    sha256={},
    validation=results.Curve([], []),
)
VALUES = [float("inf"), 10**400, {}, [1, 2], "$\\frac{$", 1e308, None]

LINES = [dumped(LINE | {key: value}) for key in ("targets", "loss", "val_loss") for value in VALUES]


@fuzzed(
    30, (json_files(LINE),), (DEEP,), (b'{"update":1,"a":' * 100_000,), *((line,) for line in LINES)
)
def test_metrics(place, text):
    (place / "metrics.jsonl").write_bytes(text + b"\n" + dumped(LINE | {"targets": -1e308}))
    metrics = read("metrics.jsonl", read_metrics, place)
    assert metrics is None or all(type(m["update"]) is int for m in metrics)
    targets, losses = read("metrics.jsonl", evaluate.validation_curve, place) or ((), ())
    assert {type(x) for x in targets} <= {int} and {type(y) for y in losses} <= {float}
    read("metrics.jsonl", draw_losses, place)


@fuzzed(
    80, (st.data(),), (b"{}",), (b"[]",), (dumped({"key": {}} | asdict(RECORD) | {"value": 9.0}),)
)
def test_records_of_tasks(place, data):
    folder = write(place / "tasks")

    def record():
        conditions = benchmarks.Conditions({}, "float32", None, None)
        kept_in = benchmarks.RecordFile(folder, "piqa", conditions, with_lines=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmarks, "run_task", lambda *_: (copy.deepcopy(RECORD), []))
            return benchmarks.task_record(None, None, kept_in)

    record()
    [file] = folder.iterdir()
    whole = json.loads(file.read_bytes())
    file.write_bytes(data if isinstance(data, bytes) else data.draw(json_files(whole)))
    kept = read("piqa-", record)
    if kept is not None:
        assert kept.value == benchmarks.pooled(kept.documents, kept.metric), "another value"
        tasks = evaluate.compare_tasks(RUN, {"piqa": kept}, {"piqa": kept})
        runs = [MeasuredRun(**vars(RUN), parameters={}, held_out=None, tasks=tasks)] * 2
        assert len(tasks_part(results_of(runs, harness="0"))) == 4


BPE = TOKENIZER["model"]
WORDS = {"<|endoftext|>": 0}
PARTS = [
    {"model": part}
    for part in (
        dict(type="WordLevel", vocab=WORDS, unk_token="[UNK]"),
        dict(
            type="WordPiece",
            vocab=WORDS,
            unk_token="[UNK]",
            continuing_subword_prefix="##",
            max_input_chars_per_word=100,
        ),
        dict(type="Unigram", vocab=[["a", -1.0]], unk_id=None, byte_fallback=False),
        BPE | {"unk_token": "[UNK]", "vocab": {}, "merges": []},
        BPE | {"continuing_subword_prefix": "##"},
    )
]
PARTS += [{"pre_tokenizer": dict(type="FixedLength", length=0)}]
PARTS += [
    {"normalizer": dict(type="Replace", pattern={kind: ""}, content="xx")}
    for kind in ("String", "Regex")
]


def ids_of_text(path):
    loaded = load_tokenizer(path)
    size, separator = vocabulary(loaded)
    encode, _ = make_encoder(loaded)
    ids = encode("def hello(): 漢 <|endoftext|> 12\0").tolist()
    assert separator not in ids and all(0 <= token_id < size <= 65536 for token_id in ids)
    return ids


@fuzzed(60, (json_files(TOKENIZER),), *((dumped(TOKENIZER | part),) for part in PARTS))
def test_tokenizers(place, data):
    (place / "tokenizer.json").write_bytes(data)
    read("tokenizer", ids_of_text, place / "tokenizer.json")


def documents_of(place, name, data):
    (place / name).write_bytes(data)
    documents = read(name, lambda: list(file_documents([place / name])))
    assert all(type(document) is bytes for document in documents or ())
    return documents


def parquet_bytes(table):
    parquet.write_table(pyarrow.table(table), sink := BytesIO())
    return sink.getvalue()


ROWS = st.lists(json_files({"text": "abc", "id": 1}), max_size=2).map(b"\n".join)

TABLE = parquet_bytes({"text": ["abc", "d" * 50], "id": [1, 2]})

PACKERS = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.xz": lzma.compress}

TEXT = ROWS.flatmap(
    lambda rows: st.sampled_from(sorted(PACKERS)).flatmap(
        lambda kind: st.tuples(
            st.just(kind), st.just(PACKERS[kind](rows)) | changed_bytes(PACKERS[kind](rows))
        )
    )
)


@fuzzed(
    300,
    (TEXT | st.tuples(st.just("parquet"), changed_bytes(TABLE)),),
    (("jsonl", b'{"text": "\\ud800"}'),),
    (("jsonl", b'["text"]\n{"text": 5}'),),
)
def test_documents(place, file):
    documents_of(place, f"rows.{file[0]}", file[1])


@pytest.mark.parametrize("value", [None, 1, ["a"], b"a\xff", {"text": "a"}, 1.5], ids=repr)
def test_columns_that_are_no_text_are_refused(place, value):
    for name in ("text", "other"):
        assert documents_of(place, "rows.parquet", parquet_bytes({name: [value]})) is None


HEX = codes.matrix_to_hex(codes.invertible_matrix(16, 1)).encode()

HEXES = st.text() | changed_bytes(HEX).map(lambda data: data.decode("latin-1"))


@fuzzed(300, (HEXES, st.just(16) | st.integers(0, 70)), ("", 0), ("1\n2", 2))
def test_matrices(text, bits):
    matrix = read("matrix", codes.matrix_from_hex, text, bits)
    if matrix is not None:
        assert codes.gf2_rank(matrix) == bits
        assert codes.ids_from_codes(matrix).tolist() == [int(word, 16) for word in text.split()]


LITERALS = json_values.map(repr) | st.text() | st.text("[]{}()-+*:,'\"\\.0x9eEj_ \n", max_size=12)

FIELDS = [field.name for field in fields(train.Config)]
WRONG = ["{[]: 1}", "{[]}", "-" * 100_000 + "1", "1" + "+1" * 100_000, "0x" + "f" * 5000]


@fuzzed(
    400,
    (st.sampled_from(sorted(FIELDS)), LITERALS),
    *(("lr", text) for text in WRONG),
    ("input_layer", "none"),
    ("input_layer", "true"),
)
def test_options(name, text):
    config = read(name, train.make_config, [], {name: text})
    assert config is None or config.lr >= 0 and type(config.out_dir) is str


SOURCES = st.text() | st.from_regex(r"(?s).{0,4}=[0-9.٣²①e+-]{0,5}", fullmatch=True)


@fuzzed(300, (SOURCES,), ("a\nb=x",), ("\0=" + "9" * 400,), ("x" * 300 + "=1",))
def test_sources(text):
    source = read("", parse_source, text)
    assert source is None or source.name in text and 0 < source.share < float("inf")


def test_what_is_whole_is_read(place):
    """So that none of the above passes because everything is refused."""
    assert report_of(write_step(place)) and report_of(write_llama(place))
    (place / "tokenizer.json").write_bytes(dumped(TOKENIZER))
    (place / "metrics.jsonl").write_bytes(dumped(LINE))
    assert ids_of_text(place / "tokenizer.json")
    assert evaluate.validation_curve(place) == ([64], [3.4])
    assert documents_of(place, "rows.jsonl", b'{"text": "abc"}') == [b"abc"]
    assert documents_of(place, "rows.parquet", TABLE) == [b"abc", b"d" * 50]


def test_moments_of_another_shape_are_refused(tmp_path):
    config, step = saved_run(tmp_path)
    state = torch.load(step / "training_state.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, step / "training_state.pt")
    saved = read_json(step / "state.json")
    saved["sha256"]["training_state.pt"] = sha256(step / "training_state.pt")
    write_json(step / "state.json", saved)
    with pytest.raises(ValueError, match="exp_avg 0 of the optimizer is of another shape"):
        train.train(config, resume=True)
