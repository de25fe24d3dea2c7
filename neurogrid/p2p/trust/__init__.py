"""Admission of peers, and their roles: clusters, certificates, tickets, allow lists, and the gate that holds to them.

    cluster = Cluster.create(directory)
    membership = cluster.enrol(identity.peer_id, COORDINATOR)
    admission = ClusterAdmission(membership, admits={WORKER}, issuer=cluster)
    async with open_host(identity=identity, admission=admission) as host:
        print(cluster.ticket(host.peer_id, host.addresses).text())

Source: protocol_spec/trust.md.
"""

from neurogrid.p2p.trust.admission import (
    Admission,
    Admitted,
    AllowList,
    Insecure,
    LoopbackOnly,
    parse_allow,
)
from neurogrid.p2p.trust.certificate import Certificate
from neurogrid.p2p.trust.cluster import Cluster
from neurogrid.p2p.trust.cluster_admission import ClusterAdmission
from neurogrid.p2p.trust.directory_lock import DirectoryInUseError
from neurogrid.p2p.trust.gate import OPEN_PROTOCOLS
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.membership import Membership
from neurogrid.p2p.trust.messages import TRUST_PROTOCOL
from neurogrid.p2p.trust.names import ANY_ROLE, COORDINATOR, RUN_ROLES, TRAINER, WORKER
from neurogrid.p2p.trust.private_files import DirectoryLockedError
from neurogrid.p2p.trust.refusal import SILENCE, NotAdmittedError, Refusal, RefusedError
from neurogrid.p2p.trust.revocation import RevocationList
from neurogrid.p2p.trust.standing import Standing, StandingState, standing_of
from neurogrid.p2p.trust.ticket import Ticket, read_ticket
from neurogrid.p2p.trust.whereabouts import Whereabouts

__all__ = [
    # Clusters
    "Cluster",
    "DirectoryInUseError",
    "DirectoryLockedError",
    "Membership",
    "Standing",
    "StandingState",
    "standing_of",
    "Certificate",
    "RevocationList",
    "JoinToken",
    "Ticket",
    "read_ticket",
    "Whereabouts",
    # Policies
    "Admission",
    "Admitted",
    "ClusterAdmission",
    "AllowList",
    "parse_allow",
    "Insecure",
    "LoopbackOnly",
    "COORDINATOR",
    "WORKER",
    "TRAINER",
    "RUN_ROLES",
    "ANY_ROLE",
    # What is said
    "Refusal",
    "SILENCE",
    "RefusedError",
    "NotAdmittedError",
    "TRUST_PROTOCOL",
    "OPEN_PROTOCOLS",
]
