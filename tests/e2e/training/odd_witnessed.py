"""Workers that take part in a witnessed run as nobody should, or too slowly.

Run as a program with what is odd about it, and the options of `neurogrid-worker`:

    cold     it never has the weights that an epoch begins with
    garbage  what it commits itself to is no result
    forger   it commits to results in the name of another member, too, and bears witness in that one's name
    liar     it commits itself to two results of a round
    whisperer  the same, and tells the second one to another member alone
    mortal   it is killed when it has trained in a round of three, and has yet to commit itself
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from neurogrid.cli.commands.worker import main
from neurogrid.errors import TransportError
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.members.witnessed.own_weights import OwnWeights
from neurogrid.training.members.witnessed.round_exchange import RoundExchange
from neurogrid.training.runs.signatures import sign
from neurogrid.training.wire.runs import RoundCommitment, RoundProof, RunMessage
from neurogrid.training.witnessed import Commitment

PROGRAM = (sys.executable, str(Path(__file__)))

_publish = RoundExchange.publish


async def fetch_nothing(*_: Any, **__: Any) -> Any:
    """As of a machine without a line."""
    await trio.sleep_forever()


def encode_garbage(exchange: RoundExchange, coefficients: Any) -> bytes:
    """As long as a result."""
    return b"\xff" * exchange._plan.num_bytes


async def publish_more(
    exchange: RoundExchange, told: Any, seat: int, work: Any, coefficients: Any
) -> bytes:
    """A commitment and a proof in the name of another, before its own."""
    other = next(each for each in told.members if each.seat != seat)
    theirs = next((each for each in told.works if each.seat == other.seat), None)
    said = RoundCommitment(
        exchange._run_id,
        other.seat,
        told.epoch,
        told.round,
        theirs.first_batch if theirs else 0,
        theirs.num_batches if theirs else 0,
        bytes(32),
        sign(exchange._identity, b"anything"),
    )
    witness = RoundProof(
        exchange._run_id,
        other.seat,
        told.epoch,
        told.round,
        bytes(128),
        bytes(128),
        bytes(32),
        sign(exchange._identity, b"anything"),
    )
    for peer, code, data in (
        (exchange._leader, RunMessage.WITNESS, witness.encode()),
        (exchange._leader, RunMessage.COMMITMENT, said.encode()),
        (other.peer, RunMessage.COMMITMENT, said.encode()),
    ):
        with suppress(TransportError):
            await exchange._exchange.send(peer, TensorMessage(code, data=data))
    return await _publish(exchange, told, seat, work, coefficients)


async def publish_twice(
    exchange: RoundExchange, told: Any, seat: int, work: Any, coefficients: Any
) -> bytes:
    """What others have, and another one for the leader."""
    blob_id = await _publish(exchange, told, seat, work, coefficients)
    other = Commitment(seat, told.epoch, told.round, work.first_batch, work.num_batches, bytes(32))
    said = RoundCommitment(
        exchange._run_id,
        seat,
        told.epoch,
        told.round,
        work.first_batch,
        work.num_batches,
        bytes(32),
        sign(exchange._identity, other.signed_bytes(exchange._run_id)),
    )
    await exchange._exchange.send(
        exchange._leader, TensorMessage(RunMessage.COMMITMENT, data=said.encode())
    )
    return blob_id


async def publish_and_whisper(
    exchange: RoundExchange, told: Any, seat: int, work: Any, coefficients: Any
) -> bytes:
    """What all have, and once that is told, another one for one member."""
    blob_id = await _publish(exchange, told, seat, work, coefficients)
    await trio.sleep(0.02)  # the others are told meanwhile; the round may be over soon
    other = Commitment(seat, told.epoch, told.round, work.first_batch, work.num_batches, bytes(32))
    signed = sign(exchange._identity, other.signed_bytes(exchange._run_id))
    works = work.first_batch, work.num_batches, bytes(32), signed
    said = RoundCommitment(exchange._run_id, seat, told.epoch, told.round, *works)
    others = [each.peer for each in told.members if each.seat != seat]
    peer = others[told.round % len(others)]  # one of them may be out already
    with suppress(TransportError):
        message = TensorMessage(RunMessage.COMMITMENT, data=said.encode())
        await exchange._exchange.send(peer, message)
    return blob_id


async def publish_until_killed(
    exchange: RoundExchange, told: Any, seat: int, work: Any, coefficients: Any
) -> bytes:
    """The end, where it is one of three; nobody outside could tell that nothing of it is on its way."""
    if len(told.members) > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return await _publish(exchange, told, seat, work, coefficients)


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "cold":
        OwnWeights.fetch = fetch_nothing  # type: ignore[method-assign]
    elif kind == "garbage":
        RoundExchange._encode = encode_garbage  # type: ignore[method-assign]
    elif kind == "forger":
        RoundExchange.publish = publish_more  # type: ignore[method-assign]
    elif kind == "liar":
        RoundExchange.publish = publish_twice  # type: ignore[method-assign]
    elif kind == "whisperer":
        RoundExchange.publish = publish_and_whisper  # type: ignore[method-assign]
    elif kind == "mortal":
        # As above: what is odd about it takes the place of what a worker does.
        RoundExchange.publish = publish_until_killed  # type: ignore[method-assign]
    sys.exit(main())
