"""What does a round of 100 MB cost over a link of 80 ms and 20 Mbit/s, against the time of its bytes alone?

    python benchmarks/averaging_link.py [--megabytes 100] [--mbits 20] [--delay 80] [--forms f32 f16 int8 int4]

Two processes on one machine; the one joins the other through a forwarder that lets so many bits a second through, each
way for itself, and each byte half of the delay later. Both ways have the same form. The link's own time is that of the
bytes that went through in the busier direction, and the delay once.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from report import table, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes of the tests

from tests.e2e.averaging_processes import AveragingPeer, Crowd, crowd

PIECE = 16 * 1024
# Seconds of bytes that wait in the forwarder at most, as in the queue of a router.
QUEUED = 0.1


class Forwarder:
    """A port that leads to another, at a rate and with a delay.

    Attributes:
        port: to connect to.
        num_bytes: that went through, by direction.
    """

    def __init__(self, to: int, bytes_a_second: float, delay: float) -> None:
        self.num_bytes = [0, 0]
        self._to, self._rate, self._delay = to, bytes_a_second, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            for direction, (source, sink) in enumerate(((near, far), (far, near))):
                for one in (source, sink):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._forward(direction, source, sink)

    def _forward(self, direction: int, source: socket.socket, sink: socket.socket) -> None:
        on_the_way: deque[tuple[float, bytes]] = deque()
        changed = threading.Condition()

        def take() -> None:
            free_at = time.monotonic()  # when the link has sent what it was given
            while data := _received(source):
                now = time.monotonic()
                free_at = max(free_at, now) + len(data) / self._rate
                with changed:
                    on_the_way.append((free_at + self._delay, data))
                    changed.notify()
                if free_at - now > QUEUED:
                    time.sleep(free_at - now - QUEUED)
            with changed:
                on_the_way.append((0.0, b""))
                changed.notify()

        def give() -> None:
            while True:
                with changed:
                    while not on_the_way:
                        changed.wait()
                    at, data = on_the_way.popleft()
                if not data:
                    sink.close()
                    return
                time.sleep(max(0.0, at - time.monotonic()))
                try:
                    sink.sendall(data)
                except OSError:
                    return
                self.num_bytes[direction] += len(data)

        for work in (take, give):
            threading.Thread(target=work, daemon=True).start()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(PIECE)
    except OSError:  # it was killed
        return b""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the vector as float32")
    parser.add_argument("--mbits", type=float, default=20.0)
    parser.add_argument("--delay", type=float, default=80.0, help="ms, there and back")
    parser.add_argument("--forms", nargs="+", default=["f32", "f16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    rows = [row for form in options.forms for row in _measure(form, options)]
    header = ("form", "round", "seconds", "MB each way", "the link's own seconds", "times")
    if options.no_file:
        print(table(header, rows))
    else:
        write_report("averaging_link", (__doc__ or "").partition("\n")[0], table(header, rows))


def _measure(form: str, options: argparse.Namespace) -> list[tuple[str, ...]]:
    num_elements = int(options.megabytes * 1e6 / 4)
    rate, delay = options.mbits * 1e6 / 8, options.delay / 1e3
    args = ("--codec", form, "--result-codec", form, "--min-members", "2", "--grace", "10")
    with (
        tempfile.TemporaryDirectory() as directory,
        crowd(
            Path(directory),
            *args,
            *("--attempt-timeout", "300", "--pause", "1"),
            num_elements=num_elements,
            timeout=400.0,
        ) as members,
    ):
        first, second = members.start(), members.start()
        port = int(first.addresses[0].split("/")[4])
        forwarder = Forwarder(port, rate, delay / 2)
        second.hear("ready")
        members.begin(first)
        first.hear("joined")
        second.tell(f"join /ip4/127.0.0.1/tcp/{forwarder.port}/p2p/{first.peer_id}")
        members.members.append(second)
        second.hear("joined")
        rows = []
        for number in range(1, options.rounds + 1):
            before = list(forwarder.num_bytes)
            seconds = _round(members, number)
            sent = max(b - a for a, b in zip(before, forwarder.num_bytes, strict=True))
            own = sent / rate + delay
            rows.append(
                (
                    form,
                    str(number),
                    f"{seconds:.1f}",
                    f"{sent / 1e6:.1f}",
                    f"{own:.1f}",
                    f"{seconds / own:.2f}",
                )
            )
            print(rows[-1], flush=True)
        return rows


def _round(members: Crowd, number: int) -> float:
    """Seconds of a round, of the slower member, since the later one had its vector."""

    def outcome(peer: AveragingPeer) -> dict[str, float]:
        while len(peer.outcomes) < number:
            time.sleep(0.01)
        return peer.outcomes[number - 1]

    outcomes = [outcome(peer) for peer in members.members]
    return max(o["at"] for o in outcomes) - max(o["begun"] for o in outcomes)


if __name__ == "__main__":
    main()
