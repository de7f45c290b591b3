"""Changes to files, as a stranger or a bad disk would make them, and readers that must take a file
whole or refuse it in one sentence that names it.
"""

import copy
import json
import shutil

from hypothesis import example, given, settings
from hypothesis import strategies as st

DEEP = b"[" * 100_000

NUMBERS = [10**400, 2**64, 2**40, 2**31 - 1, 2**20, -1, 0, 1.0, 1e308, -1e308, 1e-320]


TEXTS = ["a\nb", "\0", "\ud800", "../../x", "..", "", "none", "[UNK]", "I8", "F64", "gf2"]


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)


json_values = st.recursive(
    atoms | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def containers(value):
    """Every dict and list in a JSON value that is not empty, itself included."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


@st.composite
def changed_json(draw, value):
    """A JSON value of which up to three places are replaced by any value, or dropped."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(containers(whole))
        place = places[draw(st.integers(0, len(places) - 1))]
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = keys[draw(st.integers(0, len(keys) - 1))]
        if place is whole or draw(st.integers(0, 2)):
            place[key] = draw(json_values)
        else:
            del place[key]
    return whole[0]


@st.composite
def changed_bytes(draw, data):
    """Bytes flipped, cut, appended or put in between; or another encoding, or deep nesting."""
    i, j = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    inside = [b"NaN", b"-Infinity", b"1e999", b"9" * 5000, DEEP, b'{"a":' * 100_000, b"\0", b"\n"]
    new = draw(st.binary(max_size=9) | st.sampled_from(inside))
    start, end = data[:i], data[i:]
    flipped = start + bytes(byte ^ 1 << j % 8 for byte in end[:1]) + end[1:]
    spliced = [start + new + data[j:], start + new + end, start, data + new, new]
    encoded = [b"\xef\xbb\xbf" + data, data.decode("latin-1").encode("utf-16")]
    return draw(st.sampled_from([flipped, *spliced, *encoded]))


def dumped(value):
    return json.dumps(value).encode()


def json_files(value):
    return changed_json(value).map(dumped) | changed_bytes(dumped(value))


def tensor_file(header, body):
    """safetensors: the size of a header, the header, the tensors."""
    return len(header).to_bytes(8, "little") + header + body


def tensor_files(data):
    end = 8 + int.from_bytes(data[:8], "little")
    headers = json_files(json.loads(data[8:end]))
    return headers.map(lambda header: tensor_file(header, data[end:])) | changed_bytes(data)


def changes(**strategies):
    """One of the files of a folder, changed: {name: its bytes}."""
    return st.one_of([s.map(lambda b, name=name: {name: b}) for name, s in strategies.items()])


def fuzzed(number, strategies, *examples):
    """Run a test on so many draws and on all the examples, tuples of arguments."""

    def decorate(test):
        for arguments in examples:
            test = example(*arguments)(test)
        options = dict(max_examples=number, deadline=None, derandomize=True)
        return settings(report_multiple_bugs=False, **options)(given(*strategies)(test))

    return decorate


def read(naming, reader, *arguments):
    """What a reader gives, or None where it refuses as it should."""
    try:
        return reader(*arguments)
    except (ValueError, OSError) as error:
        assert naming in str(error), f"no {naming} in {error!r}"
        assert "allocate" not in str(error), "it is refused only because memory ran out"


def write(folder, **files):
    """A new folder of these files, {name, with __ for a dot: bytes}."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder
