"""Kill a small run again and again, then compare it with an undisturbed one, bit for bit.

    python tests/campaign.py --kills 50

This is the long version of test_kills_at_any_moment_lose_nothing; pytest does not collect it.
"""

import argparse
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_train import ROOT, TINY, as_options, assert_same, make_data, metrics_of, newest, state_of

from train import Config


def start(config):
    command = [sys.executable, "train.py", *as_options(config), "--resume"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def finish(config):
    assert start(config).wait() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = str(make_data(Path(folder) / "data", 10))
        sizes = dict(max_updates=args.updates, save_interval=2, eval_interval=10, log_interval=1)
        killed = Config(**TINY | sizes | dict(data=data, out_dir=f"{folder}/killed"))
        whole = dataclasses.replace(killed, save_interval=args.updates, out_dir=f"{folder}/whole")
        finish(whole)
        out, struck = Path(killed.out_dir), {"starting": 0, "updating": 0, "saving": 0}
        for kill in range(args.kills):
            lines = out / "metrics.jsonl"
            before = lines.stat().st_mtime_ns if lines.exists() else 0
            running = start(killed)
            # A third strikes before the first update, the others up to 2 s after it.
            if kill % 3:
                while not lines.exists() or lines.stat().st_mtime_ns == before:
                    assert running.poll() is None, "it ended by itself; raise --updates"
                    time.sleep(0.01)
                time.sleep(moments.uniform(0, 2))
            else:
                time.sleep(moments.uniform(0, 3))
            running.kill()
            running.wait()
            saving = any(out.glob("step_*.partial"))
            moved = lines.exists() and lines.stat().st_mtime_ns != before
            struck["saving" if saving else "updating" if moved else "starting"] += 1
        at = newest(out).name
        finish(killed)
        assert_same(state_of(newest(out)), state_of(newest(whole.out_dir)))
        assert metrics_of(out) == metrics_of(whole.out_dir)
        print(f"{args.kills} kills while {struck}, the last one after {at}")
        print(f"equal bit for bit after {args.updates} updates: weights, optimizer state, metrics")


if __name__ == "__main__":
    main()
