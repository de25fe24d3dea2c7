"""How long does it take to find N peers, by multicast DNS and by Kademlia, and what does it cost at rest?

    python benchmarks/discovery.py                      5, 10, 20 and 50 hosts; as root, for namespaces
    python benchmarks/discovery.py --hosts 20 --rest 60

One switch, and a network namespace for each group of hosts: hosts of a group share a process and an address, groups
share nothing but the switch. All are started at once; what is measured begins when the last listens. With Kademlia
all bootstrap from one more host, the first, which is a member too; timing is that of the commands. At rest: what
leaves and enters a group's interface, counted by the kernel over `--rest` seconds, once all have found all, and a
pause.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio
from report import table, write_report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the namespaces of the tests

# Behind that line, as one of them is only found with it; the others keep it company.
from neurogrid.p2p import open_host  # noqa: E402
from neurogrid.p2p.discovery import Discovery, PeerFound  # noqa: E402
from neurogrid.p2p.discovery.dht import Announcement  # noqa: E402
from tests.e2e.namespaces.netns import Machine, network  # noqa: E402

HOSTS = (5, 10, 20, 50)
SOURCES = ("mdns", "dht")
GROUP = 5  # hosts in a process
TIMEOUT = 240.0


class Group:
    """A process with some hosts, in a namespace of its own; prints lines of JSON."""

    def __init__(self, machine: Machine, num_hosts: int, source: str, bootstrap: str) -> None:
        self.machine = machine
        self.num_hosts = num_hosts
        self.times: list[float] = []
        options = json.dumps({"hosts": num_hosts, "source": source, "bootstrap": bootstrap})
        self._process = machine.popen(
            [sys.executable, __file__, "--group", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read_times, daemon=True)

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a group of hosts has ended"
        return dict(json.loads(line))

    def start(self, num_others: int) -> None:
        """Let its hosts look for so many others, each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_others}\n")
        self._process.stdin.flush()
        self._reader.start()

    def _read_times(self) -> None:
        for _ in range(self.num_hosts):
            self.times.append(self.read()["seconds"])

    def wait_found(self, deadline: float) -> None:
        self._reader.join(max(0.0, deadline - time.monotonic()))

    def num_bytes(self) -> int:
        """Received and sent on its interface since it was made."""
        counters = Path("/sys/class/net/eth0/statistics")
        names = [str(counters / name) for name in ("rx_bytes", "tx_bytes")]
        # In its own /sys: `ip netns exec` mounts one for each namespace.
        return sum(map(int, self.machine.run(["cat", *names]).stdout.split()))


async def run_group(options: dict[str, Any]) -> None:
    """Hosts of one process: each says when it has found as many as it was told."""
    go = trio.Event()
    num_others = 0
    num_ready = 0

    async def run_host(number: int) -> None:
        nonlocal num_ready, first
        async with (
            open_host(listen=["/ip4/0.0.0.0/tcp/0"]) as host,
            Discovery(host) as discovery,
        ):
            place = next(a for a in host.addresses if "/127.0.0.1/" not in a)
            num_ready += 1
            if number == 0:
                first = first or place
                while num_ready < options["hosts"]:
                    await trio.sleep(0.01)
                print(json.dumps({"address": place}), flush=True)
            await go.wait()
            started = time.monotonic()
            if options["source"] == "mdns":
                await discovery.setup_mdns()
            else:
                bootstrap = [first] if place != first else []
                await discovery.setup_dht(
                    namespace="benchmark",
                    record=lambda: Announcement("worker"),
                    mode="server",
                    bootstrap=bootstrap,
                )
            found = set()
            async for change in discovery.peers():
                if isinstance(change, PeerFound):
                    found.add(change.peer_id)
                if len(found) == num_others:
                    break
            print(json.dumps({"seconds": time.monotonic() - started}), flush=True)
            await trio.sleep_forever()

    # The first host of the first group is where all others begin.
    first = options["bootstrap"]
    async with trio.open_nursery() as nursery:
        for number in range(options["hosts"]):
            nursery.start_soon(run_host, number)
        num_others = int(await trio.to_thread.run_sync(sys.stdin.readline))
        go.set()


@contextmanager
def groups_of(num_hosts: int, source: str) -> Iterator[list[Group]]:
    """Groups that listen, and wait."""
    with network() as net:
        lan = net.lan(-(-num_hosts // GROUP))
        groups: list[Group] = []
        bootstrap = ""
        for number, machine in enumerate(lan.machines):
            size = min(GROUP, num_hosts - number * GROUP)
            groups.append(Group(machine, size, source, bootstrap))
            if number == 0 and source == "dht":
                bootstrap = groups[0].read()["address"]
        for group in groups[1 if source == "dht" else 0 :]:
            group.read()
        yield groups


def measure(num_hosts: int, source: str, pause: float, rest: float) -> list[str]:
    """A row of the report."""
    with groups_of(num_hosts, source) as groups:
        for group in groups:
            group.start(num_hosts - 1)
        deadline = time.monotonic() + TIMEOUT
        for group in groups:
            group.wait_found(deadline)
        times = [seconds for group in groups for seconds in group.times]
        if len(times) < num_hosts:
            what = f"{len(times)} of {num_hosts} had found all after {TIMEOUT:g} s"
            return [source, str(num_hosts), str(len(groups)), what, "", ""]
        time.sleep(pause)
        before, began = sum(group.num_bytes() for group in groups), time.monotonic()
        time.sleep(rest)
        counted = sum(group.num_bytes() for group in groups) - before
        minutes = (time.monotonic() - began) / 60
    return [
        source,
        str(num_hosts),
        str(len(groups)),
        f"{median(times):.2f}",
        f"{max(times):.2f}",
        f"{counted / minutes / num_hosts:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, action="append", help="how many; may be given again")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds to count traffic for")
    parser.add_argument(
        "--pause",
        type=float,
        default=600.0,
        help="seconds before that: Kademlia looks seldom by then",
    )
    parser.add_argument("--by", choices=SOURCES, action="append", help="default: both")
    parser.add_argument("--others", default="nothing of ours", help="what else runs meanwhile")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.group:
        trio.run(run_group, json.loads(args.group))
        return
    rows = []
    for num_hosts in args.hosts or HOSTS:
        for source in args.by or SOURCES:
            rows.append(measure(num_hosts, source, args.pause, args.rest))
            load = os.getloadavg()[0]
            print(*rows[-1], f"load {load:.1f}", file=sys.stderr, flush=True)
            rows[-1].append(f"{load:.1f}")
    header = ("by", "hosts", "processes", "median s", "last s", "B/min a host", "load")
    legend = (
        f"Seconds until a host has found all others, from when all listen; {GROUP} hosts share a process, which has a "
        "namespace and an address of its own, all on one switch. B/min: bytes received and sent on the interfaces, "
        f"Ethernet headers included, over {args.rest:g} s, {args.pause:g} s after the last was found, for each host; "
        "hosts of one process reach each other on loopback, which is not counted. Load: of the machine, over a minute. "
        f"Beside it ran: {args.others}."
    )
    write_report(
        "discovery", (__doc__ or "").partition("\n")[0], f"{table(header, rows)}\n\n{legend}"
    )


if __name__ == "__main__":
    main()
