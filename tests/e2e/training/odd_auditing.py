"""Workers that lie in a witnessed run with audits.

Run as a program with what is odd about it, and the options of `neurogrid-worker`:

    other    it trains on other samples than it was given, and claims what came of it
    random   it claims and sends a random gradient
    accuser  it says of each claim that it looks at, that it is false
    cover    it says of each claim that it looks at, that it holds
    forger   it sends findings in the name of others, and about claims at which it was not to look
    silent   it gives nobody its momenta
    mute     it commits to results without claims
    twofold  it signs two claims of each result: one for the leader, and one for all others
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neurogrid.cli.commands.worker import main
from neurogrid.errors import TransportError
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.checks import Finding, open_claim, sign_claim, sign_finding
from neurogrid.training.members.witnessed.auditing import Auditing
from neurogrid.training.members.witnessed.round_exchange import RoundExchange
from neurogrid.training.members.witnessed.witnessed_part import _Member
from neurogrid.training.wire.runs import RoundCommitment, RoundFinding, RunMessage, SampleRange

PROGRAM = (sys.executable, str(Path(__file__)))

_gradient = _Member._gradient
_work = Auditing.work
_sign = Auditing.sign
_tell = RoundExchange._tell


async def gradient_of_others(member: Any, told: Any, own: Any, work: Any) -> torch.Tensor:
    """Of the first samples of all, again and again."""
    number = sum(each.stop - each.start for each in work.ranges)
    return await _gradient(
        member, told, own, replace(work, ranges=(SampleRange(0, 0, min(number, 8)),))
    )


async def random_gradient(member: Any, told: Any, own: Any, work: Any) -> torch.Tensor:
    """As long as the right one."""
    right = await _gradient(member, told, own, work)
    noise = torch.randn_like(right)
    return noise * (right.norm() / noise.norm())


def accusation(auditing: Any, finding: Finding) -> Finding:
    """Of what was found to hold."""
    return replace(finding, kept=bytes(32), excess=7.0)


def acquittal(auditing: Any, finding: Finding) -> Finding:
    """Of whatever was found."""
    return replace(finding, excess=0.0)


async def work_and_forge(auditing: Any, *compute: Any) -> None:
    """Findings against all that claimed, in all names, and one that is signed by nobody, before what is due."""
    rounds = auditing._rounds._rounds.values()
    # Of rounds that were drawn: about a claim at which it is to look, a false finding is another thing.
    for round_ in [each for each in rounds if each.agreed is not None and each.audits is not None]:
        for about, (claim, signed) in round_.claims.items():
            finding = Finding(claim.digest(), bytes(32), bytes(32), bytes(32), 9.0)
            own = sign_finding(finding, auditing._identity)
            is_drawn = any(
                (each.seat, each.auditor) == (about, auditing._own[0])
                for each in round_.audits or ()
            )
            for seat, form in ((about + 1, own), (auditing._own[0], b"" if is_drawn else own)):
                if seat == about or not form:
                    continue
                said = RoundFinding(auditing._rules.run, seat, *round_.key, about, signed, form)
                with suppress(TransportError):
                    await auditing._exchange.send(
                        auditing._leader, TensorMessage(RunMessage.FINDING, data=said.encode())
                    )
    await _work(auditing, *compute)


async def offer_nothing(auditing: Any, round_: Any) -> None:
    """As if it had not been drawn."""


def claim_nothing(auditing: Any, told: Any, result: bytes) -> bytes:
    """As of a program without audits."""
    return b""


def sign_twice(auditing: Any, told: Any, result: bytes) -> bytes:
    """The right claim for others; beside it, one of another momentum."""
    right = _sign(auditing, told, result)
    claim = open_claim(right, auditing._identity.peer_id)
    auditing.second = sign_claim(replace(claim, sent=bytes(32)), auditing._identity)
    return right


async def tell_other(exchange: Any, round_: Any, peer: str, message: Any, size: int) -> None:
    """The leader is told the other claim."""
    if peer == exchange._leader and message.msg_type is RunMessage.COMMITMENT:
        said = RoundCommitment.decode(message.data)
        if said.claim:
            said = replace(said, claim=exchange._auditing.second)
            message = TensorMessage(RunMessage.COMMITMENT, data=said.encode())
    await _tell(exchange, round_, peer, message, size)


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "other":
        _Member._gradient = gradient_of_others  # type: ignore[method-assign]
    elif kind == "random":
        _Member._gradient = random_gradient  # type: ignore[method-assign]
    elif kind == "accuser":
        Auditing.said_of = accusation  # type: ignore[method-assign]
    elif kind == "cover":
        Auditing.said_of = acquittal  # type: ignore[method-assign]
    elif kind == "forger":
        Auditing.work = work_and_forge  # type: ignore[method-assign]
    elif kind == "silent":
        Auditing._offer_momenta = offer_nothing  # type: ignore[method-assign]
    elif kind == "twofold":
        Auditing.sign = sign_twice  # type: ignore[method-assign]
        RoundExchange._tell = tell_other  # type: ignore[method-assign]
    elif kind == "mute":
        Auditing.sign = claim_nothing  # type: ignore[method-assign]
    sys.exit(main())
