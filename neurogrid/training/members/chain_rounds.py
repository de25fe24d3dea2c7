"""A stage's part in rounds of several replicas: it averages what it has learned with those that have the same layers.

    Average -> differences, a reduction for each set of members -> Averaged ... Commit -> outer step

Nothing has changed before the Commit. An attempt that a later one takes the place of is let go of where it is.

Source: protocol_spec/training/stages.md, "Replicas".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from torch import Tensor

from neurogrid.errors import LocalProtocolError, RemoteProtocolError, TransportError
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.reductions import MembersLostError, Reductions
from neurogrid.training.members.failures import one_line
from neurogrid.training.runs.run_file import OuterSection
from neurogrid.training.stages.holdings import TIED, Cut, Holding, holdings_of
from neurogrid.training.stages.reduction_plans import reduction_plan
from neurogrid.training.stages.stage_process import StageProcess
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.wire.group import DIGEST_BYTES
from neurogrid.training.wire.runs import Average, Averaged, Commit, StageOrder

__all__ = ["ChainRounds", "Reach"]

Reach = Callable[[Average, frozenset[str]], Awaitable[None]]
"""Has a connection to some of the members of an attempt."""


class ChainRounds:
    """Rounds of one stage, between its own steps: attempts at an average, and the outer step.

    Args:
        order: by which it is a stage.
        own: the peer id of this member.
        outer: of the run file.
        process: with the layers.
        reductions: of the members of all replicas.
        reach: of those that pieces are shared with.
    """

    def __init__(
        self,
        order: StageOrder,
        *,
        own: str,
        outer: OuterSection,
        process: StageProcess,
        reductions: Reductions,
        reach: Reach,
    ) -> None:
        self._order, self._own, self._outer = order, own, outer
        self._process, self._reductions, self._reach = process, reductions, reach
        self._average: Average | None = None
        self._commit: Commit | None = None
        self._scope: trio.CancelScope | None = None
        # The last that has digests, and waits to be committed.
        self._attempt = 0

    @property
    def is_due(self) -> bool:
        """Whether there is anything to do."""
        return self._average is not None or self._commit is not None

    def take_average(self, average: Average) -> None:
        """An attempt begins, in the place of the one before.

        Raises:
            RemoteProtocolError: this member is not in it as the stage that it is.
        """
        for peers, bounds in zip(average.chains, average.cuts, strict=True):
            if self._own in peers and (peers, bounds) == (self._order.peers, self._order.bounds):
                break
        else:
            raise RemoteProtocolError("an attempt at a round of other replicas than this one")
        self._average, self._attempt = average, 0
        if self._scope is not None:
            self._scope.cancel()

    def take_commit(self, commit: Commit) -> None:
        """A round is made.

        Raises:
            RemoteProtocolError: it is of no attempt that this member has ended.
        """
        if not self._attempt or commit.attempt != self._attempt:
            raise RemoteProtocolError(f"attempt {commit.attempt} has come to nothing here")
        self._commit, self._attempt = commit, 0

    async def average(self, step: int) -> Averaged | None:
        """Carry out the attempt that is due; None where a later one has taken its place, or none is due.

        Args:
            step: that the state has made.

        Raises:
            RemoteProtocolError: it is of another step.
            NeuroGridError: the stage has failed.
        """
        average, self._average = self._average, None
        if average is None:
            return None
        if average.step != step:
            raise RemoteProtocolError(f"a round after step {average.step}, and {step} is next here")
        told: Averaged | None = None
        with trio.CancelScope() as self._scope:
            told = await self._try(average)
        self._scope = None
        if told is not None and self._average is None and told.digests:
            self._attempt = average.attempt
        return told if self._average is None else None

    async def commit(self) -> Commit | None:
        """Make the outer step of the round that is made; None where none is."""
        commit, self._commit = self._commit, None
        if commit is not None:
            await self._process.commit()
        return commit

    async def _try(self, average: Average) -> Averaged:
        """Carry out an attempt, and return what it has come to; a fault of another's is no fault of this stage."""
        reason, lost = "", ""
        try:
            with trio.fail_after(self._outer.attempt_timeout):
                digests = await self._reduce_all(average)
        except MembersLostError as exc:
            reason, lost = one_line(exc, type(exc).__name__), next(iter(exc.lost), "")
        except trio.TooSlowError:
            reason = f"an attempt took more than {self._outer.attempt_timeout:g} s"
        except TrainerError as exc:
            reason, lost = one_line(exc, type(exc).__name__), self._own
        except (TransportError, LocalProtocolError) as exc:
            reason, lost = one_line(exc, type(exc).__name__), getattr(exc, "lost", "")
        if reason:
            digests = ()
        return Averaged(
            self._order.run, self._order.chain, average.attempt, digests, reason=reason, lost=lost
        )

    async def _reduce_all(self, average: Average) -> tuple[bytes, ...]:
        weights = average.weights
        cuts = [
            Cut(peers, bounds, weight)
            for peers, bounds, weight in zip(average.chains, average.cuts, weights, strict=True)
        ]
        own = [each for each in holdings_of(cuts) if self._own in each.members]
        # Ends that have nothing tied have no elements of that: they reduce nothing with each other.
        shared = [each for each in own if self._process.is_tied or each.pieces != (TIED,)]
        await self._reach(average, frozenset(peer for each in shared for peer in each.members))
        digests = [bytes(DIGEST_BYTES)] * len(own)
        addresses = dict(zip(average.peers, average.addresses, strict=True))

        async def reduce(number: int, values: Tensor, mean: Tensor) -> None:
            holding = own[number]
            result = await self._reductions.reduce(
                self._plan(average, holding, addresses, len(values)),
                values,
                timeout=self._outer.attempt_timeout,
                out=mean,
            )
            assert result is not None  # of a member there is one
            digests[number] = result.digest

        await self._process.average("differences", reduce, groups=[each.pieces for each in own])
        return tuple(digests)

    def _plan(
        self, average: Average, holding: Holding, addresses: dict[str, str], num_elements: int
    ) -> ReductionPlan:
        return reduction_plan(
            self._order.run,
            0,
            average.attempt,
            0,
            holding.number,
            members=holding.members,
            reducers=[peer for peer in holding.members if addresses[peer]],
            num_elements=num_elements,
            codec=self._outer.codec,
            weights=holding.weights,
        )
