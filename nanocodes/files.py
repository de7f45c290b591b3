"""Files: written whole or not at all, read with a clear refusal, hashed, and folders locked."""

import fcntl
import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path

from nanocodes.ranks import from_rank_0


def sha256(path):
    """The hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def naming(path):
    """Add this path to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path, data):
    """Write bytes so that `path` is either as it was or complete, whatever happens on the way."""
    partial = path.with_name(path.name + ".partial")
    with naming(path), open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, text.encode())


def read_json(path):
    """The JSON object in a file, a dict. Raises ValueError if it holds anything else."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); make it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; make it again")
    return value


@contextmanager
def locked(folder):
    """Keep other processes out of a folder, made if need be, while the body runs.

    On several ranks the lock is rank 0's, for all of them. Raises ValueError if another process
    holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        from_rank_0(_lock, file, folder)
        yield


def _lock(file, folder):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is at work in {folder}; wait for it to end") from None
    except OSError:
        pass  # some network file systems have no locks
