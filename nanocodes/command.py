"""What every command shares: its parser, how it refuses, and how it is asked to stop."""

import argparse
import re
import signal
from contextlib import contextmanager

from safetensors import SafetensorError

from nanocodes.ranks import leave_ranks


def make_parser(doc, prog=None):
    """A parser whose --help begins with a script's docstring, line for line.

    It refuses in one sentence, without the usage, which has a line for every option.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda message: refuse(parser, message)
    return parser


def refuse(parser, message):
    """End in one sentence on stderr, with exit status 2."""
    sentence = " ".join(str(message).splitlines())
    parser.exit(2, f"{parser.prog}: {sentence}\n")


@contextmanager
def refusals(parser):
    """What each script runs in: a refusal becomes one sentence on stderr and exit status 2."""
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:
        refuse(parser, error)
    except RuntimeError as error:
        # PyTorch has a kind of its own for a GPU's memory, but none for the CPU's.
        if not re.search("out of memory|allocate memory", str(error)):
            raise
        first_line = str(error).partition("\n")[0]
        refuse(
            parser,
            f"there is too little memory ({first_line}); lower --micro_batch or --batch_tokens",
        )
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    finally:
        leave_ranks()


def catch_stop():
    """A list that the first SIGTERM or Ctrl-C adds to; the second one ends the process."""
    stop_requested = []

    def on_signal(number, frame):
        stop_requested.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop_requested
