"""A limit on memory for children that only run llama.cpp on a file from a stranger."""

import sys

# What llama.cpp may take for a header: 0.2 GiB for a vocabulary of 262,144 tokens, which are 15 MiB of the file.
_BASE_BYTES, _BYTES_PER_HEADER_BYTE = 4 << 30, 32


def limit_memory(header_bytes: int, *, base_bytes: int = _BASE_BYTES) -> None:
    """Let the process that calls this take no more memory than a header of that many bytes can need, on Linux.

    A file of some bytes can ask for 4 billion empty tokens (``llama.vocab_size``), which llama.cpp would make.

    Args:
        header_bytes: of the file.
        base_bytes: what the work takes whatever the header. Memory counts that is asked for and never written to.
    """
    if sys.platform == "linux":
        import resource

        limit = base_bytes + _BYTES_PER_HEADER_BYTE * header_bytes
        # Of what the process writes to: mapped files, which may be larger than memory, do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
