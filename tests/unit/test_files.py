"""Files and locks. Run with: python -m pytest tests/unit/test_files.py"""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest
from helpers import refused

from nanocodes.files import locked, naming, read_json, sha256, write_json, write_whole


def test_sha256_is_that_of_the_bytes(tmp_path):
    for data in (b"", b"abc", b"x" * 1_000_003):
        (tmp_path / "file").write_bytes(data)
        assert sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_a_json_object_is_read_as_it_was_written(tmp_path):
    value = {"name": "naïve", "numbers": [1, 0.1, -(2**70)], "none": None}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == read_json(str(tmp_path / "a.json")) == value
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_without_a_json_object_is_refused(data, tmp_path):
    (tmp_path / "a.json").write_bytes(data)
    refused(lambda: read_json(tmp_path / "a.json"), tmp_path / "a.json", "make it again")


def test_a_value_that_is_no_json_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": 1}


def test_written_data_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "shard.bin"
    calls = []
    fsync = os.fsync
    replace = os.replace

    def recorded_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("replace", Path(source).stat().st_size, path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_whole(path, b"x" * 100)  # so few that they wait in Python's buffer
    assert calls == [("fsync", 100, False), ("replace", 100, False)]
    assert path.read_bytes() == b"x" * 100


def test_an_error_that_names_no_file_gets_its_path():
    for named, expected in [(None, "a/b"), ("c/d", "c/d")]:
        with pytest.raises(OSError) as caught, naming("a/b"):
            raise OSError(errno.ENOSPC, "No space left on device", named)
        assert caught.value.filename == expected


def test_a_locked_folder_is_refused_until_the_lock_is_given_back(tmp_path):
    folder = tmp_path / "deep" / "new"
    with locked(folder):
        refused(lambda: locked(folder).__enter__(), f"another run is at work in {folder}; wait")
    with locked(folder):
        pass
    with pytest.raises(KeyError), locked(folder):  # an error gives it back as well
        raise KeyError
    with locked(folder):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def without_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with locked(tmp_path):
        pass
