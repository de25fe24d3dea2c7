"""Two coordinators, one of 1.0.0, and layers that another left: one is served, with its own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neurogrid import CoordinatorSettings
from neurogrid.errors import ModelError, NoRouteError
from neurogrid.p2p import PROTOCOL_V10, MessageType
from neurogrid.p2p.wire import (
    ErrorCode,
    LayerIds,
    serialize_config,
)
from tests.e2e.bad_input_peer.peer import BadPeer, connect, refused
from tests.e2e.bad_input_peer.scenarios import (
    MAX_SEQ_LEN,
    MAX_TOKENS,
    PROMPT,
    VERSIONS,
    Good,
    configured,
    generation_on,
    hidden,
    raw_chunk,
    with_peer,
)
from tests.e2e.support import (
    DEADLINE,
    Outcome,
    WorkerProcess,
    reference_tokens,
    run_coordinator,
)
from tests.families import FAMILIES, save_checkpoint


def test_beside_a_coordinator_of_1_0_0_another_is_told_busy_at_once(
    worker: WorkerProcess, good: Good
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await configured(peer, good, PROTOCOL_V10)
        started = trio.current_time()
        with pytest.raises(NoRouteError, match="busy: this worker serves the coordinator"):
            async with generation_on(good, worker.address):
                pytest.fail("two coordinators have one worker")
        assert trio.current_time() - started < DEADLINE / 2

    with_peer(worker, scenario, PROTOCOL_V10)
    good.check_on(worker.address)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_of_1_0_0_is_refused_beside_another(
    worker: WorkerProcess, good: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        if version == PROTOCOL_V10:
            await configured(peer, good, version)
        else:
            await peer.place(good.model)
        async with connect(worker.address, PROTOCOL_V10) as second:
            with refused(ErrorCode.BUSY, ""):
                await second.send(MessageType.MODEL_CONFIG, serialize_config(good.model.config))

    with_peer(worker, scenario, version)


def test_an_activation_of_who_is_not_served_is_refused(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(good.model.config))
        async with connect(worker.address) as second:
            with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
                await second.activate(hidden(good))
            with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
                await second.acknowledged(0, [raw_chunk(0, 1)], 5)

    with_peer(worker, scenario)


def sent_weights(outcome: Outcome) -> int:
    (sent,) = outcome.sent.values()
    return sent.get("weights", 0)


@pytest.mark.parametrize("versions", [None, (PROTOCOL_V10,)], ids=["1.1.0", "1.0.0"])
def test_another_fine_tune_gets_its_own_weights(
    worker: WorkerProcess, good: Good, tuned: Good, versions: tuple[str, ...] | None
) -> None:
    assert good.expected != tuned.expected
    good.check_on(worker.address)
    for model in (tuned, good, tuned):
        # Over 1.0.0 activations are FP16, which these tokens survive.
        outcome = model.check_on(worker.address, protocol_versions=versions)
        assert sent_weights(outcome) > sum(map(len, model.model.layers))
    assert sent_weights(tuned.check_on(worker.address)) == 0


def test_another_fine_tune_is_not_taken_for_this_one_without_its_weights(
    worker: WorkerProcess, good: Good, tuned: Good
) -> None:
    good.check_on(worker.address)
    with pytest.raises(ModelError, match=r"does not hold layer [01] of this model; start it with"):
        tuned.check_on(worker.address, skip_weight_transfer=True)


def test_over_1_0_0_the_layers_of_the_last_coordinator_are_not_held(
    worker: WorkerProcess, good: Good
) -> None:
    good.check_on(worker.address)

    async def scenario(peer: BadPeer) -> None:
        await configured(peer, good, PROTOCOL_V10)
        status = await peer.ask(
            MessageType.LAYER_REQUEST,
            LayerIds(()).encode(),
            MessageType.LAYER_STATUS,
            request_id=0,
        )
        assert LayerIds.decode(status.data).ids == ()
        with refused(ErrorCode.LAYER_NOT_HELD, ""):
            await peer.ask(MessageType.ACTIVATION, bytes(512), MessageType.RESPONSE)

    with_peer(worker, scenario, PROTOCOL_V10)


def test_another_architecture_takes_the_place(
    worker: WorkerProcess, good: Good, tmp_path: Path
) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path)
    settings = CoordinatorSettings(model=tmp_path, peers=(worker.address,), max_seq_len=MAX_SEQ_LEN)
    outcome = run_coordinator(settings, [PROMPT], MAX_TOKENS)
    assert outcome.tokens == [reference_tokens(model, PROMPT, MAX_TOKENS)]
    assert sent_weights(outcome) > 0
