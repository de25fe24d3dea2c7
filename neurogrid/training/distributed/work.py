"""Pending work, which the caller of a collective holds until it is done.

It ends in the loop's thread. What hangs on its future runs in another (`Futures`): a callback may compute, or call a
collective and wait for it, and the loop goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.futures import Future

from neurogrid.training.distributed.errors import RankError

__all__ = ["Futures", "Pending"]

# Python looks at signals between waits that are no longer than this: Ctrl-C is never lost.
SIGNAL_INTERVAL = 1.0
# Seconds for callbacks that run when the last process group ends.
CLOSE_TIMEOUT = 5.0


class Futures:
    """Threads that set futures: as many as there are callbacks that wait for other futures, and one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads, less the jobs that none has taken yet

    def set(self, job: Callable[[], None]) -> None:
        """Call `job()` in one of the threads."""
        with self._lock:
            self._num_free -= 1
            if self._num_free < 0:
                self._num_free += 1
                thread = threading.Thread(target=self._run, name="neurogrid-futures", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads once the jobs that are there are done, and wait for that.

        A thread that is in a callback of torch when the interpreter ends would take the process down.
        """
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            # A callback that raises is its own future's failure.
            with contextlib.suppress(RuntimeError):
                job()
            with self._lock:
                self._num_free += 1


class Pending(Work):
    """One operation that is under way.

    Args:
        name: of the operation, for people.
        tensors: what its future holds.
        futures: the threads that set it.
        check: raises an error if the loop has ended, so that nothing ends any more.

    Attributes:
        source: the rank that the tensor of a receive comes from; -1 for none, and as long as it is not known.
    """

    def __init__(
        self,
        name: str,
        tensors: list[torch.Tensor],
        futures: Futures,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self._check = check
        self._name = name
        self._tensors = tensors
        self._futures = futures
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._settled: Future[None] | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self.source = -1

    # In the loop's thread

    def end(self, error: BaseException | None = None) -> None:
        """The operation is done, or failed."""
        with self._lock:
            self._error = error
            self._done.set()
            settled = self._settled
        if settled is not None:
            self._futures.set(lambda: settled.set_result(None))

    def _outcome(self, _: Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    # In the callers' threads; torch calls these by name

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Return True when the operation is done; zero waits until its own deadline.

        Raises:
            RankError: it failed, or `timeout` passed.
        """
        left = timeout.total_seconds()
        if left > 0:
            if not self._done.wait(left):
                raise RankError(f"{self._name} did not end within {left:g} s")
        else:
            while not self._done.wait(SIGNAL_INTERVAL):
                self._check()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done or failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is done."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that it failed with; None if there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors of the operation."""
        return self._tensors

    def source_rank(self) -> int:
        """The rank that the tensor of a receive came from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that holds the tensors; that of a failed operation raises a RuntimeError that says how."""
        with self._lock:
            if self._future is None:
                # What a callback raises is an error to torch's C++, too, which DDP waits in; what `set_exception` sets
                # is a result there.
                self._settled = Future()
                self._future = self._settled.then(self._outcome)
                if self._done.is_set():
                    self._settled.set_result(None)
            return self._future
