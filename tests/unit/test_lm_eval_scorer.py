"""Requests -> nats: each equals that of a model that reads it alone, and that of lm-eval's HFLM.

python -m pytest tests/unit/test_lm_eval_scorer.py
"""

import json

import numpy as np
import pytest
import torch
from evaluation import RUNS, VOCABULARY

from convert import to_hf
from nanocodes.benchmarks import load_tasks, run_task
from nanocodes.lm_eval_scorer import Request, make_scorer, score


def score_alone(model, request, max_length):
    """The nats of one request, and whether it is greedy, without any batch."""
    continuation = request.continuation
    ids = (request.context + continuation)[-max_length - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0, -len(continuation) :].double()
    nats = logits.log_softmax(dim=1)[range(len(continuation)), continuation].sum().item()
    return nats, logits.argmax(dim=1).tolist() == continuation


def mixed_requests(generator):
    """Choices, one-token choices, shared examples, repeated and too long requests, in disorder."""

    def draw(count):
        return generator.integers(1, VOCABULARY, count).tolist()

    requests = []
    for _ in range(6):
        examples, question = draw(40), draw(generator.integers(1, 30))
        requests += [(question, draw(generator.integers(1, 9))) for _ in range(4)]
        requests += [(examples + question, [i]) for i in (5, 6, 7)]
        requests += [(examples + draw(4), [i]) for i in (5, 6)]
        requests.append((question + question[:3], requests[-6][1]))
    requests += [(draw(200), draw(3)), (draw(1), draw(128)), (draw(1), draw(1)), requests[0]]
    # Id 0 has the zero code: alone, repeated, and at the head of what choices share.
    requests += [([0], draw(5)), ([0, 0], [0, 3]), *(([0, 0, *question], [i]) for i in (8, 9))]
    requests += [([0, *question], draw(3)) for _ in range(3)]
    return [Request(*requests[i]) for i in generator.permutation(len(requests))]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("batch_tokens", [1, 300, 8192])
def test_score_equals_one_request_at_a_time(scored, name, batch_tokens):
    model = scored.models[name]
    requests = mixed_requests(np.random.default_rng(3))
    scores = score(model, requests, 128, batch_tokens)
    for request, found in zip(requests, scores, strict=True):
        nats, is_greedy = score_alone(model, request, 128)
        assert found.nats == pytest.approx(nats, rel=1e-5, abs=1e-4)
        assert found.is_greedy == is_greedy


def test_greedy_is_seen(scored):
    model = scored.models["gf2"]
    ids = torch.cat(list(model.generate(torch.tensor([[9, 8, 7]]), 4, temperature=0))).tolist()
    requests = [Request([9, 8, 7], ids), Request([9, 8, 7], [*ids[:3], ids[3] + 1])]
    assert [found.is_greedy for found in score(model, requests, 128, 64)] == [True, False]


QUESTION = list(range(1, 61))


@pytest.mark.parametrize(
    ("requests", "passes"),
    [
        # The question, then the first token of each choice.
        ([(QUESTION, [i, 7]) for i in range(1, 5)], [60, 4]),
        # What the choices share is scored, and read once too.
        ([(QUESTION, [7, 8, i, i]) for i in range(1, 5)], [62, 4]),
        ([(QUESTION, [i]) for i in range(1, 5)], [60]),
        # Rows of unlike length are not padded to one.
        ([([i], [i] * length) for i, length in enumerate((100, 99, 50, 49))], [200, 100]),
    ],
)
def test_shared_beginning_is_read_once(requests, passes, scored, monkeypatch):
    model = scored.models["learned"]
    read = []
    hidden = model.hidden

    def counted(ids, *others):
        read.append(ids.numel())
        return hidden(ids, *others)

    monkeypatch.setattr(model, "hidden", counted)
    score(model, [Request(*request) for request in requests], 128, 8192)
    assert read == passes


def test_long_continuation_is_refused(scored):
    with pytest.raises(ValueError, match="a continuation has 129 tokens"):
        score(scored.models["learned"], [Request([1], [1] * 129)], 128, 8192)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("gf2", "hellaswag winogrande lambada_openai wikitext commonsense_qa:3"),
        ("grouped", "piqa mmlu:5"),
    ],
)
def test_every_request_equals_hflm(scored, name, tasks, tmp_path, offline):
    from lm_eval.models.huggingface import HFLM

    to_hf(scored.folder / name, tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4)
    ours = make_scorer(scored.models[name], scored.folder / name / "tokenizer.json", 512)
    assert theirs.max_length == 128 and theirs.prefix_token_id == ours.prefix_token_id == 0
    for task, loaded in load_tasks(tasks.split(), scored.folder / "hub").items():
        record, lines = run_task(ours, loaded, task, None)
        expected, expected_lines = run_task(theirs, loaded, task, None)
        assert record.value == pytest.approx(expected.value, rel=1e-4)
        assert record.stderr == expected.stderr
        assert len(lines) == len(expected_lines) == record.requests
        pairs = zip(map(json.loads, lines), map(json.loads, expected_lines), strict=True)
        for line, other in pairs:
            nats = line.pop("loglikelihood")
            assert nats == pytest.approx(other.pop("loglikelihood"), rel=1e-5, abs=1e-4)
            assert line == other
