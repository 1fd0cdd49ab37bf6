"""Encoding on all cores: chunks of rows go to worker processes and come back in order.

Threads would not do: most of the work on a conversation is rendering its template, which holds Python's lock. Workers
are forked, so they share the tokenizer that is already loaded and start at once, and a script that calls `train`
needs no `if __name__ == "__main__"`. They render and tokenise only; no torch, no OpenMP, no GPU is touched in them,
which is what makes forking safe here. Where a system cannot fork, this process encodes alone.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from pyggtrain.data.examples import Example
from pyggtrain.data.report import RowCounts
from pyggtrain.data.row_encoder import RowEncoder
from pyggtrain.data.rows import Row
from pyggtrain.errors import DataError

Chunk = list[tuple[Row, str]]

# Chunks that wait for each worker: enough that none is idle, few enough that memory stays flat.
_CHUNKS_AHEAD = 2

# In a worker process: what it encodes with.
_encoder: RowEncoder


def encoded_chunks(
    chunks: Iterable[Chunk], encoder: RowEncoder, *, num_workers: int
) -> Iterator[tuple[list[Example], RowCounts]]:
    """Encode chunks of (row, format), in order; each with what was decided about its rows.

    Raises:
        DataError: a worker process was killed.
    """
    if num_workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for chunk in chunks:
            yield encoder.encode_chunk(chunk)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[Future[tuple[list[Example], RowCounts]]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode, chunk))
            if len(pending) > _CHUNKS_AHEAD * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "A process that encoded rows was killed, probably for lack of memory. Free some, or set num_threads to 1."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encoder: RowEncoder) -> None:
    global _encoder
    _encoder = encoder
    # Ctrl-C reaches the whole process group; the parent ends the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encode(chunk: Chunk) -> tuple[list[Example], RowCounts]:
    return _encoder.encode_chunk(chunk)
