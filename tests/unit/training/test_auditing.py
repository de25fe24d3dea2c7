"""Claims that a member computes again: what it says where this takes long, or cannot be done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import TensorMessage
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.transfer import BlobUnavailableError
from neurogrid.training.checks import (
    ClaimRules,
    Made,
    Place,
    Settings,
    make_claim,
    open_finding,
    pack_plainly,
    sign_claim,
    start_of,
    vector_id,
)
from neurogrid.training.members.witnessed.audited_rounds import AuditedRound
from neurogrid.training.members.witnessed.auditing import Auditing
from neurogrid.training.optimizers import Coefficients, Distro
from neurogrid.training.runs.run_file import ChecksSection
from neurogrid.training.wire.runs import Epoch, EpochSeat, RoundFinding, RunMessage

RUN = bytes(range(16))
SETTINGS = Settings(((4, 4),), 2)
RULES = ClaimRules(RUN, SETTINGS, lambda step: 0.1, lambda seat, number: 7, start_of(SETTINGS))
TIMEOUT = 30.0
OWN, ACCUSED = Identity.generate(), Identity.generate()


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps when nothing happens does not see what a thread does."""

    async def run_sync(call: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


def made(gradient: Tensor) -> Made:
    """What the other member claims."""
    distro = Distro(torch.zeros(16), SETTINGS.shapes, top_k=2)
    place = Place(RUN, 1, 1, 1, 1, bytes(32), bytes(32))
    return make_claim(distro, gradient, 0.1, SETTINGS, place)


class Auditor:
    """A member that is to compute a claim again, and what it tells its leader."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.gradient = torch.linspace(-1, 1, 16)
        self.made = made(self.gradient)
        self.found: list[RoundFinding] = []
        self.samples = trio.Event()
        self.samples.set()
        self.error: NeuroGridError | None = None
        material = self.made.material
        self.vectors = {
            vector_id(each): each for each in (material.kept, material.sent) if each is not None
        }
        told = Epoch(RUN, 1, "round_train", round=1, members=(EpochSeat(1, ACCUSED.peer_id, 1),))
        self.round = AuditedRound(told)
        self.round.coefficients[1] = self.made.coefficients
        self.round.weights = directory / "weights"
        self.round.weights.write_bytes(bytes(64))
        fake: Any = SimpleNamespace
        self.auditing = Auditing(
            RULES, ChecksSection(audit=1.0), "leader", OWN, fake(send=self._send),
            fake(transfers=fake(fetch_blob=self._fetch), offered=fake(offer=self._offer, withdraw=len)),
            fake(peers=(ACCUSED.peer_id,)), fake(step=1), fake(encode=self._pack), TIMEOUT, directory,
            self._gather, lambda: None,
        )  # fmt: skip
        self.auditing._own = 0, 1
        self.auditing._rounds._rounds[0] = self.round
        nursery.start_soon(self.auditing.run)

    async def _send(self, peer: str, message: TensorMessage) -> None:
        assert message.msg_type is RunMessage.FINDING
        self.found.append(RoundFinding.decode(message.data))

    async def _fetch(self, peers: list[str], blob_id: bytes, **other: Any) -> Any:
        await trio.sleep(1)
        data = self.vectors[blob_id].numpy().tobytes()
        return SimpleNamespace(blob=SimpleNamespace(path=None, data=data))

    async def _offer(self, path: Path) -> None:
        pass

    async def _gather(self, told: Epoch, seat: int) -> None:
        await self.samples.wait()
        if self.error is not None:
            raise self.error

    @staticmethod
    def _pack(positions: Any, values: Any) -> bytes:
        return pack_plainly(Coefficients(torch.from_numpy(positions), torch.from_numpy(values)))

    async def compute(self, gradient: Callable[..., Awaitable[Tensor]]) -> None:
        """Compute the claim again, as long as there is something to compute."""
        signed = sign_claim(self.made.claim, ACCUSED)
        self.auditing._begin(self.round, 1, self.made.claim, signed, ())
        while self.auditing._jobs:
            await trio.sleep(0.5)
            await self.auditing.work(gradient, self._no_losses)

    async def _no_losses(self, *told: Any) -> list[float]:
        raise AssertionError("nothing is measured")


@asynccontextmanager
async def auditor(directory: Path) -> AsyncIterator[Auditor]:
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            found = Auditor(directory, nursery)
            await trio.testing.wait_all_tasks_blocked()
            yield found
            nursery.cancel_scope.cancel()


async def test_who_computes_for_long_has_not_been_given_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Bits differ, as between processors: what is asked for then is given, and is not late."""
    async with auditor(tmp_path) as member:

        async def slowly(*told: Any) -> Tensor:
            await trio.sleep(2 * TIMEOUT)
            return member.gradient * (1 + 1e-6)

        await member.compute(slowly)
        await trio.testing.wait_all_tasks_blocked()
        (said,) = member.found
        assert said.about == 1
        assert open_finding(said.finding, OWN.peer_id).holds


async def test_a_member_that_gives_nothing_is_told_of(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditor(tmp_path) as member:

        async def never(*told: Any, **how: Any) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(member.auditing._blobs.transfers, "fetch_blob", never)

        async def other(*told: Any) -> Tensor:
            return member.gradient * (1 + 1e-6)

        await member.compute(other)
        await trio.testing.wait_all_tasks_blocked()
        assert [said.finding for said in member.found] == [b""]


@pytest.mark.parametrize(
    "error", [BlobUnavailableError("nobody has it", failures={}), FileNotFoundError("weights")]
)
async def test_a_claim_that_cannot_be_computed_is_left(
    tmp_path: Path, autojump_clock: MockClock, error: Exception
) -> None:
    """The slice was on a disk that is gone, or the round is over by long: that ends no member's part in the run."""
    async with auditor(tmp_path) as member:

        async def fails(*told: Any) -> Tensor:
            raise error

        await member.compute(fails)
        await trio.testing.wait_all_tasks_blocked()
        assert not member.found
        assert not member.auditing.has_work


@pytest.mark.parametrize("is_to_be_had", [True, False])
async def test_samples_of_others_are_waited_for_beside_the_own_rounds(
    tmp_path: Path, autojump_clock: MockClock, is_to_be_had: bool
) -> None:
    """A member that keeps its slice back would have whoever looks at its claim miss one round after the other."""
    async with auditor(tmp_path) as member:
        member.samples = trio.Event()

        async def computed(*told: Any) -> Tensor:
            assert member.samples.is_set()
            return member.gradient

        signed = sign_claim(member.made.claim, ACCUSED)
        member.auditing._begin(member.round, 1, member.made.claim, signed, ())
        for _ in range(100):
            await trio.sleep(1)
            assert not member.auditing.has_work
            await member.auditing.work(computed, member._no_losses)
        if not is_to_be_had:
            member.error = BlobUnavailableError("nobody has it", failures={})
        member.samples.set()
        await trio.testing.wait_all_tasks_blocked()
        await member.auditing.work(computed, member._no_losses)
        await trio.testing.wait_all_tasks_blocked()
        assert len(member.found) == is_to_be_had
        assert not member.auditing._jobs
