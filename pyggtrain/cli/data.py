"""`pyggtrain data preview FILE --model M` and `pyggtrain data check FILE --model M`."""

import sys
from collections.abc import Sequence

from pyggtrain.cli import data_check, data_preview

_COMMANDS = {"preview": data_preview.run, "check": data_check.run}
_USAGE = """usage: pyggtrain data preview FILE ... --model MODEL   show rows, and how many tokens rows have
       pyggtrain data check FILE ... --model MODEL     read all rows as for training; exit code 2 if they cannot be used

Both take the settings of `pyggtrain train` (--max-seq-length, --format, --chat-template, ...) and its -c FILE.
"""


def run(arguments: Sequence[str]) -> int:
    """Run one of the two; return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if arguments[0] not in _COMMANDS:
        sys.stderr.write(f"pyggtrain data: no command '{arguments[0]}'; there are {', '.join(_COMMANDS)}\n")
        return 2
    return _COMMANDS[arguments[0]](arguments[1:])
