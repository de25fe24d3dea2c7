"""A worker that is asked to take part in a run: what it refuses, and what it has then."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neurogrid.errors import PeerRefusedError
from neurogrid.p2p import TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.members.service import MemberService
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.wire.runs import Ask, Offer, RunMessage, Start, run_table

RUN = parse_run_file('[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 1\n')


@pytest.mark.parametrize(
    ("run_file", "config", "said"),
    [
        (RUN.text() + "newer = 1\n", "{}", 'has no key "newer"'),
        ("[model", "{}", "run.toml"),
        (RUN.text(), "[]", "the config is none: it is no object"),
        (RUN.text(), "{", "the config is none"),
        (RUN.text(), "[" * 200_000, "the config is none"),
    ],
)
async def test_a_run_that_is_not_known_is_refused(
    tmp_path: Path, run_file: str, config: str, said: str
) -> None:
    """As one of a newer leader may be; the worker is free for others then."""
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as host,
            network.open_host() as other,
        ):
            settings = MemberSettings(memory=2**30, storage=2**30)
            service = MemberService(host, settings, tmp_path)
            leader = Exchange(other, run_table(), role="coordinator")
            await other.connect(host.addresses[0])
            await leader.open(host.peer_id)

            async def ask(code: RunMessage, data: bytes, answer: RunMessage) -> TensorMessage:
                message = TensorMessage(code, request_id=new_request_id(), data=data)
                return await leader.request(host.peer_id, message, answer, timeout=10)

            asked = await ask(RunMessage.ASK, Ask(bytes(16)).encode(), RunMessage.OFFER)
            start = Start(
                run=bytes(16),
                lease=Offer.decode(asked.data).lease,
                seat=0,
                run_file=run_file,
                config=config,
                kind="causal-lm",
                manifest=bytes(32),
                num_parameters=1,
            )
            with pytest.raises(PeerRefusedError) as refused:
                await ask(RunMessage.START, start.encode(), RunMessage.STARTED)
            assert refused.value.code == ErrorCode.CONFIG_INVALID
            assert said in refused.value.text
            assert service._leases.running(trio.current_time()) is None
            assert service._starting is None
