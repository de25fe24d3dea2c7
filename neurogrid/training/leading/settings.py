"""Settings of a run's leader, deputies and data nodes, and interfaces for the progress that they report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from neurogrid.node.reach_settings import ReachSettings
from neurogrid.p2p.trust import Admission
from neurogrid.training.runs.run_file import RunFile

__all__ = [
    "DataNodeSettings",
    "DeputySettings",
    "LeaderProgress",
    "LeaderSettings",
    "NodeProgress",
]


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """A run to lead.

    Attributes:
        run: what it is to do.
        directory: where it is kept; made if it is missing.
        model: a directory with config.json, and for weights that are given, safetensors and tokenizer; or a config
            alone, in JSON.
        admission: of the cluster that the run has for its members, in which this peer is the coordinator.
        identity_file: where the key pair of this peer lives; made if it is missing.
        local_workers: to start on this machine.
        num_threads: that this machine computes with, local workers included; None for as many as torch takes.
        wait: seconds that the run waits for its members.
        resume: go on with the run in `directory`; otherwise there must be none.
        without_deputy: the deputy that the journal names does not lead, and never will: somebody knows that.
        listen: multiaddrs to listen at.
        listen_fallback: those to listen at instead where these are taken; empty for none.
        name: what other peers are told that this machine is called; None for its host name.
        reach: how others come to this peer.
    """

    run: RunFile
    directory: Path
    model: Path
    admission: Admission
    identity_file: Path
    local_workers: int = 0
    num_threads: int | None = None
    wait: float = 1800.0
    resume: bool = False
    without_deputy: bool = False
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    name: str | None = None
    reach: ReachSettings = field(default_factory=ReachSettings)


@dataclass(frozen=True, slots=True)
class DeputySettings:
    """A run to copy, and to lead when its leader is dead.

    Attributes:
        directory: where the copy is kept; made if it is missing.
        admission: of the cluster of the run, in which this peer is a coordinator.
        identity_file: where the key pair of this peer lives; made if it is missing.
        bootstrap: full multiaddrs of the leader, as the ticket has them, and of other deputies.
        num_threads, wait, listen, listen_fallback, name, reach: as those of the leader.
    """

    directory: Path
    admission: Admission
    identity_file: Path
    bootstrap: tuple[str, ...] = ()
    num_threads: int | None = None
    wait: float = 1800.0
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    name: str | None = None
    reach: ReachSettings = field(default_factory=ReachSettings)


@dataclass(frozen=True, slots=True)
class DataNodeSettings:
    """A directory of slices to serve to the members of a run.

    Attributes:
        directory: as `neurogrid train prepare` wrote it.
        admission: of the cluster of the run; None for all that reach the port, on loopback.
        identity_file: where the key pair of this peer lives; None for a new one.
        bootstrap: full multiaddrs of the leader, as the ticket has them.
        listen, listen_fallback, name, reach: as those of the leader.
    """

    directory: Path
    admission: Admission | None = None
    identity_file: Path | None = None
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    name: str | None = None
    reach: ReachSettings = field(default_factory=ReachSettings)


class NodeProgress(Protocol):
    """Progress of a peer, for the person who started it. Called between two checkpoints of trio, it never waits."""

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """The peer listens: others can join from now on."""

    def at_end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Do this before a signal ends the process; it has some seconds, and then everything is cancelled."""

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""

    def warn(self, text: str) -> None:
        """The same of something that went wrong: what, and what is done about it."""


class LeaderProgress(NodeProgress, Protocol):
    """The same of the leader of a run."""

    def metrics(self, figures: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""
