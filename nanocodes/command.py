"""What every command shares: its parser, how it refuses, and how it is asked to stop."""

import argparse
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
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    return parser


@contextmanager
def refusals(parser):
    """What each script runs in: a refusal becomes one sentence on stderr and exit status 2."""
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:
        sentence = " ".join(str(error).splitlines())
        parser.exit(2, f"{parser.prog}: {sentence}\n")
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
