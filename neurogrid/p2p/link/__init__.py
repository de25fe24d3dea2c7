"""The data path of a TCP connection: Noise transport messages and Yamux, at the speed of the machine.

The same bytes on the wire as every libp2p implementation. Two cores without I/O, `noise` and `yamux`, stand under
a thin driver for trio that py-libp2p's swarm takes for its own. `install_link` puts it there.
"""

from neurogrid.p2p.link.install import install_link
from neurogrid.p2p.link.limits import LinkLimits
from neurogrid.p2p.link.link_stream import LinkStream

__all__ = ["LinkLimits", "LinkStream", "install_link"]
