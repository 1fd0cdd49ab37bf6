"""The command line. Each command is a module with `run(arguments) -> exit code`, imported when it is asked for."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "train": "train a LoRA adapter on a GGUF file",
    "data": "show or check training data",
    "plan": "tell how much memory a run needs, and its fastest setting that fits",
    "verify": "check an adapter against llama.cpp",
    "adapter": "look at adapters, scale and add them, carry them to PEFT and back",
    "merge": "write an adapter into a copy of its base model",
    "info": "show what a GGUF file holds",
    "quantize": "write a copy of a GGUF file with other tensor types",
    "selftest": "check every kernel on this machine",
    "architectures": "show which models can be trained",
    "quickstart": "train a small real model on this machine and measure the effect",
}
"""Command -> what it does; the module has the command's name."""

_USAGE = "usage: pyggtrain COMMAND ...\n\n{commands}\n\n`pyggtrain COMMAND --help` explains a command.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 done, 2 a mistake to correct, 3 llama.cpp disagrees, 130 stopped by the user.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE.format(commands="\n".join(f"  {name:<14} {text}" for name, text in COMMANDS.items())))
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        from pyggtrain._version import __version__

        sys.stdout.write(f"pyggtrain {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"pyggtrain: no command '{name}'; there are {', '.join(COMMANDS)}\n")
        return 2
    exit_code = _guarded(name, rest)
    if argv is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _end_process(exit_code)
    return exit_code


def _end_process(exit_code: int) -> NoReturn:
    """End one of torchrun's processes without taking Python apart.

    Gloo's threads may hold Python objects of pipelines still; a thread that asks for the interpreter while that shuts
    down is ended in the middle of C++, and takes the process with it ("terminate called without an active exception").
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _guarded(name: str, arguments: list[str]) -> int:
    from pyggtrain.cli.tables import printable
    from pyggtrain.errors import PyggtrainError

    _show_log()
    # A trace helps who debugs pyggtrain; everyone else needs the message.
    show_trace = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return int(import_module(f"pyggtrain.cli.{name}").run(arguments))
    except PyggtrainError as error:
        if show_trace:
            raise
        sys.stderr.write(f"\npyggtrain {name}: {printable(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"\n{str(stop) or 'Stopped.'}\n")
        return 128 + signal.SIGINT


@contextmanager
def importing() -> Iterator[None]:
    """Import what is large inside: else Python's collector looks through all that is there again and again meanwhile,
    for 0.2 of 1.5 s, and through what was imported for the rest of the run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from pyggtrain.cli.tables import printable

        return printable(super().format(record))


def _show_log() -> None:
    """Show what the library logs (what it read otherwise than written, left out, or chose) as plain lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(message)s"))
    logger = logging.getLogger("pyggtrain")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
