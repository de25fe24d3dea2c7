"""A deputy: it copies the journal of a run as its leader writes it, and leads when the leader is silent.

Until then it deals nothing and writes nothing of its own: it has what it takes to lead, and asks the members for a term
when nothing has come of the leader for a while. One that the run goes on without, and a leader that most members do not
obey any more, follows whoever leads: it is a deputy again when it has all of the journal. More than 600 lines, since
what it does in these cases is one thing over the same copy.

Source: protocol_spec/training/terms.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Final, TypeVar

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    PeerRefusedError,
    RequestRefusedError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.kept_connections import keep_coordinators
from neurogrid.node.reach_settings import open_reach
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.hosts.host import Host, parse_peer_address
from neurogrid.p2p.hosts.identity import Identity, is_signed_by
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import COORDINATOR, WORKER
from neurogrid.p2p.wire import ErrorCode, Hello, MessageType, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.blob_files import PIECE_LIMITS, fetch_file
from neurogrid.training.data.blobs import Providers, fetch_manifest
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.slices import MANIFEST_NAME, read_manifest, slice_path
from neurogrid.training.leading.deputies.copied_files import fetch_copies, forget_unfinished
from neurogrid.training.leading.deputies.copying import DeposedError
from neurogrid.training.leading.lead import Opened, lead
from neurogrid.training.leading.leader import GroupLostError
from neurogrid.training.leading.opening import rules_of
from neurogrid.training.leading.settings import DeputySettings, LeaderProgress, LeaderSettings
from neurogrid.training.runs.entries import LedEntry
from neurogrid.training.runs.journal import Journal, JournalCopy, JournalError, Recorded
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file
from neurogrid.training.runs.state import Occupant
from neurogrid.training.runs.terms import (
    Candidate,
    Place,
    Promise,
    Sitting,
    Standing,
    promise_bytes,
)
from neurogrid.training.runs.trainers import trainer_settings
from neurogrid.training.trainer import Trainer, open_trainer
from neurogrid.training.wire.runs import (
    Claim,
    Claimed,
    Copied,
    Follow,
    Followed,
    Lines,
    RunMessage,
    run_table,
)

__all__ = ["DEPUTY_TAKES", "stand_by"]

logger = logging.getLogger(__name__)

_LEADERS: Final = frozenset({COORDINATOR})

DEPUTY_TAKES: Final[Table] = {
    RunMessage.LINES: _LEADERS,
    # Of others that want to be deputies, and do not know who leads.
    RunMessage.FOLLOW: _LEADERS,
    # Of who has promised; what it says the leader is going to hear again.
    RunMessage.REPORT: frozenset({WORKER}),
    MessageType.TRANSFER_OFFER: _LEADERS,
    MessageType.WEIGHTS: _LEADERS,
}
"""The roles that a deputy takes each message from, until it leads."""

# Seconds without Lines, which come each half second, after which the leader counts as dead.
_SILENCE: Final = 2.5
# Between two Claims, and for the answer to one.
_CLAIM_AGAIN: Final = 0.25
_CLAIM_TIMEOUT: Final = 2.0
# Seconds of asking after which leaders are looked for again: members answer within one or two.
_PATIENCE: Final = 10.0
_FOLLOW_TIMEOUT: Final = 10.0
_FOLLOW_AGAIN: Final = 1.0
_FETCH_TIMEOUT: Final = 600.0
_FETCHES: Final = 4
# For a leader that is known: seconds until it counts as silent, where this deputy was started again.
_RETURN: Final = 10.0
_MODEL: Final = "model.json"
# Of a journal that is laid aside: before the term of the leader that it was copied of last.
_ASIDE: Final = ".of-term-"
# In the directory of the data: they have all come.
_COMPLETE: Final = ".complete"

T = TypeVar("T")


async def stand_by(settings: DeputySettings, progress: LeaderProgress) -> Path | None:
    """Copy a run until it ends, or until its leader is dead, and lead it then, to its end; copy it again when another
    one leads in its place.

    Returns:
        The last checkpoint, where this peer led at the end; None where it did not have to.

    Raises:
        ConfigurationError: the directory cannot be used, or the run is another than the copy's.
        NeuroGridError: the run cannot go on; says why.
    """
    directory = RunDirectory(settings.directory)
    with _writing(directory):
        directory.path.mkdir(parents=True, exist_ok=True)
    identity = Identity.load(settings.identity_file)
    is_deposed = False
    while True:
        try:
            with unwrap_errors():
                return await _stand_by(
                    settings, directory, identity, progress, is_deposed=is_deposed
                )
        except DeposedError as exc:
            progress.warn(f"{exc}. It copies the run again")
            is_deposed = True


async def _stand_by(
    settings: DeputySettings,
    directory: RunDirectory,
    identity: Identity,
    progress: LeaderProgress,
    *,
    is_deposed: bool,
) -> Path | None:
    try:
        with unwrap_errors():
            async with AsyncExitStack() as stack:
                deputy = _Deputy(settings, directory, identity, progress)
                stack.callback(lambda: deputy.copy.close())
                # Of a leader that was begun as such the model is elsewhere: it leads by `neurogrid train --resume`.
                # And what it wrote when it led before may stand at the end of a copy that is not whole.
                is_own = deputy.copy.leader == identity.peer_id and deputy.copy.is_whole
                leads = is_own and deputy.has_all
                if is_deposed or not leads:
                    return await deputy.run(stack)
                deputy.copy.close()
    except GroupLostError as exc:
        progress.warn(f"{exc}. The run goes on from what is here")
        return await lead(_leading(settings, directory, is_new=False), progress, is_anew=True)
    progress.say("this deputy leads: it goes on with the run")
    return await lead(_leading(settings, directory, is_new=False), progress)


def _leading(settings: DeputySettings, directory: RunDirectory, *, is_new: bool) -> LeaderSettings:
    return LeaderSettings(
        run=directory.read_run(),
        directory=directory.path,
        model=directory.path / _MODEL,
        admission=settings.admission,
        identity_file=settings.identity_file,
        num_threads=settings.num_threads,
        wait=settings.wait,
        resume=not is_new,
        listen=settings.listen,
        listen_fallback=settings.listen_fallback,
        name=settings.name,
        reach=settings.reach,
    )


class _Deputy:
    """A deputy, until it leads."""

    def __init__(
        self,
        settings: DeputySettings,
        directory: RunDirectory,
        identity: Identity,
        progress: LeaderProgress,
    ) -> None:
        self._settings, self._directory = settings, directory
        self._identity, self._progress = identity, progress
        self._sitting = Sitting()
        self._candidate = Candidate(identity.peer_id, _laid_aside(directory.journal))
        self.copy = JournalCopy(directory.journal, self._copied_entry)
        self._sync_candidate()
        self._is_ready = False
        self._heard_at = 0.0
        self._asks_since: float | None = None
        self._leader = ""
        self._term: int | None = None  # in which it leads
        self._came = RenewedEvent()
        self._files: dict[str, bytes] | None = None
        self._is_new_stream = False
        # Peers that may lead the run, as they have come.
        self._leaders: list[str] = []
        self._leader_came = RenewedEvent()
        # While it is not known what becomes of the copy.
        self._takes_none = False
        self._failure: ConfigurationError | None = None
        self._reports: dict[str, TensorMessage] = {}
        self._said = ""

    def _copied_entry(self, recorded: Recorded) -> None:
        self._sitting.take(recorded.entry)

    def _sync_candidate(self) -> bool:
        sitting = self._sitting
        return self._candidate.copied(
            self.copy.place,
            term=sitting.term,
            members=sitting.members,
            deputy=sitting.deputy,
            number=sitting.number,
            is_whole=self.copy.is_whole,
        )

    async def run(self, stack: AsyncExitStack) -> Path | None:
        settings = self._settings
        host: Libp2pHost = await stack.enter_async_context(
            open_host(
                listen=settings.listen,
                listen_fallback=settings.listen_fallback,
                identity=self._identity,
                admission=settings.admission,
                keep_alive=settings.reach.keep_alive,
            )
        )
        exchange = Exchange(host, run_table(), role="coordinator", name=machine_name(settings.name))
        authorise(exchange, DEPUTY_TAKES)
        exchange.on_message(RunMessage.LINES, self._on_lines)
        exchange.on_message(RunMessage.FOLLOW, self._on_follow)
        exchange.on_message(RunMessage.REPORT, self._on_report)
        self._exchange = exchange
        providers = Providers()
        transfers = Transfers(exchange, providers, limits=PIECE_LIMITS)
        await open_reach(host, settings.reach)
        self._progress.listening(host.peer_id, host.addresses)
        exchange.on_peer_opened(self._note_leader)
        others = [
            address
            for address in settings.bootstrap
            if parse_peer_address(address)[1] != host.peer_id  # as of a leader of before
        ]
        await stack.enter_async_context(keep_coordinators([exchange], others))
        is_known = self.has_all
        if is_known:
            self._leader = self.copy.leader
            run = self._directory.read_run()
            with _writing(self._directory):
                config = (self._directory.path / _MODEL).read_text(encoding="utf-8")
            manifest = read_manifest(self._directory.data)
        else:
            followed = await self._follow(host, exchange)
            run, config = self._take_over_facts(followed), followed.config
            manifest = await self._fetch_data(transfers, followed)
        trainer = await self._open_trainer(stack, run, config, manifest)
        self._is_ready = True
        # A leader that this deputy was with before has a while to be found again.
        self._heard_at = trio.current_time() + (_RETURN if is_known else 0.0)
        self._progress.say("copies the run, and leads when its leader is silent")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_following, host, exchange)
            nursery.start_soon(self._keep_files, transfers, run.checkpoints.keep)
            term = await self._stand_by(exchange)
            nursery.cancel_scope.cancel()
        if term is None:
            self._progress.say("the run has ended")
            return None
        journal = await self._take_over(term)
        stack.callback(journal.close)
        opened = Opened(journal, host, exchange, providers, transfers, trainer, self._reports)
        return await lead(
            _leading(settings, self._directory, is_new=False), self._progress, opened=opened
        )

    @property
    def has_all(self) -> bool:
        """Whether all is here that it takes to lead, as it was begun before."""
        directory = self._directory
        here = (directory.run_file, directory.path / _MODEL, directory.data / _COMPLETE)
        return bool(self.copy.run) and all(path.is_file() for path in here)

    def _note_leader(self, peer_id: str, hello: Hello) -> None:
        if hello.role != "coordinator":
            return
        if peer_id not in self._leaders:
            self._leaders.append(peer_id)
        if peer_id == self._leader:
            self._is_new_stream = True
        self._leader_came.set()

    # Following

    async def _follow(self, host: Host, exchange: Exchange) -> Followed:
        """Ask leaders that are there, until one takes this deputy."""
        self._progress.say("looking for the leader of the run")
        while True:
            came = self._leader_came.next
            if (followed := await self._ask_all_to_follow(host, exchange)) is not None:
                return followed
            with trio.move_on_after(_FOLLOW_AGAIN if self._leaders else 60.0):
                await came.wait()

    async def _ask_all_to_follow(self, host: Host, exchange: Exchange) -> Followed | None:
        """Ask those that are there, the leader of before first; what the one says that takes this deputy."""
        for peer_id in sorted(self._leaders, key=lambda each: each != self._leader):
            if not self._may_ask_to_follow or not host.is_connected(peer_id):
                continue
            if (followed := await self._ask_to_follow(host, exchange, peer_id)) is not None:
                self._leader, self._heard_at = peer_id, trio.current_time()
                self.copy.follow(followed.num_bytes)
                self._sync_candidate()
                return followed
        return None

    @property
    def _may_ask_to_follow(self) -> bool:
        since = self._asks_since
        is_patient = since is not None and trio.current_time() - since >= _PATIENCE
        return self._candidate.may_follow(is_patient)

    async def _ask_to_follow(self, host: Host, exchange: Exchange, peer_id: str) -> Followed | None:
        self.copy.forget_rest()
        try:
            followed = await self._send_follow(host, exchange, peer_id, self.copy.place)
        except PeerRefusedError as exc:
            if not self.copy.num_bytes:
                raise ConfigurationError(f"the leader has no such deputy: {exc.text}") from exc
            return await self._follow_from_the_beginning(host, exchange, peer_id, exc)
        if followed is None or not self._may_follow(followed.term) or not self._copies_again():
            return None
        return followed

    def _copies_again(self) -> bool:
        """Give up a term that it asks for, as a leader takes it; whether it copies from here on."""
        if self._candidate.asked is None:
            return True
        if not self._may_ask_to_follow:
            return False  # most have promised meanwhile
        self._give_up()
        self._progress.warn(
            "the leader is there, and most members promise nothing: this deputy copies the run again"
        )
        return True

    def _give_up(self) -> None:
        self._candidate.give_up()
        self._sync_candidate()
        self._asks_since, self._said = None, ""

    def _may_follow(self, term: int) -> bool:
        """Whether a leader in this term is not one of before."""
        return term >= self._sitting.term and self._candidate.follows(term)

    async def _follow_from_the_beginning(
        self, host: Host, exchange: Exchange, peer_id: str, refused: PeerRefusedError
    ) -> Followed | None:
        """Lay the copy aside where another leads since: what it has beyond the other's journal nobody has followed."""
        self._takes_none = True
        try:
            followed = await self._send_follow(host, exchange, peer_id, Place())
            if followed is None or not self._may_follow(followed.term):
                return None
            if followed.term == self._sitting.term:
                raise ConfigurationError(f"the leader has no such deputy: {refused.text}")
            if not self._copies_again():
                return None
            self._lay_copy_aside()
            return followed
        finally:
            self._takes_none = False

    def _lay_copy_aside(self) -> None:
        path, term = self._directory.journal, self._sitting.term
        aside = path.with_name(f"{path.name}{_ASIDE}{term}")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}{_ASIDE}{term}.{number}")
        self.copy.close()
        try:
            path.rename(aside)
        except OSError as exc:
            raise ConfigurationError(f"{path} cannot be laid aside: {exc.strerror}") from exc
        self._sitting = Sitting()
        self._candidate.lay_aside(term)
        self.copy = JournalCopy(path, self._copied_entry)
        self._sync_candidate()
        self._progress.warn(
            f"the journal has lines that nobody has followed: it is {aside.name} from here on, and the run is copied "
            "from its beginning"
        )

    async def _send_follow(
        self, host: Host, exchange: Exchange, peer_id: str, place: Place
    ) -> Followed | None:
        """Ask a leader; None where it does not take this deputy yet, or does not answer.

        Raises:
            PeerRefusedError: it never takes it with such a copy.
            ConfigurationError: it leads another run.
        """
        num_bytes = self.copy.num_bytes if place.line else 0
        follow = Follow(
            self.copy.run if place.line else b"",
            place.line,
            place.digest,
            num_bytes,
            host.addresses[:16],
        )
        request = TensorMessage(
            RunMessage.FOLLOW, request_id=new_request_id(), data=follow.encode()
        )
        try:
            answer = await exchange.request(
                peer_id, request, RunMessage.FOLLOWED, timeout=_FOLLOW_TIMEOUT
            )
        except PeerRefusedError as exc:
            if exc.code == ErrorCode.NOT_SUPPORTED:
                raise
            self._say_once(f"the leader takes no deputy yet: {exc.text}")
            return None
        except NeuroGridError as exc:
            logger.info("the leader does not answer: %s", exc)
            return None
        followed = Followed.decode(answer.data)
        if self.copy.run not in (b"", followed.run):
            raise ConfigurationError(
                f"{self._directory.path} has a copy of run {self.copy.run.hex()[:8]}, and this leader has "
                f"{followed.run.hex()[:8]}: name another directory"
            )
        return followed

    async def _keep_following(self, host: Host, exchange: Exchange) -> None:
        """Ask again, where the leader was started again and does not know who copies, or another one leads; and where
        it is heard, and this deputy asks for a term all the same."""
        while True:
            await trio.sleep(_FOLLOW_AGAIN)
            is_silent = trio.current_time() - self._heard_at >= _FOLLOW_AGAIN
            is_asking = self._candidate.asked is not None
            if is_silent or is_asking or self._is_new_stream:
                self._is_new_stream = False
                await self._ask_all_to_follow(host, exchange)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._progress.say(text)

    # What it takes to lead

    def _take_over_facts(self, followed: Followed) -> RunFile:
        run = self._directory.placed(parse_kept_run_file(followed.run_file))
        self._directory.write_run(followed.run_file)
        with _writing(self._directory):
            (self._directory.path / _MODEL).write_text(followed.config, encoding="utf-8")
        return run

    def _sources(self) -> list[str]:
        """Peers that may have what the leader has: the leader first, then others that may lead by now."""
        connected = [each for each in self._leaders if self._exchange.host.is_connected(each)]
        return sorted(connected, key=lambda each: each != self._leader) or [self._leader]

    async def _fetch_data(self, transfers: Transfers, followed: Followed) -> Manifest:
        """Copy the data, as far as they are not here."""
        data = self._directory.data
        manifest = await _patiently(
            lambda: fetch_manifest(transfers, followed.manifest, self._sources(), _FETCH_TIMEOUT)
        )
        with _writing(self._directory):
            data.mkdir(parents=True, exist_ok=True)
            (data / MANIFEST_NAME).write_bytes(manifest.encode())
        infos = [
            info
            for info in (*manifest.slices, *manifest.held_out)
            if not slice_path(data, info).exists()
        ]
        if infos:
            self._progress.say(f"copying the data: {len(infos):,} slices")
        limiter = trio.CapacityLimiter(_FETCHES)

        async def fetch(blob_id: bytes, path: Path) -> None:
            async with limiter:
                await _patiently(
                    lambda: fetch_file(
                        transfers, blob_id, self._sources(), path, timeout=_FETCH_TIMEOUT
                    )
                )

        async with trio.open_nursery() as nursery:
            for info in infos:
                nursery.start_soon(fetch, info.blob_id, slice_path(data, info))
        with _writing(self._directory):
            (data / _COMPLETE).touch()
        return manifest

    async def _open_trainer(
        self, stack: AsyncExitStack, run: RunFile, config: str, manifest: Manifest
    ) -> Trainer:
        self._progress.say("starting the model")
        told = trainer_settings(
            run,
            config,
            total_steps=rules_of(run, manifest).total_steps,
            threads=self._settings.num_threads or 0,
        )
        return await stack.enter_async_context(open_trainer(told, checkpoint=None))

    # Copying

    async def _on_follow(self, message: TensorMessage) -> None:
        if self._term is not None:
            return  # whoever leads answers
        raise RequestRefusedError(
            "this peer copies the run itself",
            code=ErrorCode.BUSY,
            retry_after=_FOLLOW_AGAIN,
            is_expected=True,
        )

    def _on_report(self, message: TensorMessage) -> None:
        """Keep a report of a member that has promised, until this deputy leads: the next one may be a second away."""
        if self._term is None and any(
            member.peer == message.from_peer for member in self._sitting.members
        ):
            self._reports[sender_of(message)] = message

    async def _on_lines(self, message: TensorMessage) -> None:
        lines = Lines.decode(message.data)
        sender = sender_of(message)
        if self._takes_none:
            raise RequestRefusedError(
                "this deputy has yet to make room for the journal",
                code=ErrorCode.BUSY,
                retry_after=_FOLLOW_AGAIN,
                is_expected=True,
            )
        if self._term is None and sender not in (self._leader, self.copy.leader):
            raise RequestRefusedError(
                "this deputy copies another leader's journal", code=ErrorCode.UNAUTHORIZED
            )
        if lines.files:
            self._files = dict(zip(lines.files, lines.blobs, strict=True))
        if self._term is None and self._is_ready and lines.run == (self.copy.run or lines.run):
            is_of_now = self._may_follow(lines.term)
            if is_of_now:
                self._heard_at = trio.current_time()
            is_next = lines.offset == self.copy.num_received
            if is_of_now and is_next and self._candidate.asked is None:
                self._take(lines)
            self._came.set()
        copied = Copied(
            run=lines.run,
            line=self.copy.place.line,
            num_bytes=self.copy.num_received,
            term=self._term or 0,
            leader=self._identity.peer_id if self._term is not None else "",
        )
        answer = TensorMessage(
            RunMessage.COPIED, request_id=message.request_id, data=copied.encode()
        )
        await self._exchange.send(sender, answer)

    def _take(self, lines: Lines) -> None:
        if lines.data:
            try:
                # At once: nothing may be kept any more when a term is claimed.
                self.copy.take(lines.data)
            except JournalError as exc:
                raise RequestRefusedError(str(exc), code=ErrorCode.NOT_SUPPORTED) from exc
            except ConfigurationError as exc:
                self._failure = exc
                self._came.set()
                raise RequestRefusedError(str(exc), code=ErrorCode.NOT_SUPPORTED) from exc
            finally:
                self._sync_candidate()

    async def _keep_files(self, transfers: Transfers, keep: int) -> None:
        """Have the files that the leader has told of, the newest."""
        said = ""
        forget_unfinished(self._directory)  # of a deputy that was killed
        try:
            while True:
                files, self._files = self._files, None
                while files is not None:
                    try:
                        await fetch_copies(
                            files, self._directory, transfers, self._sources(), keep=keep
                        )
                        files = None
                    except NeuroGridError as exc:
                        if str(exc) != said:
                            said = str(exc)
                            logger.info("the leader's files are not here: %s", exc)
                        # What was too slow has come in part, and the leader gives it until another is begun with.
                        if not isinstance(exc, ResponseTimeout):
                            files, self._files = None, self._files or files
                        await trio.sleep(_FOLLOW_AGAIN)
                await trio.sleep(_FOLLOW_AGAIN)
        finally:
            forget_unfinished(self._directory)

    async def _stand_by(self, exchange: Exchange) -> int | None:
        """Copy until the leader is dead; the term in which this deputy leads. None where the run has ended."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._sitting.has_ended and self.copy.is_whole:
                return None
            silence = trio.current_time() - self._heard_at
            # Once it has asked it copies nothing any more, also when the leader is heard again: so it asks on until it
            # leads, is none, or gives up for a leader that takes it.
            is_asking = silence >= _SILENCE or self._candidate.asked is not None
            term = self._candidate.ask() if is_asking else None
            if term is not None:
                self._asks_since = self._asks_since or trio.current_time()
                if not self._candidate.promises:
                    self._say_once(
                        f"nothing has come of the leader for some seconds: asking the members for term {term}"
                    )
                await self._claim_of_all(exchange, term)
                if self._candidate.leads:
                    return term
                if self._candidate.is_dropped:
                    self._give_up()
                    self._is_new_stream = True
                    self._progress.warn(
                        "the members have no such deputy any more: the run goes on without this one, which copies "
                        "it again"
                    )
            with trio.move_on_after(_CLAIM_AGAIN):
                await self._came.wait()
                await trio.sleep(_CLAIM_AGAIN / 5)

    # Claims

    async def _claim_of_all(self, exchange: Exchange, term: int) -> None:
        """Ask the members that have not promised yet; until most have, or none of them answers any more."""
        place = self._candidate.place
        asked = {
            member.peer
            for member in self._candidate.members
            if member not in self._candidate.promises and exchange.host.is_connected(member.peer)
        }
        async with trio.open_nursery() as nursery:

            async def claim(peer_id: str) -> None:
                await self._claim(exchange, peer_id, term, place)
                if self._candidate.leads:
                    nursery.cancel_scope.cancel()

            for peer_id in asked:
                nursery.start_soon(claim, peer_id)

    async def _claim(self, exchange: Exchange, peer_id: str, term: int, place: Place) -> None:
        said = Claim(self.copy.run, term, place.line, place.digest)
        request = TensorMessage(RunMessage.CLAIM, request_id=new_request_id(), data=said.encode())
        try:
            answer = await exchange.request(
                peer_id, request, RunMessage.CLAIMED, timeout=_CLAIM_TIMEOUT
            )
            claimed = Claimed.decode(answer.data)
        except NeuroGridError as exc:
            logger.info("%s promises nothing: %s", peer_id, exc)
            return
        standing = Standing(
            claimed.term,
            claimed.leader,
            claimed.number,
            claimed.deputy,
            Place(claimed.line, claimed.digest) if claimed.line else None,
        )
        promised = promise_bytes(
            self.copy.run, claimed.term, claimed.leader, claimed.incarnation, place
        )
        if standing.place == place and not is_signed_by(peer_id, claimed.signature, promised):
            logger.warning("%s has not signed what it promises", peer_id)
            return
        member = Occupant(peer_id, claimed.incarnation)
        self._candidate.answered(member, standing, claimed.signature)

    async def _take_over(self, term: int) -> Journal:
        promises: list[Promise] = list(self._candidate.promises.values())
        entry = LedEntry(
            term,
            self._identity.peer_id,
            tuple((each.member.peer, each.member.incarnation, each.signature) for each in promises),
        )
        self.copy.close()
        journal = await trio.to_thread.run_sync(
            Journal.take_over, self._directory.journal, self._identity, entry
        )
        self._term = term
        self._progress.warn(
            f"this deputy leads from here on, in term {term}, by the promises of {len(promises)} of "
            f"{len(self._candidate.members)} members"
        )
        return journal


@contextmanager
def _writing(directory: RunDirectory) -> Iterator[None]:
    """Say what becomes of a deputy whose disk is full, or not to be written to.

    Raises:
        ConfigurationError: it is.
    """
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(
            f"{directory.path}: the run cannot be copied there: {exc.strerror or exc}. Make room, and begin again"
        ) from exc


def _laid_aside(journal: Path) -> int | None:
    """The greatest term of copies that were laid aside here."""
    found = [
        int(path.name.partition(_ASIDE)[2].partition(".")[0])
        for path in journal.parent.glob(f"{journal.name}{_ASIDE}[0-9]*")
    ]
    return max(found, default=None)


async def _patiently(fetch: Callable[[], Awaitable[T]]) -> T:
    """Fetch something, again while the leader does not give it.

    Raises:
        TransportError: it has not within `_FETCH_TIMEOUT` seconds.
    """
    until = trio.current_time() + _FETCH_TIMEOUT
    while True:
        try:
            return await fetch()
        except (TransportError, PeerRefusedError) as exc:
            if trio.current_time() >= until:
                raise
            logger.info("%s; trying again", exc)
            await trio.sleep(_FOLLOW_AGAIN)
