"""Configs: a dataclass of plain fields, with config files and --key=value options laid over it.

A config is a dataclass in which every field is one line, with its type, its default and a
comment. The comments are also what --help prints.
"""

import argparse
import ast
import inspect
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import get_args

# The least and the greatest value of each number. They keep out what could only be a mistake.
RANGES = {
    "vocab_size": (1, 2**20),
    "d_model": (1, 2**16),
    "n_layers": (1, 1000),
    "n_heads": (1, 2**16),
    "n_kv_heads": (1, 2**16),
    "d_ff": (1, 2**18),
    "max_seq_len": (1, 2**20),
    "rope_theta": (1, 2**31 - 1),
    "norm_eps": (1e-12, 2**31 - 1),
    "code_bits": (1, 63),
    "max_updates": (1, 2**31 - 1),
    "targets_per_update": (1, 2**31 - 1),
    "micro_batch": (1, 2**31 - 1),
    "beta1": (0, 0.999999),
    "beta2": (0, 0.999999),
    "grad_clip": (1e-6, 2**31 - 1),
    "eval_interval": (1, 2**31 - 1),
    "save_interval": (1, 2**31 - 1),
    "log_interval": (1, 2**31 - 1),
    "keep_checkpoints": (-1, 2**31 - 1),
}
ANY_NUMBER = (0, 2**31 - 1)  # the range of all others


# ---------------- Fields


def comments(config_class):
    """The comment behind every field of a config and of the classes that it extends."""
    found = {}
    for cls in reversed(config_class.__mro__[:-1]):
        for line in inspect.getsource(cls).splitlines():
            field = re.fullmatch(r"    (\w+): [^#]*#\s*(.*)", line)
            if field:
                found[field[1]] = field[2]
    return found


def check_fields(config):
    """Check the type and the range of every field; an int where a float belongs becomes one.

    Raises ValueError, in one sentence, at the first field that does not fit.
    """
    for field in fields(config):
        name = field.name
        value = getattr(config, name)
        types = get_args(field.type) or (field.type,)
        least, greatest = RANGES.get(name, ANY_NUMBER)
        if float in types and type(value) is int and abs(value) < 2**53:  # and so exact
            value = float(value)
            setattr(config, name, value)
        if type(value) not in types:
            raise ValueError(f"{name} is {value!r}; it must be of type {types[0].__name__}")
        if type(value) in (int, float) and not least <= value <= greatest:
            raise ValueError(f"{name} is {value}; it must be from {least} to {greatest}")


# ---------------- Files and options


def read_config_file(path, names):
    """The assignments in a config file as a dict. It is Python: whatever it holds is run."""
    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}; options are written --key=value")
    namespace = {}
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be read as a config ({error!r}); mend it") from None
    values = {key: value for key, value in namespace.items() if not key.startswith("_")}
    for key in values:
        if key not in names:
            raise ValueError(f"{path}: {key} is no config key; `python train.py --help` has all")
    return values


def parse_option(text, field_type):
    """The value of an option's text: true, false, none, a number or, where that fits, the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if field_type in (str, str | None) or len(text) > 99:
        return text
    with suppress(SyntaxError, ValueError, TypeError):
        return ast.literal_eval(text)
    return text  # check_fields refuses it by name


def read_values(config_class, files, options):
    """The values of config files, left to right, and over them those of options {key: text}."""
    types = {field.name: field.type for field in fields(config_class)}
    values = {}
    for path in files:
        values |= read_config_file(path, types)
    for key, text in options.items():
        values[key] = parse_option(text, types[key])
    return values


def add_options(parser, config_class):
    """Give a parser one option for each field of a config. Options not given leave no trace."""
    lines = comments(config_class)
    for field in fields(config_class):
        parser.add_argument(
            f"--{field.name}",
            metavar="",
            default=argparse.SUPPRESS,
            help=f"{lines[field.name]} (default {field.default})".replace("%", "%%"),
        )
