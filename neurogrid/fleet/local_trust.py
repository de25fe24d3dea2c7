"""Credentials of local workers, where not every peer is admitted: identities, and certificates or a place on the list.

The coordinator's own policy gives them: it has the cluster's key, or the list. What they show lies in a private
directory, which goes when they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.reach.circuit import is_loopback_address
from neurogrid.p2p.trust import COORDINATOR, WORKER, Admission, AllowList, ClusterAdmission
from neurogrid.temporary import temporary_directory

__all__ = ["credentials_of_local_workers", "listen_address_beside"]


def listen_address_beside(listen: Sequence[str], admission: Admission | None) -> str:
    """Return the address of local workers: loopback, unless the coordinator checks its peers, and others reach it.

    Workers elsewhere hand activations to them, so loopback is not enough for a coordinator that others reach.
    """
    if not isinstance(admission, ClusterAdmission | AllowList) or all(
        map(is_loopback_address, listen)
    ):
        return "/ip4/127.0.0.1/tcp/0"
    return "/ip4/0.0.0.0/tcp/0"


@contextmanager
def credentials_of_local_workers(
    count: int,
    admission: Admission | None,
    coordinator_id: str,
    *,
    directory: Path | None = None,
) -> Iterator[list[tuple[str, ...]]]:
    """Yield what to add to the command line of each of `count` workers: its identity, the same when it is started
    again, and what makes it and the coordinator admit each other.

    Args:
        admission: the coordinator's; None, or one that admits everybody, needs nothing besides.
        coordinator_id: its peer id.
        directory: where they are kept, so that the workers of the next time are the same; None for nowhere.

    Raises:
        ConfigurationError: certificates are needed, and the cluster's key is not here.
    """
    kept = (
        temporary_directory("neurogrid-workers-") if directory is None else nullcontext(directory)
    )
    with kept as directory_of_all:
        directories = [directory_of_all / str(number) for number in range(count)]
        files = [directory / "identity.key" for directory in directories]
        peer_ids = [Identity.load(file).peer_id for file in files]
        if isinstance(admission, ClusterAdmission):
            for peer_id, directory in zip(peer_ids, directories, strict=True):
                admission.enrol(peer_id, WORKER).save_to(directory)
            yield [
                ("--cluster", str(directory), "--identity", str(file))
                for directory, file in zip(directories, files, strict=True)
            ]
            return
        if not isinstance(admission, AllowList):
            yield [("--identity", str(file)) for file in files]
            return
        for peer_id in peer_ids:
            admission.allow(peer_id, WORKER)
        # Workers hand activations to each other.
        allowed = {**admission.roles, coordinator_id: COORDINATOR}
        allow = [part for entry in allowed.items() for part in ("--allow", "=".join(entry))]
        yield [("--identity", str(file), *allow) for file in files]
