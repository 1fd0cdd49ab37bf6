"""Every error that pyggtrain raises for a person to read.

A message names the subject (tensor, key, file, line), what was found, what is needed, and what to do next. The
command line prints it without a trace and exits with `exit_code`.
"""


class PyggtrainError(Exception):
    """Base of all errors meant for a person."""

    exit_code = 2


class GGUFError(PyggtrainError):
    """A file is not a readable GGUF file: missing, truncated, malformed, or inconsistent."""


class UnsupportedError(PyggtrainError):
    """A file or request is valid but asks for something that is not implemented or that llama.cpp would ignore."""


class ConfigError(PyggtrainError):
    """Settings are wrong or contradict each other. Holds all mistakes found, not only the first."""


class DataError(PyggtrainError):
    """Training data cannot be read, or holds nothing to learn."""


class AdapterError(PyggtrainError):
    """An adapter file is malformed, belongs to another base, or cannot be represented."""


class BridgeError(PyggtrainError):
    """A call into the compiled bridge broke one of its preconditions, or llama.cpp refused."""


class ParityError(PyggtrainError):
    """llama.cpp and pyggtrain disagree by more than the stated bound."""

    exit_code = 3
