"""How fast evaluate.py scores beside lm-eval's own HFLM: the same requests and weights, float32.

    python tests/compare_hflm.py HF_FOLDER --benchmarks DIR --tasks hellaswag,arc_easy,piqa

HF_FOLDER is a Hugging Face Llama, such as convert.py writes. Both score every task in turn, three
times; a ratio is the median of the three. HFLM gets the batch size of --batch_size. Needs
transformers and accelerate. This is no test: pytest does not collect it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from convert import load_hf
from device import pick_device
from harness import PAPER, load_tasks, make_scorer


def timed(lm, requests):
    """Seconds of an LM for (kind, requests), and its responses as numbers."""
    started = time.perf_counter()
    responses = [getattr(lm, kind)(few, disable_tqdm=True) for kind, few in requests.items()]
    seconds = time.perf_counter() - started
    flat = [response for few in responses for response in few]
    return seconds, [nats[0] if isinstance(nats, tuple) else nats for nats in flat]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="HF_FOLDER")
    parser.add_argument("--benchmarks", metavar="DIR")
    parser.add_argument("--tasks", default="hellaswag,arc_easy,piqa")
    parser.add_argument("--limit", type=int, default=20, help="documents of a task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of HFLM's batches")
    parser.add_argument("--batch_tokens", type=int, default=8192, help="tokens of ours")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    device = pick_device(args.device)
    model = load_hf(args.folder).to(device)
    ours = make_scorer(model, args.folder / "tokenizer.json", args.batch_tokens)
    theirs = HFLM(pretrained=str(args.folder), device=str(device), dtype="float32", max_length=2048,
                  batch_size=args.batch_size, prefix_token_id=ours.prefix_token_id)
    names = list(PAPER) if args.tasks == "paper" else args.tasks.split(",")
    print("task             requests   HFLM s   ours s   ratio   greatest difference in nats")
    for name, loaded in load_tasks(names, args.benchmarks).items():
        requests = {}
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(1234)
            task.build_all_requests(limit=args.limit, rank=0, world_size=1)
            for instance in task.instances:
                requests.setdefault(instance.request_type, []).append(instance)
        times = []
        for _ in range(args.repeats):
            (slow, expected), (fast, found) = timed(theirs, requests), timed(ours, requests)
            times.append((slow, fast))
        slow, fast = map(statistics.median, zip(*times, strict=True))
        ratio = statistics.median(slow / fast for slow, fast in times)
        most = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        print(f"{name:16} {len(found):8} {slow:8.2f} {fast:8.2f} {ratio:7.2f}   {most:.1e}")


if __name__ == "__main__":
    main()
