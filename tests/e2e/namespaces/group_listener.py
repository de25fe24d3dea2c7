"""Prints what is multicast for mDNS on an interface, knowing nothing of our code: `group_listener.py ADDRESS`.

First `{"ready": true}`, then `{"from": IP, "bytes": N, "text": ...}` for each packet, on whatever port it came from.
"""

from __future__ import annotations

import json
import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as group:
    group.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    group.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    group.bind(("", 5353))
    request = socket.inet_aton("224.0.0.251") + socket.inet_aton(sys.argv[1])
    group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        data, source = group.recvfrom(65536)
        line = {"from": source[0], "bytes": len(data), "text": data.decode("latin-1")}
        print(json.dumps(line), flush=True)
