"""The weights of one member of a witnessed run: steps that count, steps that do not, and pieces from others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from neurogrid.errors import CheckpointError, NeuroGridError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.data.blobs import Providers, SliceCache
from neurogrid.training.data.own_slices import OwnSlices
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.witnessed.own_weights import OwnWeights
from neurogrid.training.members.witnessed.witnessed_part import _Member
from neurogrid.training.runs.outer_state import digest_of
from neurogrid.training.runs.run_file import DistroSection, parse_run_file
from neurogrid.training.wire.runs import EpochReport, run_table
from tests.unit.full_disk import full_disk

LAYOUT = Layout(("a", "b"), ((96, 64), (5000,)))
SECTION = DistroSection(top_k=4, chunk=32)
RUN = parse_run_file(
    '[model]\nconfig = "x"\n[data]\npath = "x"\n[outer]\nmethod = "distro"\n[stop]\nrounds = 9\n'
)


def random(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYOUT.num_elements, generator=generator)


class Member:
    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        exchange = Exchange(host, run_table())
        providers, offered = Providers(), OfferedFiles()
        transfers = Transfers(exchange, providers)
        providers.providers.append(offered)
        slices = SliceCache(transfers, directory / "s", 2**20)
        blobs = MemberBlobs(transfers, slices, OwnSlices(), offered)
        self.shared = random(0)
        self.weights = OwnWeights(LAYOUT, self.shared, SECTION, blobs, directory / "pieces")
        self.weights.step = 0
        self.weights.digest = digest_of(self.shared)


async def test_two_members_and_what_is_undone(tmp_path: Path) -> None:
    """Where the one's result does not count, its samples may come again: it has the momentum of before."""
    async with open_memory_network() as network, network.open_host() as a, network.open_host() as b:
        one, other = Member(a, tmp_path / "a").weights, Member(b, tmp_path / "b").weights
        first = [one.encode(random(1), 0.01), other.encode(random(2), 0.01)]
        for each in (one, other):
            each.apply(first, 0.01, has_own=True)
        assert one.digest == other.digest == digest_of(one.distro.theta)
        (momentum,) = (vector.clone() for vector in other.distro.own_vectors())
        sent, lost = one.encode(random(3), 0.01), other.encode(random(4), 0.01)
        one.apply([sent], 0.01, has_own=True)
        other.apply([sent], 0.01, has_own=False)
        assert one.digest == other.digest
        assert (one.step, other.step) == (2, 2)
        assert torch.equal(other.distro.own_vectors()[0], momentum)
        assert not other.is_under_way
        again = other.encode(random(4), 0.01)
        assert torch.equal(again.positions, lost.positions)
        other.take_back()
        other.take_back()
        assert torch.equal(other.distro.own_vectors()[0], momentum)


async def test_pieces_come_from_several(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        hosts = [await stack.enter_async_context(network.open_host()) for _ in range(4)]
        leader, one, two, new = [Member(h, tmp_path / str(n)) for n, h in enumerate(hosts)]
        for each in (leader, one, two):
            result = each.weights.encode(random(7), 0.5)
            each.weights.apply([result], 0.5, has_own=True)
            await each.weights.offer()
            await new.host.connect(each.host.addresses[0])
        told = one.weights
        assert told.blobs == two.weights.blobs
        with trio.fail_after(60):
            came = await new.weights.fetch(
                told.names,
                told.blobs,
                [one.host.peer_id, two.host.peer_id],
                leader.host.peer_id,
                step=1,
                digest=told.digest,
                first=1,
                timeout=30.0,
            )
        assert came.keys() == {one.host.peer_id, two.host.peer_id}
        assert torch.equal(new.shared, told.distro.theta)
        assert (new.weights.step, new.weights.digest) == (1, told.digest)
        assert new.weights.blobs == told.blobs
        # It gives them on, and nobody gives what is withdrawn.
        one.weights.withdraw()
        two.weights.withdraw()
        leader.weights.withdraw()
        last = Member(await stack.enter_async_context(network.open_host()), tmp_path / "last")
        await last.host.connect(new.host.addresses[0])
        with trio.fail_after(60):
            await last.weights.fetch(
                *(told.names or new.weights.names, new.weights.blobs, [new.host.peer_id]),
                leader.host.peer_id,
                step=1,
                digest=new.weights.digest,
                first=0,
                timeout=30.0,
            )
        assert last.weights.digest == new.weights.digest


async def test_pieces_that_are_other_weights_are_not_taken(tmp_path: Path) -> None:
    async with open_memory_network() as network, network.open_host() as a, network.open_host() as b:
        one, new = Member(a, tmp_path / "a"), Member(b, tmp_path / "b")
        await b.connect(a.addresses[0])
        one.weights.distro.theta.add_(1.0)
        await one.weights.offer()
        before, digest = new.shared.clone(), new.weights.digest
        given = {"step": 3, "digest": bytes(32), "first": 0, "timeout": 0.5}
        names, blobs = one.weights.names, one.weights.blobs
        with pytest.raises(CheckpointError, match="not the weights that they were to be"):
            await new.weights.fetch(names, blobs, [], a.peer_id, **given)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="these are not the pieces of"):
            await new.weights.fetch(names[1:], blobs[1:], [], a.peer_id, **given)  # type: ignore[arg-type]
        one.weights.withdraw()
        with pytest.raises(NeuroGridError):
            await new.weights.fetch(names, blobs, [], a.peer_id, **given)  # type: ignore[arg-type]
        assert torch.equal(new.shared, before)
        assert (new.weights.step, new.weights.digest, new.weights.names) == (0, digest, ())


async def test_weights_that_cannot_be_written_for_others_are_said(tmp_path: Path) -> None:
    """The disk is full, and the member has them all the same; what of them was written takes no room there."""
    async with open_memory_network() as network, network.open_host() as host:
        weights = Member(host, tmp_path).weights
        with (
            full_disk(),
            pytest.raises(CheckpointError, match=r"step-0: files for others .* make room"),
        ):
            await weights.offer()
        assert (weights.step, weights.names, weights.blobs) == (0, (), ())
        assert not (tmp_path / "pieces" / "step-0").exists()
        # A member stays one, and says that it has them.
        told: list[str] = []
        part: Any = SimpleNamespace(
            _run_file=RUN,
            _start=SimpleNamespace(total_steps=9),
            _auditing=None,
            _epoch_report=EpochReport(bytes(16), 1, "training"),
            _tell=lambda: None,
            _note=lambda state, **more: told.append(state),
        )
        nothing: Any = None
        member = _Member(part, nothing, weights, nothing, nothing)
        with full_disk():
            await member._cool_down()
            await member._cool_down()
        assert told == ["kept", "kept"]
        assert (part._epoch_report.has_weights, part._epoch_report.digest) == (True, weights.digest)
        assert part._epoch_report.names == ()
        weights.step = 1
        await member._cool_down()
        assert part._epoch_report.names == weights.names != ()
