"""Tensors that wait at a stage until their operation's turn: what is taken, from whom, and what is refused. Pure.

A tensor of an arrangement or a step that is over is dropped without a word: who sent it did not know. Any other that
is not due is an error of its sender.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.wire.runs import MAX_MICRO_BATCHES, RunMessage, StageTensor

__all__ = ["Sources", "StageInbox", "sources_of", "takers_of_tied"]

# Pieces of the gradient of what is tied, of 8 million numbers each.
_MAX_TIED_PIECES: Final = 1024


Sources = Mapping[RunMessage, frozenset[str]]
"""Peers that may send each kind of tensor."""


def sources_of(
    stages: Sequence[Sequence[str]],
    peer: str,
    leader: str,
    *,
    has_subspace: bool = False,
    is_tied: bool = True,
) -> Sources:
    """Return the peers that may send a member each kind of tensor; kinds that no peer may send are left out.

    Args:
        stages: the peer ids of each stage.
        peer: the member.
        has_subspace: hidden states come as a part that the token ids belong to.
        is_tied: something that learns is in both ends.
    """
    last = len(stages) - 1
    index = next(i for i, members in enumerate(stages) if peer in members)
    found: dict[RunMessage, frozenset[str]] = {}
    if index == 0 or has_subspace:
        found[RunMessage.TOKENS] = frozenset({leader})
    if index:
        found[RunMessage.HIDDEN] = frozenset(stages[index - 1])
    if index == last:
        found[RunMessage.LABELS] = frozenset({leader})
    else:
        found[RunMessage.GRADIENT] = frozenset(stages[index + 1])
    if is_tied and index in (0, last) and last:
        other = stages[last - index]
        found[RunMessage.TIED] = frozenset({other[stages[index].index(peer) % len(other)]})
    return found


def takers_of_tied(stages: Sequence[Sequence[str]], peer: str) -> tuple[str, ...]:
    """The members of the other end that a member of the first or the last stage gives its gradient of what is tied."""
    last = len(stages) - 1
    index = 0 if peer in stages[0] else last
    own, other = stages[index], stages[last - index]
    lane = own.index(peer)
    return tuple(taker for number, taker in enumerate(other) if number % len(own) == lane)


class StageInbox:
    """Tensors that wait at a stage of one chain.

    Args:
        session, chain: of the tensors that are meant.
        step: that is under way.
        sources: who may send what, of `sources_of`.
    """

    def __init__(self, session: int, chain: int, step: int, sources: Sources) -> None:
        self._session, self._chain, self._sources = session, chain, sources
        self._waiting: dict[tuple[RunMessage, int, int, str], StageTensor] = {}
        # Of the step that is under way: what comes again after it was taken has come twice too.
        self._taken: set[tuple[RunMessage, int, int, str]] = set()
        self._num_micro_batches = MAX_MICRO_BATCHES
        self.step = step

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sender: str, tensor: StageTensor) -> bool:
        """A tensor has come; whether it is kept.

        Raises:
            RemoteProtocolError: its sender may not send it, or not now, or has sent it before.
        """
        if tensor.session != self._session or tensor.chain < self._chain:
            return False
        if tensor.chain == self._chain and tensor.step < self.step:
            return False
        what = f"{tensor.code.name.lower()} {tensor.number} of step {tensor.step}"
        if tensor.chain > self._chain:
            raise RemoteProtocolError(f"{what} is of a chain that has not begun here")
        if sender not in self._sources.get(tensor.code, ()):
            raise RemoteProtocolError(
                f"{what} comes of none that may send it to this stage", code=ErrorCode.UNAUTHORIZED
            )
        # Who is ahead may have begun the next one.
        if tensor.step > self.step + 1:
            raise RemoteProtocolError(f"{what} is not due: step {self.step} is under way")
        key = tensor.code, tensor.step, tensor.number, sender
        self._check_number(key)
        if key in self._waiting or key in self._taken:
            raise RemoteProtocolError(f"{what} has come twice")
        most = _MAX_TIED_PIECES if tensor.code is RunMessage.TIED else MAX_MICRO_BATCHES
        if sum(code is tensor.code for code, *_ in self._waiting) >= 2 * most:
            raise RemoteProtocolError(f"{what} comes while {2 * most} such tensors wait")
        self._waiting[key] = tensor
        return True

    def _check_number(self, key: tuple[RunMessage, int, int, str]) -> None:
        code, step, number, _ = key
        if step == self.step and code is not RunMessage.TIED and number >= self._num_micro_batches:
            raise RemoteProtocolError(
                f"{code.name.lower()} {number} of step {step} has come, and that step has {self._num_micro_batches} "
                "micro-batches"
            )

    def begin(self, num_micro_batches: int) -> None:
        """The step that is under way has so many micro-batches, whose numbers count from 0.

        Raises:
            RemoteProtocolError: a tensor of another has come before.
        """
        self._num_micro_batches = num_micro_batches
        for key in self._waiting:
            self._check_number(key)

    def take(self, code: RunMessage, number: int, sender: str) -> StageTensor | None:
        """A tensor of the step that is under way, which does not wait any more; None where it has not come."""
        key = code, self.step, number, sender
        if (found := self._waiting.pop(key, None)) is not None:
            self._taken.add(key)
        return found

    def end_evaluation(self) -> None:
        """Begin the same step anew, as one that evaluates is over. What was not taken of it is dropped."""
        self._begin_anew(self.step + 1)

    def advance(self, step: int | None = None) -> None:
        """Another step is under way: the next one, or the one given. What was not taken of those before is dropped."""
        self.step = self.step + 1 if step is None else step
        self._begin_anew(self.step)

    def _begin_anew(self, first: int) -> None:
        """Drop what is of steps before the given one."""
        self._waiting = {key: each for key, each in self._waiting.items() if key[1] >= first}
        self._taken.clear()
        self._num_micro_batches = MAX_MICRO_BATCHES
