"""A model as lm-eval's LM: requests as text -> requests as ids -> nats.

One protocol for every model: at most 2048 tokens at a time, cut on the left; the separator before
a text without context, and no other special token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from nanocodes.head_loss import LOGITS_AT_ONCE
from nanocodes.prefix_batches import even_parts, make_batches, share_prefixes
from nanocodes.ranks import rank_and_world
from nanocodes.tokenizer import load_tokenizer, vocabulary

MAX_LENGTH = 2048  # tokens of a request, also where a model could read more


@dataclass
class Request:
    """Two lists of ids: what the model is given, and what is scored."""

    context: list
    continuation: list

    def row(self, max_length):
        """What the model reads for it, a tuple: the end of all ids but the last."""
        ids = self.context + self.continuation
        return tuple(ids[-max_length - 1 : -1])


class Score(NamedTuple):
    """A request's score, in the form that lm-eval takes."""

    nats: float  # ln p of the continuation
    is_greedy: bool  # whether the likeliest id at each place gives the continuation


# ---------------- ids -> nats


@dataclass
class BatchHidden:
    """What the head reads for a batch."""

    hidden: torch.Tensor  # (N, d_model)
    positions: dict  # row -> for each of its ids, where it lies in `hidden`


def read_batch(model, batch):
    """The BatchHidden of a Batch. A group's shared ids are read once, and each of its rows goes
    on from their keys and values."""
    device = model.head.weight.device
    shared = batch.shared
    hidden = []
    positions = {}
    start = 0  # where the next pass lies among all hidden positions
    if shared:
        prefixes = torch.tensor([group.rows[0][:shared] for group in batch.groups], device=device)
        cache = [[] for _ in model.blocks]
        hidden.append(model.hidden(prefixes, cache).flatten(0, 1))
        start = prefixes.numel()
    for part in even_parts(batch):
        rests = [torch.tensor(member.row[shared:]) for member in part]
        ids = pad_sequence(rests, batch_first=True).to(device)  # (rows, longest rest)
        part_cache = None
        if shared:
            groups = torch.tensor([member.group for member in part], device=device)
            part_cache = [[kv[groups] for kv in block] for block in cache]
        hidden.append(model.hidden(ids, part_cache).flatten(0, 1))
        for i, member in enumerate(part):
            prefix = range(member.group * shared, (member.group + 1) * shared)
            first = start + i * ids.shape[1]
            rest = range(first, first + len(rests[i]))
            positions[member.row] = [*prefix, *rest]
        start += ids.numel()
    return BatchHidden(torch.cat(hidden), positions)


@dataclass
class TargetScores:
    nats: torch.Tensor  # (N,) float64, ln p of each target
    is_greedy: torch.Tensor  # (N,) bool, whether no other id is likelier


def score_targets(model, hidden, targets):
    """The TargetScores, on the CPU, of targets (N,), which the head predicts from hidden
    (N, d_model), with about LOGITS_AT_ONCE logits in memory at a time."""
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    nats = []
    is_greedy = []
    for part, ids in zip(hidden.split(at_once), targets.split(at_once), strict=True):
        logs = model.head(part).float().log_softmax(dim=1)  # (n, V)
        nats.append(logs.gather(1, ids[:, None])[:, 0])
        is_greedy.append(logs.argmax(dim=1) == ids)
    return TargetScores(torch.cat(nats).cpu().double(), torch.cat(is_greedy).cpu())


@torch.no_grad()
def score(model, requests, max_length, batch_tokens):
    """The Score of each Request, read in batches of about batch_tokens ids.

    A context that is too long loses its beginning. Requests with the same row, such as one-token
    choices, are read once. Raises ValueError on a continuation longer than max_length.
    """
    readers = {}  # row -> the numbers of the requests that read it
    for i, request in enumerate(requests):
        length = len(request.continuation)
        if length > max_length:
            raise ValueError(
                f"a continuation has {length} tokens, and the model reads {max_length} at most; "
                "leave its task out"
            )
        readers.setdefault(request.row(max_length), []).append(i)

    device = model.head.weight.device
    scores = [None] * len(requests)
    progress = tqdm(
        total=len(requests),
        desc="requests",
        disable=True if rank_and_world()[0] > 0 else None,  # None: where there is no terminal
    )
    for batch in make_batches(share_prefixes(readers, batch_tokens), batch_tokens):
        read = read_batch(model, batch)
        numbers = []  # of the requests that this batch scores
        places = []  # of their targets, in read.hidden
        targets = []
        for row, row_positions in read.positions.items():
            for i in readers[row]:
                continuation = requests[i].continuation
                numbers.append(i)
                places += row_positions[-len(continuation) :]
                targets += continuation
        hidden = read.hidden[torch.tensor(places, device=device)]
        found = score_targets(model, hidden, torch.tensor(targets, device=device))
        sizes = [len(requests[i].continuation) for i in numbers]
        parts = zip(numbers, found.nats.split(sizes), found.is_greedy.split(sizes), strict=True)
        for i, nats, is_greedy in parts:
            scores[i] = Score(float(nats.sum()), bool(is_greedy.all()))
        progress.update(len(numbers))
    progress.close()
    return scores


# ---------------- text -> ids


def make_scorer(model, tokenizer_file, batch_tokens):
    """The model as lm-eval's LM. Under torchrun each rank is given its share of the documents."""
    # Here, since lm-eval takes seconds to import and most evaluations do without.
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = load_tokenizer(tokenizer_file, model.config.vocab_size)
    _, separator = vocabulary(tokenizer)
    max_length = min(MAX_LENGTH, model.config.max_seq_len)

    class Scorer(TemplateLM):
        eot_token_id = separator  # and so also lm-eval's prefix_token_id

        def __init__(self):
            super().__init__()
            self._rank, self._world_size = rank_and_world()
            self._device = model.head.weight.device

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, add_special_tokens=False).ids

        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            as_ids = [Request(context, continuation) for _, context, continuation in requests]
            return score(model, as_ids, max_length, batch_tokens)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            """The nats of each whole text, read in windows that follow each other."""
            windows = []
            owners = []  # the number of each window's text
            for i, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                for window in get_rolling_token_windows(ids, separator, max_length, 1):
                    windows.append(Request(*make_disjoint_window(window)))
                    owners.append(i)
            totals = [0.0] * len(requests)
            scores = score(model, windows, max_length, batch_tokens)
            for i, window_score in zip(owners, scores, strict=True):
                totals[i] += window_score.nats
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            raise ValueError("evaluate.py scores given text; leave out tasks that generate it")

        # What lm-eval collects over ranks.

        def all_gather(self, tensor):
            tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(tensors, tensor)
            return torch.stack(tensors)

        def gather_object(self, obj, dst=0):
            objects = [None] * self.world_size
            dist.all_gather_object(objects, obj)
            return objects

        def barrier(self):
            dist.barrier()

    return Scorer()
