"""Runs in a script or a notebook: a loop of one's own, and the others in a thread.

with neurogrid.open_run(model, optimizer) as run:           # on one machine; prints the ticket
with neurogrid.join_run(ticket, model, optimizer) as run:   # on the others
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        run.step(samples=len(batch["input_ids"]))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Final

from torch import nn, optim

from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.training.averaging.groups import Outcome
from neurogrid.training.loops.meeting import LISTEN
from neurogrid.training.loops.outer_loop import Rules
from neurogrid.training.loops.run import RunMember, open_member
from neurogrid.training.wire import GroupSettings

__all__ = ["Run", "join_run", "open_run"]

_CLOSE_TIMEOUT: Final = 30.0


class Run:
    """A member of a run. Made by `open_run` and `join_run`; its methods may be called from one thread at a time."""

    def __init__(self, thread: TrioThread[RunMember], optimizer: optim.Optimizer | None) -> None:
        self._thread, self._optimizer = thread, optimizer
        self._member = thread.resource

    @property
    def invitation(self) -> str:
        """The text by which others join: a ticket, or an address of this machine."""
        return self._member.invitation

    @property
    def rules(self) -> Rules:
        """The rules that all members follow."""
        return self._member.loop.rules

    @property
    def round(self) -> int:
        """Syncs that are in the weights, those from before this member joined included."""
        return self._member.loop.round

    @property
    def num_steps(self) -> int:
        """Steps of this member."""
        return self._member.loop.num_steps

    @property
    def num_samples(self) -> float:
        """Samples of all members that are in the weights."""
        return self._member.loop.num_samples

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the members, this one included."""
        return self._thread.call_sync(lambda: self._member.group.members)

    @property
    def peer_id(self) -> str:
        """The peer id of this member (base58)."""
        return self._member.group.peer_id

    def wait_members(self, number: int, *, timeout: float = 600.0) -> None:
        """Wait until there are so many members.

        Raises:
            GroupError: there are fewer after `timeout` seconds.
        """
        self._thread.call(partial(self._member.group.wait_members, number, timeout=timeout))

    def step(self, samples: float = 1.0) -> Outcome | None:
        """Step the optimiser and clear its gradients; sync with the others if it is time.

        Args:
            samples: how many the step was made on: by them a member's contribution counts.

        Returns:
            What the sync came to; None where none was due.

        Raises:
            RoundTimeout: the others are not there, or not enough of them; says for whom it waits.
            NotAMemberError: this peer is no member any more: join again.
            NotFiniteError: this member's weights have NaN or infinity; the others go on without what it has learned.
            ConfigurationError: `samples` is negative or not finite, or the model trains a parameter that it did not
                train, or did not have, when the run was opened.
        """
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        if not self._member.loop.step(samples):
            return None
        return self.sync()

    def sync(self) -> Outcome:
        """Sync with the others now. Raises: as `step`."""
        return self._thread.call(self._member.sync)


@contextmanager
def open_run(
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    every: int = 20,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    feedback: float = 0.0,
    settings: GroupSettings | None = None,
    listen: Sequence[str] = LISTEN,
    timeout: float = 600.0,
) -> Iterator[Run]:
    """Found a run: others join it by what is printed on stderr, and by `Run.invitation`.

    Args:
        model: its parameters that are trained are averaged, and replaced at each sync.
        optimizer: of this member; its state stays here. None where the caller steps one itself.
        every: steps between two syncs.
        outer_lr, outer_momentum: of the outer step; 1 and 0 average weights.
        feedback: share of what the codec lost of a contribution that is added to the next one: 1, or 0.95 as in
            SparseLoCo; 0 for nothing. It takes the memory of the parameters once more, and twice in a sync.
        settings: of the group: codec, aggregator, quorum, grace; the first round waits for `min_members`, two.
        listen: multiaddrs to listen on. On loopback alone no ticket is needed.
        timeout: seconds for each sync.

    Raises:
        ConfigurationError: a setting is out of its range, or the model has nothing to train.
    """
    rules = Rules(every, outer_lr, outer_momentum, feedback)
    opener = partial(
        open_member, model, rules=rules, settings=settings, listen=listen, timeout=timeout
    )
    with _in_thread(opener, optimizer) as run:
        print(f"others join this run with: {run.invitation}", file=sys.stderr, flush=True)
        yield run


@contextmanager
def join_run(
    where: str,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    listen: Sequence[str] = LISTEN,
    timeout: float = 600.0,
) -> Iterator[Run]:
    """Join a run while its founder is there, and take over its weights, outer state and position.

    Args:
        where: what the founder was told: a ticket, which is good for 30 days, or an address on the same machine.
        model: of the same parameters; their values are replaced.
        optimizer: of this member; its state stays here. None where the caller steps one itself.
        listen: multiaddrs to listen on.
        timeout: seconds for joining, and for each sync.

    Raises:
        ConfigurationError: `where` is nothing to join by, or what is there is no run.
        GroupError: the run is not reached in time.
        PeerRefusedError: the run is about another model.
    """
    opener = partial(open_member, model, where=where, listen=listen, timeout=timeout)
    with _in_thread(opener, optimizer) as run:
        yield run


@contextmanager
def _in_thread(
    opener: Callable[[], AbstractAsyncContextManager[RunMember]],
    optimizer: optim.Optimizer | None,
) -> Iterator[Run]:
    with TrioThread(
        opener, name="neurogrid run", what="run", close_timeout=_CLOSE_TIMEOUT
    ) as thread:
        yield Run(thread, optimizer)
