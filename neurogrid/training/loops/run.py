"""A member of a run, under trio: a group, a model, and syncs between them.

async with open_member(model, where=ticket) as member:
    for batch in batches:
        ...  # a step of the caller's own optimiser
        await member.step(len(batch))
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import trio
from torch import nn

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.groups import Group, Outcome, RoundTimeout, open_group
from neurogrid.training.loops.meeting import LISTEN, open_meeting
from neurogrid.training.loops.outer_loop import OuterLoop, Rules
from neurogrid.training.wire import GroupSettings

__all__ = ["RunMember", "open_member"]

logger = logging.getLogger(__name__)


class RunMember:
    """A member of a run. Made by `open_member`.

    Attributes:
        group: whom it averages with.
        loop: the weights, and where they stand.
        invitation: what others are given to join: a ticket, or an address of this machine.
    """

    def __init__(
        self, group: Group, loop: OuterLoop, invitation: str, model: nn.Module, *, timeout: float
    ) -> None:
        self.group, self.loop, self.invitation = group, loop, invitation
        self._model, self._timeout = model, timeout

    async def step(self, samples: float = 1.0) -> Outcome | None:
        """A step was made on so many samples; sync with the others if it is time.

        Returns:
            What the sync came to; None where none was due.

        Raises:
            RoundTimeout: the others are not there, or not enough of them; says for whom it waits.
            NotAMemberError: this peer is no member any more: join again.
            NotFiniteError: this member's weights have NaN or infinity; the others go on without what it has learned.
            ConfigurationError: `samples` is negative or not finite, or the model trains a parameter that it did not
                train, or did not have, when the run was opened.
        """
        if not self.loop.step(samples):
            return None
        return await self.sync()

    async def sync(self) -> Outcome:
        """Average with the others now, and go on with the common weights. Raises: as `step`.

        Cancellation leaves the weights as they were, or as the round has made them.
        """
        self.loop.check(trained_parameters(self._model))
        vector, samples = await trio.to_thread.run_sync(self.loop.contribution)
        due = await trio.to_thread.run_sync(self.loop.due, vector)
        try:
            outcome = await self.group.average(due, weight=samples, timeout=self._timeout)
        except (RoundTimeout, trio.Cancelled):
            if self.group.may_have_contributed:
                self.loop.give_up((vector, samples), call=self.group.num_calls)
            raise
        # An outcome comes once: without it the weights would be others than those of all other members, for good.
        with trio.CancelScope(shield=True):
            self.group.take_state_back()
            await trio.to_thread.run_sync(partial(self.loop.apply, outcome))
            self.group.show_state(self.loop.state())
        return outcome


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@asynccontextmanager
async def open_member(
    model: nn.Module,
    *,
    where: str | None = None,
    rules: Rules | None = None,
    settings: GroupSettings | None = None,
    listen: Sequence[str] = LISTEN,
    timeout: float = 600.0,
) -> AsyncIterator[RunMember]:
    """Found a run, or join one and take over its weights, for as long as the block lasts.

    Args:
        model: its parameters that are trained are averaged, and replaced.
        where: a ticket, or the address of a member on this machine; None founds a run.
        rules: of a run that is founded; those who join are told them.
        settings: of its group; the same.
        listen: multiaddrs to listen on.
        timeout: seconds for joining, and for each sync.

    Raises:
        ConfigurationError: the model has nothing to train, or what is there is no run.
        GroupError: the run is not reached in time.
        PeerRefusedError: the run is about another model.
    """
    parameters = trained_parameters(model)
    if where is not None and (rules is not None or settings is not None):
        raise ConfigurationError("the rules of a run are its founder's: join it without")
    rules = rules or Rules()
    settings = replace(settings or GroupSettings(), purpose=rules.text())
    loop = OuterLoop(parameters, rules, settings.codec)
    async with (
        open_meeting(where, listen=listen) as meeting,
        open_group(
            meeting.host,
            loop.layout,
            join=meeting.join,
            settings=None if meeting.join else settings,
            timeout=timeout,
        ) as group,
    ):
        if meeting.join:
            told = group.settings
            loop = OuterLoop(parameters, Rules.parse(told.purpose), told.codec)
            state = await group.fetch_state(loop.sizes, timeout=timeout)
            if state is not None:
                await trio.to_thread.run_sync(partial(loop.load, state))
            logger.info("joined after round %d, with %d members", loop.round, len(group.members))
        group.show_state(loop.state())
        yield RunMember(group, loop, meeting.invitation, model, timeout=timeout)
