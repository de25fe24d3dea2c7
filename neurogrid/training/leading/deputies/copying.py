"""A leader's deputy: it gets a copy of the journal line by line, and no order goes out that it lacks the reason of.

What is decided is the matter of `runs.terms`; here lines are sent, members are told, and what came of it is written.

Source: protocol_spec/training/terms.md.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.hosts.host import is_address_of
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.leading.deputies.copied_files import OfferedCopies
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.leading.settings import NodeProgress
from neurogrid.training.runs.entries import DeputyEntry
from neurogrid.training.runs.journal import Journal, Recorded
from neurogrid.training.runs.state import Occupant
from neurogrid.training.runs.terms import Copies, Sitting, Standing
from neurogrid.training.wire.runs import (
    Appoint,
    Appointed,
    Copied,
    Follow,
    Followed,
    Lines,
    RunMessage,
)

__all__ = ["Copying", "DeposedError"]

logger = logging.getLogger(__name__)

# Seconds between two Lines, while there are none.
_BEAT: Final = 0.5
# Of the journal in one message: whoever copies looks at each signature, and does nothing else meanwhile.
_PIECE_BYTES: Final = 64 * 1024
_ANSWER_TIMEOUT: Final = 2.0
# Seconds after which the run goes on without a deputy that says nothing, which is no loss: it follows again. More than
# it waits for its leader.
_SILENCE: Final = 3.0
# Seconds: a deputy claims nothing so soon after its last answer.
_FRESH: Final = 2.0
_TELL_AGAIN: Final = 1.0
# Seconds between two lines for people who wait.
_SAY_AGAIN: Final = 30.0


class DeposedError(NeuroGridError):
    """Another one leads the run: the deputy, by the promises of most members. Nothing more goes out from here."""


@dataclass
class _Deputy:
    """A deputy, or a peer that copies the journal to be the deputy once it has all of it.

    Attributes:
        num_bytes: of the journal that it has.
        line: that it has on its disk.
        heard_at: when that was sent which it answered last: the answer may have waited while this process stood still.
        addresses: at which members can dial it.
        files_version: of the files that it was told of.
    """

    peer: str
    num_bytes: int
    line: int
    heard_at: float
    addresses: tuple[str, ...] = ()
    files_version: int = 0


class Copying:
    """A leader's deputy. Keep `run` running.

    Args:
        exchange: of runs.
        journal: of the run, which this leader writes.
        facts: of the run.
        files: that the deputy has besides.
        progress: is told who the deputy is.
    """

    def __init__(
        self,
        exchange: Exchange,
        journal: Journal,
        facts: RunFacts,
        files: OfferedCopies,
        progress: NodeProgress,
    ) -> None:
        self._exchange, self._journal = exchange, journal
        self._facts, self._files, self._progress = facts, files, progress
        self._started: Callable[[], Iterable[str]] = tuple
        entries = [recorded.entry for recorded in journal.entries]
        self._copies = Copies.of(exchange.host.peer_id, entries)
        self._sitting = Sitting()
        for entry in entries:
            self._sitting.take(entry)
        # Of a leader that was started again: it may copy still, or lead.
        self._deputy: _Deputy | None = None
        if self._copies.deputy:
            self._deputy = _Deputy(self._copies.deputy, 0, 0, trio.current_time())
        # Who copies the journal, to be the deputy when it has all of it.
        self._follower: _Deputy | None = None
        self._wrote = RenewedEvent()
        self._copied = RenewedEvent()
        self._silent_since = trio.current_time()
        self._told: dict[str, tuple[int, int]] = {}
        exchange.on_message(RunMessage.FOLLOW, self._on_follow)

    @property
    def term(self) -> int:
        """This leader's."""
        return self._copies.term

    def tell_all(self, started: Callable[[], Iterable[str]]) -> None:
        """These peers were started as members: they are told who the deputy is."""
        self._started = started

    def wrote(self, recorded: Recorded) -> None:
        """A line was written."""
        self._sitting.take(recorded.entry)
        self._copies.take(recorded.line, recorded.entry, self._sitting)
        self._wrote.set()

    @property
    def is_open(self) -> bool:
        """Whether orders may go out that follow from the last line."""
        return self._copies.is_open

    async def wait_open(self) -> None:
        """Wait until orders may go out."""
        while not self._copies.is_open:
            await self._copied.wait()

    async def wait_heard(self) -> None:
        """Wait until the deputy has said a moment ago that it does not lead: this process may have stood still."""
        while self._copies.deputy and not self._is_heard():
            with trio.move_on_after(_BEAT):
                await self._copied.wait()

    def _is_heard(self) -> bool:
        deputy = self._deputy
        return deputy is not None and trio.current_time() - deputy.heard_at < _FRESH

    def do_without(self) -> None:
        """Go on without the deputy, as somebody says who knows that it does not lead."""
        if self._copies.deputy:
            self._journal.append(DeputyEntry(self._number(), ""))

    async def settle(self) -> None:
        """Wait until it is known that this leader leads: its deputy may have taken over while it was away."""
        said_at = -_SAY_AGAIN
        while not self._copies.is_open:
            if trio.current_time() - said_at >= _SAY_AGAIN:
                said_at = trio.current_time()
                self._progress.say(
                    f"waiting for the deputy {self._copies.deputy}, or for half of the members to say that they have "
                    "none: nothing is dealt before. If it has not taken over and its machine is lost: --without-deputy"
                )
            with trio.move_on_after(HEARTBEAT):
                await self._copied.wait()

    async def run(self) -> None:
        """Keep a deputy.

        Raises:
            DeposedError: another one leads.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_copying)
            nursery.start_soon(self._keep_telling)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._keep_files)

    # Who follows

    async def _on_follow(self, message: TensorMessage) -> None:
        follow, peer_id = Follow.decode(message.data), sender_of(message)
        for address in follow.addresses:
            _require_own(address, peer_id)
        known = {each.peer for each in (self._deputy, self._follower) if each is not None}
        others = {*known, self._copies.deputy} - {"", peer_id}
        if others:
            raise RequestRefusedError(
                f"the run has a deputy: {', '.join(sorted(others))}",
                code=ErrorCode.BUSY,
                retry_after=_SILENCE,
                is_expected=True,
            )
        if self._copies.has_lost(peer_id, follow.line):
            raise RequestRefusedError(
                "this peer is the deputy, and has lost lines that it had: members are asked to do without it first",
                code=ErrorCode.BUSY,
                retry_after=_SILENCE,
                is_expected=True,
            )
        if follow.line and not await trio.to_thread.run_sync(self._has, follow):
            raise RequestRefusedError(
                "the copy is of another journal, or has lines that this one has not: copy into an empty directory",
                code=ErrorCode.NOT_SUPPORTED,
            )
        facts = self._facts
        answer = Followed(
            run=facts.run_id,
            run_file=facts.text,
            config=facts.config,
            manifest=facts.manifest,
            term=self.term,
            num_bytes=self._journal.num_bytes,
        )
        reply = TensorMessage(
            RunMessage.FOLLOWED, request_id=message.request_id, data=answer.encode()
        )
        await self._exchange.send(peer_id, reply)
        found = _Deputy(
            peer_id, follow.num_bytes, follow.line, trio.current_time(), follow.addresses
        )
        if self._copies.deputy == peer_id:
            self._deputy = found
        else:
            self._follower = found
        self._wrote.set()

    def _has(self, follow: Follow) -> bool:
        """Whether the journal begins with that copy."""
        if follow.run != self._facts.run_id or follow.num_bytes > self._journal.num_bytes:
            return False
        num_bytes = num_lines = 0
        line = b""
        with self._journal.path.open("rb") as file:
            while num_bytes < follow.num_bytes:  # line by line: the journal of a long run is large
                line = file.readline(follow.num_bytes - num_bytes)
                if not line.endswith(b"\n"):
                    return False
                num_bytes += len(line)
                num_lines += 1
        return num_lines == follow.line and hashlib.sha256(line[:-1]).digest() == follow.digest

    # Lines

    async def _keep_copying(self) -> None:
        while True:
            wrote = self._wrote.next
            each = self._deputy or self._follower
            if each is None:
                await wrote.wait()
                continue
            before = each.num_bytes
            await self._send_lines(each)
            if before < each.num_bytes < self._journal.num_bytes:
                continue
            pause = _BEAT if each.num_bytes >= self._journal.num_bytes else _BEAT / 5
            with trio.move_on_after(pause):
                await (wrote.wait() if pause == _BEAT else trio.sleep_forever())

    async def _keep_files(self) -> None:
        while True:
            if self._deputy is not None or self._follower is not None:
                await self._files.refresh()
            await trio.sleep(HEARTBEAT)

    async def _send_lines(self, to: _Deputy) -> None:
        num_bytes = min(_PIECE_BYTES, self._journal.num_bytes - to.num_bytes)
        data = b""
        if num_bytes > 0:
            data = await trio.to_thread.run_sync(_read, self._journal.path, to.num_bytes, num_bytes)
        version = self._files.version
        has_files = to.files_version != version
        lines = Lines(
            self._facts.run_id,
            to.num_bytes,
            term=self.term,
            data=data,
            files=self._files.names if has_files else (),
            blobs=self._files.blobs if has_files else (),
        )
        request = TensorMessage(RunMessage.LINES, request_id=new_request_id(), data=lines.encode())
        asked_at = trio.current_time()
        try:
            answer = await self._exchange.request(
                to.peer, request, RunMessage.COPIED, timeout=_ANSWER_TIMEOUT
            )
            copied = Copied.decode(answer.data)
        except NeuroGridError as exc:
            logger.debug("the deputy does not answer: %s", exc)
            await trio.sleep(_BEAT / 2)
            return
        if copied.run != self._facts.run_id:
            return
        if copied.leader and copied.term > self.term:
            raise _deposed(copied.leader, copied.term)
        to.heard_at, to.files_version = asked_at, version
        to.num_bytes, to.line = min(copied.num_bytes, self._journal.num_bytes), copied.line
        if to is self._deputy:
            if self._copies.dropping is not None:
                self._copies.keep()
                self._progress.say("the deputy is back")
            self._copies.has_copied(to.line)
            self._copied.set()
        elif to is self._follower and to.line >= self._journal.place.line:
            self._appoint(to)

    def _appoint(self, follower: _Deputy) -> None:
        """Appoint a follower that has all of the journal: from the next line on nothing goes out that it lacks."""
        if self._copies.deputy:
            return
        self._follower, self._deputy = None, follower
        self._journal.append(DeputyEntry(self._number(), follower.peer))
        self._progress.say(
            f"{self._name_of(follower.peer)} is the deputy: it has all of the journal"
        )

    def _number(self) -> int:
        return max(self._copies.number + 1, time.time_ns() // 1000)

    def _name_of(self, peer_id: str) -> str:
        hello = self._exchange.hello_of(peer_id)
        return hello.name if hello is not None and hello.name else peer_id

    # What members are told

    async def _keep_telling(self) -> None:
        while True:
            if (told := self._copies.told) is not None:
                number, deputy = told
                peers = {*self._started(), *(each.peer for each in self._copies.known)}
                async with trio.open_nursery() as nursery:
                    for peer_id in peers:
                        if self._exchange.host.is_connected(peer_id) and self._is_new(
                            peer_id, number
                        ):
                            nursery.start_soon(self._tell, peer_id, number, deputy)
            with trio.move_on_after(_TELL_AGAIN):
                await self._copied.wait()
                await trio.sleep(_TELL_AGAIN / 20)

    def _is_new(self, peer_id: str, number: int) -> bool:
        """Whether a peer has not answered to this number, in the incarnation that sits on a seat."""
        known = [each.incarnation for each in self._copies.members if each.peer == peer_id]
        return self._told.get(peer_id) != (number, known[0] if known else 0)

    async def _tell(self, peer_id: str, number: int, deputy: str) -> None:
        addresses = self._deputy.addresses if deputy and self._deputy is not None else ()
        appoint = Appoint(
            self._facts.run_id, number, term=self.term, deputy=deputy, addresses=addresses
        )
        request = TensorMessage(
            RunMessage.APPOINT, request_id=new_request_id(), data=appoint.encode()
        )
        try:
            answer = await self._exchange.request(
                peer_id, request, RunMessage.APPOINTED, timeout=_ANSWER_TIMEOUT
            )
            told = Appointed.decode(answer.data)
        except NeuroGridError as exc:
            logger.debug("%s is not told who the deputy is: %s", peer_id, exc)
            return
        if told.run != self._facts.run_id:
            return
        self._told[peer_id] = (told.number, told.incarnation)
        member = Occupant(peer_id, told.incarnation)
        self._copies.answered(member, Standing(told.term, told.leader, told.number, told.deputy))
        if self._copies.is_overruled:
            raise _deposed(told.leader, told.term)
        if self._copies.is_dropped:
            self._drop()

    # Without a deputy

    async def _watch(self) -> None:
        while True:
            heard_at = self._deputy.heard_at if self._deputy is not None else self._silent_since
            silence = trio.current_time() - heard_at
            if self._copies.deputy and silence >= _SILENCE:
                if self._copies.dropping is None:
                    self._progress.warn(
                        f"the deputy says nothing for {silence:.0f} s: members are asked to do without it"
                    )
                    self._copies.drop(self._number())
                    self._copied.set()
                if self._copies.is_dropped:
                    self._drop()
            follower = self._follower
            if follower is not None and trio.current_time() - follower.heard_at >= _SILENCE:
                self._follower = None
            await trio.sleep(HEARTBEAT / 2)

    def _drop(self) -> None:
        number = self._copies.told
        assert number is not None
        self._journal.append(DeputyEntry(number[0], ""))
        self._deputy = None
        self._progress.warn("the run goes on without a deputy")
        self._copied.set()


def _deposed(leader: str, term: int) -> DeposedError:
    return DeposedError(
        f"{leader} leads the run since term {term}, by the promises of most members: this leader leads no more. What "
        "its journal says beyond the other's nobody has followed"
    )


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def _require_own(address: str, peer_id: str) -> None:
    """A deputy says where it is itself, and nobody else: members dial what it says."""
    if not is_address_of(address, peer_id):
        raise RequestRefusedError(
            "a deputy tells its own addresses", code=ErrorCode.PROTOCOL_VIOLATION
        )
