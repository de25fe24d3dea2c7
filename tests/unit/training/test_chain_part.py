"""A member that is a stage: whose messages can end what it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neurogrid.errors import (
    CheckpointError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
)
from neurogrid.p2p import ErrorCode, TensorMessage
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.members.chain_part import ChainPart
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.wire.runs import RunMessage, StageOrder, Start

RUN_FILE = '[model]\nconfig = "x"\n[data]\npath = "x"\n[layout]\nstages = 2\n[stop]\nsteps = 4\n'


def part_of(blobs: Any = None) -> ChainPart:
    """A part in a run of two stages, without a network."""
    start = Start(
        run=bytes(16),
        lease=1,
        seat=1,
        run_file=RUN_FILE,
        config="{}",
        kind="causal-lm",
        manifest=bytes(32),
        num_parameters=1,
        total_steps=4,
    )
    host: Any = SimpleNamespace(addresses=(), peer_id="own")
    nothing: Any = None
    return ChainPart(host, nothing, "leader", start, blobs, MemberSettings(), lambda: None)


@pytest.mark.parametrize("sender", ["leader", "neighbour", "stranger"])
def test_only_those_that_something_is_waited_for_from_end_a_step(sender: str) -> None:
    """Anybody in the cluster may send a tensor that is refused."""
    part = part_of()
    faults: list[NeuroGridError] = []

    def refuse(code: object, sender: str, message: TensorMessage) -> None:
        raise RemoteProtocolError("it is not due")

    stage: Any = SimpleNamespace(contacts=frozenset({"neighbour"}), take=refuse, fail=faults.append)
    part._stage = stage
    with pytest.raises(RemoteProtocolError, match="not due"):
        part.take_message(TensorMessage(RunMessage.HIDDEN, data=b"", from_peer=sender))
    assert bool(faults) == (sender != "stranger")


async def test_a_state_that_was_written_in_vain_is_gone_with_the_next_order(tmp_path: Path) -> None:
    """As where the disk was full, or a neighbour was lost while it was written: another one would find no room."""
    offered = OfferedFiles()
    part = part_of(SimpleNamespace(offered=offered))
    files = [tmp_path / f"chain-{n}" / f"step-{n}" / "layer.0.safetensors" for n in (1, 2, 3)]
    blobs = []
    for number, path in enumerate(files):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes([number]))
        # Of the last one it had not come to that.
        blobs.append(await offered.offer(path) if number < 2 else b"")
    part._kept = [files[0]]

    class Settled:
        async def settle(self) -> None:
            pass

        def is_at(self, settings: object, step: int) -> bool:
            return False

    order = StageOrder(bytes(16), 4, 2, 0, ("own", "other"), ("", ""), (0, 1, 2))
    process: Any = Settled()
    with pytest.raises(CheckpointError, match="is to be here"):
        await part._follow(order, process, tmp_path)
    assert [path.is_file() for path in files] == [True, False, False]
    assert await offered.provide("other", blobs[0]) is not None
    assert await offered.provide("other", blobs[1]) is None


async def test_a_piece_is_asked_for_again_where_its_leader_is_busy(tmp_path: Path) -> None:
    """It serves 32 members at once, and a run may have more: five failures would be the end of the others."""
    asked: list[str] = []

    class Busy:
        async def fetch_blob(self, peers: list[str], *given: object, **more: object) -> Any:
            await trio.lowlevel.checkpoint()
            asked.extend(peers)
            if len(asked) == 1:
                raise PeerRefusedError("it is busy", code=ErrorCode.BUSY, text="")
            blob = SimpleNamespace(path=None, data=b"weights")
            return SimpleNamespace(blob=blob, peer_id="leader")

    part = part_of(SimpleNamespace(transfers=Busy()))
    pieces = {"names": ("weights.0",), "blobs": (bytes(32),)}
    order = StageOrder(bytes(16), 4, 0, 0, ("own", "other"), ("", ""), (0, 1, 2), **pieces)
    with trio.fail_after(10):
        found = await part._fetch(order, tmp_path)
    assert {name: path.read_bytes() for name, path in found.items()} == {"weights.0": b"weights"}
    assert asked == ["leader", "leader"]
