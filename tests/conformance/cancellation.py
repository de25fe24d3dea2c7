"""Cancel a call at its first await, at its second, and so on until it is through.

    for attempt in attempts():
        ...                             # what the call needs
        await attempt.run(call)
        ...                             # what must hold, whether `attempt.is_through` or not

Steps are counted by an instrument of trio's: those of the task that makes the call, and of all tasks that it
starts on the way. Tasks of the host belong to the host; what they do is not cut short by the caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio

__all__ = ["Attempt", "attempts", "num_tasks", "settled_tasks"]

# A call that is not through after so many steps never will be.
MAX_STEPS = 2000


class Attempt(trio.abc.Instrument):
    """One call, which is cancelled after so many steps.

    Attributes:
        is_through: whether the call returned or raised all the same, instead of being cancelled.
        has_fired: whether it took so many steps at all.
        num_steps: how many it has taken, until it was cancelled.
    """

    def __init__(self, steps: int) -> None:
        self.is_through = False
        self.has_fired = False
        self.num_steps = 0
        self._steps = steps
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None
        self._older_nurseries: set[trio.Nursery] = set()

    async def run(self, call: Callable[..., Awaitable[object]], *args: object) -> None:
        """Make the call. What it raises leaves here."""
        self._task = trio.lowlevel.current_task()
        self._older_nurseries = set(self._task.child_nurseries)
        trio.lowlevel.add_instrument(self)
        try:
            with self._scope:
                try:
                    await call(*args)
                except Exception:
                    self.is_through = True
                    raise
                self.is_through = True
        finally:
            trio.lowlevel.remove_instrument(self)
        assert self.is_through or self._scope.cancelled_caught

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.has_fired or not self._is_ours(task):
            return
        if self.num_steps < self._steps:
            self.num_steps += 1
        else:
            self.has_fired = True
            self._scope.cancel()

    def _is_ours(self, task: trio.lowlevel.Task | None) -> bool:
        while task is not None:
            if task is self._task:
                return True
            nursery = task.parent_nursery
            if nursery is None or nursery in self._older_nurseries:
                return False
            task = nursery.parent_task
        return False


def attempts(*, at_least: int = 1) -> Iterator[Attempt]:
    """Attempts at one call, each cancelled one await later, until it takes no more of them."""
    for step in range(MAX_STEPS):
        attempt = Attempt(step)
        yield attempt
        if not attempt.has_fired:
            assert step >= at_least, "the call did not await anything"
            return
    raise AssertionError(f"not through after {MAX_STEPS} steps")


def num_tasks() -> int:
    """How many tasks there are, trio's own among them, without those that stand for cables."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    tasks, total = [root], 0
    while tasks:
        task = tasks.pop()
        if "_Relay" in task.name:
            continue
        total += 1
        for nursery in task.child_nurseries:
            tasks.extend(nursery.child_tasks)
    return total


async def settled_tasks() -> int:
    """How many tasks there are once that does not change any more."""
    num_same, last = 0, -1
    while num_same < 10:
        await trio.sleep(0.01)
        num_same, last = (num_same + 1 if num_tasks() == last else 0), num_tasks()
    return last
