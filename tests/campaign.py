"""What takes too long for pytest: each campaign asserts what it claims and prints its figures.

    python tests/campaign.py kills --kills 50        a run killed again and again loses nothing
    python tests/campaign.py input --gigabytes 10    prepare.py in bounded memory
    python tests/campaign.py start --gigabytes 20    a resume late in a run on many shards
    python tests/campaign.py memory                  a resume takes no more of it than a start
    python tests/campaign.py disk                    disks that fill up; as root, it mounts one

They need Linux and work in a temporary folder (TMPDIR says where). pytest does not collect them.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import (
    ROOT,
    TINY_RUN,
    as_options,
    assert_same,
    edit_json,
    read_json_file,
    read_state,
    timeless_metrics,
)
from training import newest, write_windows

from nanocodes.batches import epoch_order, window_count
from nanocodes.files import sha256
from nanocodes.shards import ID_DTYPE, SHARD_TOKENS, open_shards, read_meta
from nanocodes.sources import documents_of
from nanocodes.tokenizer import train_bpe
from train import Config


def command(script, *options, **where):
    """A script of the project, started; what it says goes nowhere unless `where` tells."""
    words = [sys.executable, "-u", script, *map(str, options)]
    return subprocess.Popen(words, cwd=ROOT, text=True, **{"stdout": subprocess.DEVNULL} | where)


def train(config, **where):
    return command("train.py", *as_options(config), "--resume", **where)


def figure(process, file, name):
    """A figure of /proc/<pid>/<file>, 0 where it has none; kB in bytes."""
    lines = Path(f"/proc/{process.pid}/{file}").read_text().splitlines()
    words = dict(line.split(":", 1) for line in lines).get(name, "0").split()
    return int(words[0]) * 1000 ** len(words[1:])


def kills(folder, args):
    """A small run that is killed at random moments ends as an undisturbed one, bit for bit."""
    moments = random.Random(0)
    updates = 1000 + 60 * args.kills
    data = str(write_windows(folder / "data", 10))
    sizes = dict(max_updates=updates, save_interval=2, eval_interval=10, log_interval=1)
    killed = Config(**TINY_RUN | sizes | dict(data=data, out_dir=f"{folder}/killed"))
    whole = dataclasses.replace(killed, save_interval=updates, out_dir=f"{folder}/whole")
    assert train(whole).wait() == 0
    out = Path(killed.out_dir)
    struck = {"starting": 0, "updating": 0, "saving": 0}
    for kill in range(args.kills):
        lines = out / "metrics.jsonl"
        before = lines.stat().st_mtime_ns if lines.exists() else 0
        running = train(killed)
        # A third strikes before the first update, the others up to 2 s after it.
        if kill % 3:
            while not lines.exists() or lines.stat().st_mtime_ns == before:
                assert running.poll() is None, "it ended by itself; it needs more updates"
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
    assert train(killed).wait() == 0
    assert_same(read_state(newest(out)), read_state(newest(whole.out_dir)))
    assert timeless_metrics(out) == timeless_metrics(whole.out_dir)
    print(f"{args.kills} kills while {struck}, the last one after {at}")
    print(f"equal bit for bit after {updates} updates: weights, optimizer state, metrics")


def write_corpus(folder, size):
    """Eight .jsonl files, two of them .gz, of `size` bytes of text: pieces of the standard
    library, each behind a running number. Returns the number of documents and their bytes."""
    library = b"".join(documents_of("stdlib")).decode("ascii", "ignore")
    documents = written = 0
    folder.mkdir()
    for number in range(8):
        packed = number % 4 == 3
        opened = gzip.open(folder / f"{number}.jsonl.gz", "wt", 1) if packed else None
        with opened or open(folder / f"{number}.jsonl", "w") as file:
            while written < size * (number + 1) / 8:
                at = documents * 8000 % len(library)
                text = f"{documents} {library[at : at + 8000]}"
                file.write(json.dumps({"text": text}) + "\n")
                documents += 1
                written += len(text)
    return documents, written


def prepared(source, documents, size):
    """Tokenize the folder `source`, then check the counts, the separators and every sha256.
    Prints and returns the peak of memory in bytes, and the number of shards."""
    out = source.with_suffix(".tokens")
    peak = 0
    begun = time.perf_counter()
    options = ["--source", source, "--tokenizer", source.parent / "tokenizer.json", "--out", out]
    running = command("prepare.py", *options, "--workers", 2)
    while running.poll() is None:
        peak = max(peak, figure(running, "status", "VmHWM"))
        time.sleep(0.02)
    speed = size / (time.perf_counter() - begun)
    assert running.returncode == 0
    splits = read_meta(out)["splits"].values()
    assert sum(split["documents"] for split in splits) == documents
    assert sum(split["bytes"] for split in splits) == size
    for split in splits:
        ids = [np.memmap(out / shard["file"], ID_DTYPE) for shard in split["shards"]]
        assert sum(map(len, ids)) == split["tokens"]
        assert sum(np.count_nonzero(part == 0) for part in ids) == split["documents"]
    assert command("prepare.py", "--verify", out).wait() == 0
    count = len(list(out.glob("*.bin")))
    print(
        f"{source.name}: {documents:,} documents, {size / 1e6:,.1f} MB, {count} shards, "
        f"{speed / 1e6:.1f} MB/s, peak of memory {peak / 1e6:,.0f} MB",
        flush=True,
    )
    shutil.rmtree(source)
    shutil.rmtree(out)
    return peak, count


def large_input(folder, args):
    """The memory of prepare.py does not grow with its input, nor harm it documents of odd sizes."""
    stdlib = list(documents_of("stdlib"))
    texts = (text.decode("utf-8", "replace") for text in stdlib[:300])
    (folder / "tokenizer.json").write_bytes(train_bpe("bpe:4096", texts))

    rows = [f'{{"text": "{number}"}}\n' for number in range(10**6)]
    (folder / "tiny").mkdir()
    (folder / "tiny" / "rows.jsonl").write_text("".join(rows))
    peak, _ = prepared(folder / "tiny", 10**6, sum(len(row) - 13 for row in rows))
    assert peak < 500e6

    # One of 200 MB, and a thousand small ones so that either split has some.
    (folder / "long").mkdir()
    (folder / "long" / "one.txt").write_bytes((b"".join(stdlib) * 20)[: 200 * 10**6])
    (folder / "long" / "rows.jsonl").write_text("".join(rows[:1000]))
    peak, _ = prepared(folder / "long", 1001, 200 * 10**6 + 2890)
    assert peak < 2500e6  # one document is encoded as a whole, in some ten times its size

    tenth, count = prepared(folder / "tenth", *write_corpus(folder / "tenth", args.gigabytes * 1e8))
    whole, _ = prepared(folder / "whole", *write_corpus(folder / "whole", args.gigabytes * 1e9))
    assert count > 2, "a tenth does not fill a shard; give more --gigabytes"
    assert whole < tenth + 250e6  # the 200 MB that validation documents fill last, and some
    print("ten times the input takes no more memory")


def until_update(config, update):
    """Start or resume a run and kill it after `update`. Returns the seconds to there and, in
    bytes, its usual memory at log lines, the peak, what it read by calls and what from a disk."""
    begun = time.perf_counter()
    said = False
    memory = []
    with train(config, stdout=subprocess.PIPE) as running:
        for line in running.stdout:
            if re.match(r"update [\d,]+/", line):
                memory.append(figure(running, "status", "VmRSS"))
            said = line.startswith(f"update {update:,}/")
            if said:
                break
        seconds = time.perf_counter() - begun
        peak = figure(running, "status", "VmHWM")
        read = [figure(running, "io", name) for name in ("rchar", "read_bytes")]
        running.kill()
    assert said, f"the run ended before update {update}"
    return seconds, statistics.median(memory), peak, *read


def late_start(folder, args, update=300_000, length=2048, windows_per_update=128):
    """A resume at update 300,000 of many shards costs what a start from scratch on them does."""
    data = write_windows(folder / "data", 10)
    meta = read_json_file(data / "meta.json")
    for split, count in (("train", round(args.gigabytes * 5)), ("val", 1)):
        names = [f"{split}_{number:05d}.bin" for number in range(count)]
        for name in names:
            (data / name).touch()
            os.truncate(data / name, 2 * SHARD_TOKENS)  # all zeros and sparse
        entries = [dict(file=n, tokens=SHARD_TOKENS, max_id=0, sha256="") for n in names]
        meta["splits"][split].update(tokens=count * SHARD_TOKENS, shards=entries)
    edit_json(data / "meta.json", meta)

    # The paper's batch on a model of one block, and its first checkpoint put 300,000 further.
    sizes = dict(max_seq_len=length, targets_per_update=windows_per_update * length, n_layers=1)
    sizes |= dict(max_updates=381_470, save_interval=381_470, eval_interval=381_470)
    new = Config(**TINY_RUN | sizes | dict(data=str(data), out_dir=f"{folder}/new"))
    late = dataclasses.replace(new, out_dir=f"{folder}/late")
    until_update(dataclasses.replace(late, save_interval=1), 2)
    step = newest(late.out_dir)
    moved = step.with_name(f"step_{update:08d}")
    training = torch.load(step / "training_state.pt", weights_only=True)
    for moments in training["state"].values():
        moments["step"].fill_(update)
    torch.save(training, step / "training_state.pt")
    state = read_json_file(step / "state.json")
    state |= dict(update=update, targets=update * windows_per_update * length)
    state["sha256"]["training_state.pt"] = sha256(step / "training_state.pt")
    edit_json(step / "state.json", state)
    step.rename(moved)

    windows = window_count(open_shards(data, "train"), length)
    begun = time.time()
    epoch_order(windows, late.seed, update * windows_per_update // windows)
    print(f"the order of {windows:,} windows takes {time.time() - begun:.2f} s")
    figures = []
    for config, number in ((new, 1), (late, update + 1)):
        seconds, _, peak, *read = until_update(config, number)
        figures.append((peak, read[0]))
        print(
            f"after update {number:,}: {seconds:.1f} s, peak of memory {peak / 1e6:.0f} MB, read "
            f"{read[0] / 1e6:.0f} MB by calls, {read[1] / 1e6:.0f} MB from a disk"
        )
    assert newest(late.out_dir) == moved, "the resume did not take the checkpoint"
    for start, resume in zip(*figures, strict=True):
        assert abs(resume / start - 1) < 0.05
    print("memory and bytes read are equal within 5 %")


def memory(folder, args):
    """A resumed run of 50M parameters takes as much memory as one that was never stopped."""
    data = str(write_windows(folder / "data", 1000))
    shape = dict(vocab_size=8192, d_model=512, n_layers=10, n_heads=8, d_ff=2048, max_seq_len=64)
    sizes = dict(targets_per_update=8 * 64, micro_batch=8, save_interval=6, max_updates=100)
    config = Config(**TINY_RUN | shape | sizes | dict(data=data, out_dir=f"{folder}/run"))
    # Freed memory goes back at once: how glibc keeps it differs from run to run.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    figures = []
    for way in ("from scratch", "resumed"):
        _, usual, peak, *_ = until_update(config, 11)
        figures.append((usual, peak))
        print(f"{way} to update 11: {usual / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
        assert newest(config.out_dir).name == "step_00000006"
    for scratch, resumed in zip(*figures, strict=True):
        assert abs(resumed / scratch - 1) < 0.05
    print("equal within 5 %")


def out_of_room(words, made, disk, before):
    """Run a command that ends in the name of its folder on a disk without room, then with ever
    more until it is enough. Each time before, it must end in one sentence and, given room, go on to
    the very files that are in `made`."""
    files = [file for file in made.rglob("*") if file.suffix in (".pt", ".bin", ".md", ".png")]
    files += made.rglob("*.safetensors")
    said = Counter()
    for pages in itertools.count(0, 12):
        for path in disk.iterdir():
            shutil.rmtree(path)
        shutil.copytree(before, disk, dirs_exist_ok=True)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(4096 * (os.statvfs(disk).f_bfree - pages)))
        running = command(*words, disk / made.name, stderr=subprocess.PIPE)
        error = running.communicate()[1]
        ballast.unlink()
        if running.returncode == 0:
            break
        assert running.returncode == 2 and error.count("\n") == 1, error
        said[re.sub(r"\d+", "N", error.strip().replace(str(disk.parent), ""))] += 1
        assert command(*words, disk / made.name).wait() == 0
        for file in files:
            assert file.read_bytes() == (disk / file.relative_to(made.parent)).read_bytes(), file
    print(f"{words[0]}: {said.total()} times out of room, {len(files)} files equal afterwards")
    print(*(f"    {count} x {sentence}" for sentence, count in said.items()), sep="\n", flush=True)


def full_disks(folder, args):
    """Training, preparing and evaluating on a disk that fills up lose nothing."""
    room = folder / "room"
    disk = folder / "disk"
    before = folder / "before"
    # metrics.jsonl grows over many pages, then come the only save, the validation and loss.png.
    often = dict(max_updates=300, save_interval=300, eval_interval=300, keep_checkpoints=-1)
    places = dict(data=str(write_windows(folder / "data", 10)), out_dir=f"{before}/run")
    run = Config(**TINY_RUN | often | places)
    until_update(dataclasses.replace(run, save_interval=1), 2)
    text = "".join(map(chr, range(32, 127))) * 1000
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text[:n]}) + "\n" for n in range(0, 2000, 10)))
    (folder / "tokenizer.json").write_bytes(train_bpe("bpe:300", [text]))
    source = ["--source", rows, "--tokenizer", folder / "tokenizer.json", "--val_share", 0.2]
    shutil.copytree(before, room)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "campaign", disk], check=True)
    try:
        for name, words in (
            ("run", ["train.py", *as_options(run), "--resume", "--out_dir"]),
            ("tokens", ["prepare.py", *source, "--out"]),
            ("evaluation", ["evaluate.py", room / "run", "--dtype", "float32", "--out"]),
        ):
            assert command(*words, room / name).wait() == 0
            out_of_room(words, room / name, disk, before)
    finally:
        subprocess.run(["umount", disk], check=True)


CAMPAIGNS = dict(kills=kills, input=large_input, start=late_start, memory=memory, disk=full_disks)


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--gigabytes", type=float, default=10)
    args = parser.parse_args()
    if args.campaign == "disk" and os.geteuid() != 0:
        parser.exit(2, "campaign.py: disk mounts a tmpfs, which needs root; run it as root\n")
    with tempfile.TemporaryDirectory() as folder:
        CAMPAIGNS[args.campaign](Path(folder), args)


if __name__ == "__main__":
    main()
