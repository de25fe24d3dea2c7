"""Settings of a coordinator, given when it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neurogrid.assembly.plan_request import LocalLayers
from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.generation.cache_room import MAX_WAITING_SESSIONS
from neurogrid.inference.pipeline.routing import RoutingMode
from neurogrid.inference.speculation.speculation import SpeculationMode
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.node.discovery import FindingSettings
from neurogrid.node.reach_settings import ReachSettings
from neurogrid.p2p.trust import Admission

__all__ = ["CoordinatorSettings"]

GIB = 1024**3


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings that a coordinator was started with.

    Attributes:
        model: a checkpoint directory, or a file in GGUF; None for the embedded model.
        model_name: what the model is called; None for the directory's name.
        name: what peers are told that this machine is called, at most 32 printable characters; None for the host's
            name, empty for nothing.
        peers: workers to dial, as full multiaddrs.
        bootstrap: other peers to dial; workers among them are used, but not waited for.
        finding: how workers are found that nobody named.
        reach: how this host is reached, and reaches others, where neither can simply be dialled.
        min_peers: workers to wait for; None for as many as `peers` and local workers, or one that is found.
        local_workers: processes to start on this machine.
        num_threads: of the CPU, that local workers share; None for one each core. This process has as many as it was
            started with (OMP_NUM_THREADS).
        local_layers: how many layers the coordinator computes itself: `none`, exactly so many, the first, or `auto`
            for as many as it takes where the workers cannot hold the model (or it has a GPU that makes it much
            faster). With workers started here `auto` is `none`: they have this machine's memory.
        stages: that many stages; None for the fewest that fit (one a local worker).
        wait: seconds to wait for the workers.
        listen: multiaddrs to listen on.
        listen_fallback: where to listen if one of them is taken; empty makes that an error.
        identity_file: where the key pair lives; None for a new identity each time.
        admission: which peers are served and used; None for all that reach a listen address.
        cache: where the hashes of the model's files are kept; None for nowhere.
        skip_weight_transfer: workers must hold their layers already.
        max_seq_len: tokens of the longest session.
        max_sessions: sessions at once that memory is set aside for on the workers.
        max_waiting: sessions that may wait for a place in that memory; more are refused.
        peer_memory_bytes: assumed for workers that do not tell.
        dtype: to compute in; None for the checkpoint's own.
        quantize: `int8` or `int4`: what the layers' matrices travel, and are held, as; None for as they are.
        kv_cache_dtype: `int8`: what the keys and values of sessions are kept as on the workers; None for `dtype`.
        adapters: directories of adapters (LoRA, in PEFT's files) that are served beside the model, by name.
        routing: `chain`: workers hand activations on to each other where they can; `star`: all through here.
        wire_dtype: `float32`, `float16`, `bfloat16` or `int8`: in what activations travel; None for `dtype`.
        timeouts: deadlines towards workers.
        patience: seconds that a generation waits for a way around a worker that failed, or for one that has no room.
        with_replicas: workers that are left over get layers too, to stand by.
        speculate: whether tokens are proposed, by what followed the last ones earlier in the text, and several looked
            at in a pass: `auto`, where that changes no bit of what is computed but by rounding in float32; `lookup`,
            wherever the model can take tokens back; `off`.
        draft: a checkpoint directory of a small model with the same tokenizer, which this process has whole and which
            proposes tokens where the text does not repeat itself; None for none.
        prefix_reuse: finished sessions stay open for a while, for those that begin with the same tokens.
        verify: share of sessions, 0 to 1, that are computed again when they are over, and compared.
        protocol_versions: protocol ids to speak; None for all.
    """

    model: Path | None = None
    model_name: str | None = None
    name: str | None = None
    peers: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    finding: FindingSettings = field(default_factory=FindingSettings)
    reach: ReachSettings = field(default_factory=ReachSettings)
    min_peers: int | None = None
    local_workers: int = 0
    num_threads: int | None = None
    local_layers: LocalLayers = "auto"
    stages: int | None = None
    wait: float = 60.0
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    identity_file: Path | None = None
    admission: Admission | None = None
    cache: CacheSettings | None = None
    skip_weight_transfer: bool = False
    max_seq_len: int = 4096
    max_sessions: int = 1
    max_waiting: int = MAX_WAITING_SESSIONS
    peer_memory_bytes: int = 8 * GIB
    dtype: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    routing: RoutingMode = "chain"
    wire_dtype: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    patience: float = 120.0
    with_replicas: bool = True
    speculate: SpeculationMode = "auto"
    draft: Path | None = None
    prefix_reuse: bool = True
    verify: float = 0.0
    protocol_versions: tuple[str, ...] | None = None
