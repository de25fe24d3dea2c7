"""Settings that a worker is started with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from neurogrid.node.cache_directory import CacheSettings
from neurogrid.node.discovery import FindingSettings
from neurogrid.node.reach_settings import ReachSettings
from neurogrid.p2p.trust import Admission

__all__ = ["WorkerSettings"]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that a worker was started with.

    Attributes:
        name: what peers are told that this machine is called, at most 32 printable characters; None for the host's
            name, empty for nothing.
        listen: multiaddrs to listen on.
        listen_fallback: where to listen if one of them is taken; empty makes that an error.
        identity_file: where the key pair lives; None for a new identity each time.
        admission: which peers are served; None for all that reach a listen address.
        device: `cpu`, `cuda:0`, `gpu:0` for the first GPU of whatever kind; None for the best there is.
        memory_limit: bytes that weights and caches may take; None for what the device has.
        model: a checkpoint directory or a file in GGUF of its own; None for a stateless worker.
        wait_for_assignment: load from `model` only what a coordinator assigns.
        bootstrap: coordinators to dial, as full multiaddrs.
        finding: how coordinators find this worker.
        reach: how they reach it where they cannot simply dial it.
        max_seq_len: tokens; the longest session that is opened here.
        max_sessions: sessions that may be open at once; how many there can be is a matter of memory first.
        prefill_chunk: tokens of a prompt that run in one go while other sessions are open.
        transfer_timeout: seconds without a chunk after which a transfer is given up.
        cache: where layers that came are kept on disk; None for nowhere.
        prefix_cache_bytes: what sessions had may take there, for others that begin with the same tokens; None for
            nothing.
        session_ttl: seconds without an activation after which a session is closed.
        idle_after: seconds without work after which a coordinator's memory may go to another's assignment.
        protocol_versions: protocol ids to speak; None for all.
        serves: whether it holds layers of models that are served.
        trains: whether it is a member of training runs.
        data: directories with slices of training data, which need not be fetched then.
        invitation: of the leader of an open run, signed; empty for none.
        price: that is asked for training, in the unit that those who take part have agreed on.
        says_at: the level of `logging` for which coordinator it serves, and what it is ready for.
    """

    name: str | None = None
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    identity_file: Path | None = None
    admission: Admission | None = None
    device: str | None = None
    memory_limit: int | None = None
    model: Path | None = None
    wait_for_assignment: bool = False
    bootstrap: tuple[str, ...] = ()
    finding: FindingSettings = field(default_factory=FindingSettings)
    reach: ReachSettings = field(default_factory=ReachSettings)
    max_seq_len: int = 4096
    max_sessions: int = 1024
    prefill_chunk: int = 512
    transfer_timeout: float = 60.0
    cache: CacheSettings | None = None
    prefix_cache_bytes: int | None = None
    session_ttl: float = 600.0
    idle_after: float = 300.0
    protocol_versions: tuple[str, ...] | None = None
    serves: bool = True
    trains: bool = False
    data: tuple[Path, ...] = ()
    invitation: bytes = b""
    price: float = 0.0
    says_at: int = logging.INFO
