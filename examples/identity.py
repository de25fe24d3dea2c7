"""A host with an identity that lasts, on an address of your choice: peers find the same peer id there tomorrow.

    python examples/identity.py peer.key /ip4/127.0.0.1/tcp/4001    # the file is made if it is not there

To be reached from other machines, listen on /ip4/0.0.0.0/tcp/4001. Connections are encrypted and a peer id is
proven by its key, but nothing here decides whom to serve: anybody who can reach the port may connect.
"""

import sys
from pathlib import Path

import trio

from neurogrid.p2p import Identity, open_host


async def main(key_file: str, address: str) -> None:
    identity = Identity.load(Path(key_file))
    async with open_host(listen=[address], identity=identity) as host:
        host.on_connected(lambda peer_id: print(f"{peer_id} is here", flush=True))
        host.on_disconnected(lambda peer_id: print(f"{peer_id} is gone", flush=True))
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


trio.run(main, *sys.argv[1:])
