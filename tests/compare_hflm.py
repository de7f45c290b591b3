"""How fast evaluate.py scores beside lm-eval's own HFLM: the same requests and weights, float32.

    python tests/compare_hflm.py HF_FOLDER --benchmarks DIR --tasks hellaswag,arc_easy,piqa

HF_FOLDER is a Hugging Face Llama, such as convert.py writes. Both score every task in turn, three
times; a ratio is the median of the three. HFLM gets the batch size of --batch_size. Needs
transformers and accelerate. This is no test: pytest does not collect it.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from convert import load_hf
from nanocodes.benchmarks import PAPER, load_tasks
from nanocodes.command import make_parser
from nanocodes.device import pick_device
from nanocodes.lm_eval_scorer import MAX_LENGTH, make_scorer


def timed(lm, requests):
    """Seconds of an LM for {kind: requests}, and its responses as numbers."""
    started = time.perf_counter()
    responses = [getattr(lm, kind)(few, disable_tqdm=True) for kind, few in requests.items()]
    seconds = time.perf_counter() - started
    flat = [response for few in responses for response in few]
    return seconds, [nats[0] if isinstance(nats, tuple) else nats for nats in flat]


def requests_of(loaded, limit):
    """{kind: requests} of what load_tasks gives for a name, in the order that lm-eval makes."""
    requests = {}
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        for instance in task.instances:
            requests.setdefault(instance.request_type, []).append(instance)
    return requests


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="HF_FOLDER")
    add("--benchmarks", metavar="DIR")
    add("--tasks", default="hellaswag,arc_easy,piqa")
    add("--limit", type=int, default=20, help="documents of a task")
    add("--repeats", type=int, default=3)
    add("--batch_size", type=int, default=8, help="rows of HFLM's batches")
    add("--batch_tokens", type=int, default=8192, help="tokens of ours")
    add("--device", default="cpu")
    args = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    device = pick_device(args.device)
    model = load_hf(args.folder).to(device)
    ours = make_scorer(model, args.folder / "tokenizer.json", args.batch_tokens)
    theirs = HFLM(
        pretrained=str(args.folder),
        device=str(device),
        dtype="float32",
        max_length=min(MAX_LENGTH, model.config.max_seq_len),
        batch_size=args.batch_size,
        prefix_token_id=ours.prefix_token_id,
    )
    names = list(PAPER) if args.tasks == "paper" else args.tasks.split(",")
    print("task             requests   HFLM s   ours s   ratio   greatest difference in nats")
    for name, loaded in load_tasks(names, args.benchmarks).items():
        requests = requests_of(loaded, args.limit)
        times = []
        for _ in range(args.repeats):
            slow, expected = timed(theirs, requests)
            fast, found = timed(ours, requests)
            times.append((slow, fast))
        slow, fast = map(statistics.median, zip(*times, strict=True))
        ratio = statistics.median(slow / fast for slow, fast in times)
        most = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        print(f"{name:16} {len(found):8} {slow:8.2f} {fast:8.2f} {ratio:7.2f}   {most:.1e}")


if __name__ == "__main__":
    main()
