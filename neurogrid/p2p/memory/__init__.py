"""A network in memory: several hosts in one process, and links between them that fail on command.

For tests, of this project and of programs that use it. `MemoryHost` is a `Host` as libp2p's is: real peer
ids, connections, streams with back-pressure, ends, resets, the same errors for the same causes. But nothing
leaves the process, and time is trio's: with `trio.testing.MockClock(autojump_threshold=0)` a link of two
seconds costs none.

    async with open_memory_network() as network:
        async with network.open_host() as alice, network.open_host() as bob:
            network.set_link(Link(delay=0.05))
            await alice.connect(bob.addresses[0])
            ...
            network.cut(alice, bob)

There is no encryption: a peer id is what the host says it is. How a connection carries frames is in
`connection`.
"""

from neurogrid.p2p.memory.connection import Link
from neurogrid.p2p.memory.network import MemoryHost, MemoryNetwork, open_memory_network

__all__ = ["Link", "MemoryHost", "MemoryNetwork", "open_memory_network"]
