"""A stream beside the one that computes: for copies between a GPU and its host, or for what runs beside a step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """A stream beside the one that computes. On a CPU all is done in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched now becomes a CUDA graph."""
        return self._stream is not None and bool(torch.cuda.is_current_stream_capturing())

    def use(self) -> AbstractContextManager[Any]:
        """What is launched inside goes this way."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self, other: "Lane | None" = None) -> None:
        """Wait for what has been launched so far: on the stream that computes, or on another lane."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device) if other is None else other._stream
            assert stream is not None
            self._stream.wait_stream(stream)

    def mark(self) -> "torch.cuda.Event | None":
        """An event after what was launched here so far."""
        return None if self._stream is None else self._stream.record_event()

    def lasting_mark(self) -> "torch.cuda.Event | None":
        """An event that is recorded again and again, for the first time now. A CUDA graph that was captured waiting for
        it waits, whenever it runs, for where it was last.
        """
        if self._stream is None:
            return None
        event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """Let the stream that computes wait for a mark."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def catch_up(self) -> None:
        """Let the stream that computes wait for all of it: a CUDA graph wants every stream to come back. While one is
        captured in which nothing went this way, there is nothing to wait for, and to wait would be an error.
        """
        if self._stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(self._stream):
                if not torch.cuda.is_current_stream_capturing():
                    return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Let the host wait for all of it."""
        if self._stream is not None:
            self._stream.synchronize()
