"""Streams of simulated devices, which run as late as they may: when somebody waits for them.

What is copied without blocking is only noted. It happens when the next operation of its stream does, when a stream that
waits for it goes on, or when the host waits; what goes to the host arrives there when the host waits, and not before.
So who forgets to wait reads bytes of before, on the device or on the CPU, every time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Event", "Stream", "current_stream", "set_stream", "streams_of"]

_lock = threading.RLock()
_of_thread = threading.local()
_all: dict[int, list[Stream]] = {}
_current_device = threading.local()


class Stream:
    """One of a device's streams; stands in the place of `torch.Stream`.

    Args:
        device: of it, or a number; None for the current one.
    """

    def __init__(self, device: Any = None, *, priority: int = 0) -> None:
        index = device if isinstance(device, int) else None
        if device is not None and index is None:
            index = torch.device(device).index
        self.index = current_device() if index is None else index
        self.device = torch.device("sim", self.index)
        self._num_noted = self._num_done = 0
        self._noted: deque[tuple[int, Callable[[], object]]] = deque()
        self._arriving: list[tuple[int, Callable[[], object]]] = []
        self._outer: list[Stream] = []
        with _lock:
            _all.setdefault(self.index, []).append(self)

    def note(self, work: Callable[[], object]) -> None:
        """Have this done after all that was noted before."""
        with _lock:
            self._num_noted += 1
            self._noted.append((self._num_noted, work))

    def arrive(self, work: Callable[[], object]) -> None:
        """Have this done when the host waits; for work that is being done."""
        self._arriving.append((self._num_done, work))

    def run(self, until: int | None = None) -> None:
        """Do what was noted, or the first of it."""
        with _lock:
            while self._noted and (until is None or self._noted[0][0] <= until):
                self._num_done, work = self._noted.popleft()
                work()

    @property
    def num_noted(self) -> int:
        return self._num_noted

    def synchronize(self, until: int | None = None) -> None:
        """Have the host wait for all, or for the first of it."""
        with _lock:
            self.run(until)
            arriving, self._arriving = self._arriving, []
            for number, work in arriving:
                if until is None or number <= until:
                    work()
                else:
                    self._arriving.append((number, work))

    def wait_stream(self, other: Stream) -> None:
        """Go on after what the other has to do now."""
        until = other.num_noted
        self.note(lambda: other.run(until))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not self._noted

    def __enter__(self) -> Stream:
        self._outer.append(current_stream(self.index))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer.pop())


class Event:
    """A place in a stream's work; stands in the place of `torch.Event`."""

    def __init__(self, device: Any = None, **_: object) -> None:
        self._stream: Stream | None = None
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream(current_device())
        self._number = self._stream.num_noted

    def wait(self, stream: Stream | None = None) -> None:
        recorded, until = self._stream, self._number
        if recorded is not None:
            (stream or current_stream(current_device())).note(lambda: recorded.run(until))

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize(self._number)

    def query(self) -> bool:
        return self._stream is None or self._stream._num_done >= self._number


_defaults: dict[int, Stream] = {}


def default_stream(index: int) -> Stream:
    """The stream that a device computes in where nobody chose another."""
    with _lock:
        if index not in _defaults:
            _defaults[index] = Stream(index)
        return _defaults[index]


def current_stream(index: int) -> Stream:
    """The stream of a device that this thread uses."""
    chosen = getattr(_of_thread, "streams", {}).get(index)
    return default_stream(index) if chosen is None else chosen


def set_stream(stream: Stream) -> None:
    """Have this thread use that stream of its device."""
    _of_thread.streams = {**getattr(_of_thread, "streams", {}), stream.index: stream}


def streams_of(index: int) -> list[Stream]:
    """All streams of a device."""
    with _lock:
        return list(_all.get(index, ()))


def current_device() -> int:
    """The device that this thread uses where it names none."""
    return getattr(_current_device, "index", 0)


def set_device(index: int) -> int:
    """Have this thread use that device; returns the one before."""
    before = current_device()
    if index >= 0:
        _current_device.index = index
    return before
