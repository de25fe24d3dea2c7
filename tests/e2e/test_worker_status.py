"""What a worker knows of itself while a coordinator uses it, and when that has gone."""

from __future__ import annotations

from pathlib import Path

import trio

from neurogrid import CoordinatorSettings, WorkerSettings, open_coordinator, open_worker
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.worker.state import WeightSource
from tests.e2e.support import DEADLINE


def test_a_worker_before_while_and_after_it_serves(tmp_path: Path) -> None:
    cache = CacheSettings(tmp_path, 10**9, is_required=True)

    async def main() -> None:
        async with open_worker(WorkerSettings(name="cellar", cache=cache)) as worker:
            before = worker.board.status()
            assert (before.tenants, before.kept_models, before.layers_held) == ((), (), ())
            assert (before.disk_bytes, before.disk_limit_bytes) == (0, 10**9)
            settings = CoordinatorSettings(
                name="desk", peers=(worker.addresses[0],), local_layers="none"
            )
            async with open_coordinator(settings) as coordinator:
                prompt = coordinator.model.tokenizer.encode("A class definition")
                worker.board.status()  # rates are those between two looks
                tokens = [t async for t in coordinator.generate(prompt, max_tokens=8)]
                assert len(tokens) == 8
                serving = worker.board.status()
                (tenant,) = serving.tenants
                assert tenant.coordinator == coordinator.host.peer_id
                assert (serving.machine, tenant.machine) == ("cellar", "desk")
                assert tenant.layers_assigned == range(tenant.total_layers)
                assert tenant.num_confirmed == tenant.total_layers == len(serving.layers_held)
                assert serving.tokens_per_second > 0
                assert serving.prompt_tokens_per_second > 0
                assert serving.rows_per_pass == 1.0
                assert serving.busy > 0
                sent = sum(serving.weights_from.values())
                assert serving.weights_from[WeightSource.COORDINATOR] == sent > 0
                (peer,) = serving.peers
                assert (peer.is_coordinator, peer.is_connected) == (True, True)
                assert (peer.machine, peer.address) == ("desk", "127.0.0.1")
                assert peer.received_bytes > sent
                (seen,) = coordinator.status().peers.values()
                assert (seen.machine, seen.address) == ("cellar", "127.0.0.1")
                assert peer.sent_bytes_per_second > 0
            with trio.fail_after(DEADLINE):
                while worker.board.status().tenants:
                    await trio.sleep(0.05)
            after = worker.board.status()
            assert after.layers_held == serving.layers_held
            assert (after.kept_models, after.load.num_sessions) == ((tenant.model,), 0)
            assert not after.peers[0].is_coordinator

    trio.run(main)
