"""A coordinator of two stages, in a process of its own: generates, and stops half-way for something to happen to it.

    python -m tests.e2e.namespaces.generating_peer '{"listen": [...], "peers": [...]}'

First `{"peer": ID, "addresses": [...]}`, when every worker holds layers. A line `undisturbed` on its standard input is
answered by `{"tokens": [...]}`. With `disturbed STAGE` there is `{"worker": ID}` half-way, the worker of that stage,
and it waits for another line; then the tokens as before, after `{"suspected": ID, "health": HEALTH, "why": TEXT}` as
it comes to that. `settled` is answered when no worker is suspected any more. It leaves when its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.inference.board.progress import Progress
from tests.e2e.namespaces.peer_process import DEADLINE

PROMPT = "A function definition"
NUM_TOKENS, MIDDLE = 40, 12


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


class Watch(Progress):
    """Says who is suspected, as the status has it at that moment."""

    coordinator: Coordinator

    def suspected(self, peer_id: str, why: str) -> None:
        peer = self.coordinator.status().peers[peer_id]
        say(suspected=peer_id, health=peer.health, why=peer.suspicion)


async def worker_of(coordinator: Coordinator, stage: int) -> str:
    with await coordinator.selector.select(timeout=DEADLINE) as selection:
        return selection.stages[stage].peer_id


async def main(options: dict[str, Any]) -> None:
    watch = Watch()
    settings = CoordinatorSettings(
        listen=tuple(options["listen"]),
        peers=tuple(options["peers"]),
        stages=2,
        min_peers=len(options["peers"]),
        max_seq_len=256,
        prefix_reuse=False,
    )
    async with open_coordinator(settings, progress=watch) as coordinator:
        watch.coordinator = coordinator
        prompt = coordinator.model.tokenizer.encode(PROMPT)
        while len(coordinator.fleet.holdings) < len(options["peers"]):
            await trio.sleep(0.05)
        say(peer=coordinator.host.peer_id, addresses=coordinator.host.addresses)
        lines = trio.wrap_file(sys.stdin)
        while line := (await lines.readline()).strip():
            request, _, stage = line.partition(" ")
            if request == "settled":
                while any(peer.suspicion for peer in coordinator.status().peers.values()):
                    await trio.sleep(0.05)
                say(settled=True)
                continue
            worker = await worker_of(coordinator, int(stage)) if stage else None
            tokens: list[int] = []
            async for token in coordinator.generate(prompt, max_tokens=NUM_TOKENS):
                tokens.append(token)
                if worker is not None and len(tokens) == MIDDLE:
                    say(worker=worker)
                    await lines.readline()
            say(tokens=tokens)


trio.run(main, json.loads(sys.argv[1]))
