"""What does each transport move between two processes on this machine, and at what cost?

    python benchmarks/transport.py                      all rows, and the two special ones
    python benchmarks/transport.py --only ours --rounds 1

Every row runs in two processes of its own over loopback: a server, and a client that measures. The rows take
turns within a round, and each figure is the median of the rounds, so that a machine that drifts drifts for all.
What is not installed is named as missing: ZeroMQ needs `pip install pyzmq`, the Go and JavaScript pairs what the
interop tests need.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

import transport_libp2p
import transport_sockets
import transport_special
import trio
from report import table, write_report
from transport_load import MIB, Client, Usage, measure

ROWS = {**transport_sockets.ROWS, **transport_libp2p.ROWS}
# For one child; they bound their loads themselves, so this is for one that hangs.
ROW_TIMEOUT = 90.0
UNPACED = "raw trio TCP, not paced"
STOCK_QUIC, OURS_QUIC = "py-libp2p, stock, over QUIC", "ours, bare, over QUIC"
RAW, GO, STOCK, OURS = (
    "raw trio TCP",
    "go-libp2p (p2pd)",
    "py-libp2p, stock",
    "ours, Protocol 1.1.0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--only", default="", help="rows whose name contains this, and raw trio TCP"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-special", action="store_true", help="without the two special rows")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(args.serve)
    elif args.measure:
        _measure(*args.measure)
    else:
        _run_all(args)


def _run_all(args: argparse.Namespace) -> None:
    names = [name for name in ROWS if args.only in name or name in (RAW, UNPACED)]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for number in range(args.rounds):
        for name in names:
            if name in missing:
                continue
            started = time.perf_counter()
            try:
                results[name].append(_run_row(name))
            except RowError as exc:
                missing[name] = str(exc)
            seconds = time.perf_counter() - started
            print(f"round {number + 1}, {name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    figures = {
        name: {key: median(run[key] for run in runs) for key in runs[0]}
        for name, runs in results.items()
        if runs
    }
    for row in figures.values():
        if RAW in figures:
            row["x raw"] = row[f"rate {MIB}"] / figures[RAW][f"rate {MIB}"]
    body = table(HEADER, [_cells(name, figures.get(name), missing) for name in names])
    body += "\n\n" + LEGEND + " " + _pacing()
    if missing:
        body += "\n\n" + "\n".join(f"- missing: {name}: {why}" for name, why in missing.items())
    if OURS in figures and RAW in figures:
        body += "\n\n" + _ratios(figures)
    if not args.no_special:
        body += "\n\n" + transport_special.run(_children)
    # A part of the rows does not take the place of the whole table.
    name = "transport" + "".join(f"-{word}" for word in args.only.split())
    write_report(name, (__doc__ or "").partition("\n")[0], body)


class RowError(Exception):
    """A row could not be measured; the text says why."""


def _run_row(name: str) -> dict[str, float]:
    module = ROWS[name][0]
    if module == "hivemind":
        try:
            distribution(module)
        except PackageNotFoundError as exc:
            raise RowError("hivemind, whose wheel has p2pd, is not installed") from exc
    elif importlib.util.find_spec(module) is None:
        raise RowError(f"the module {module} is not installed")
    with _children(["--serve", name]) as (address, pid):
        return _ask_child(["--measure", name, json.dumps([address, pid])])


@contextmanager
def _children(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """A server process: its address and pid."""
    process = _start(arguments)
    try:
        line = _read_line(process)
        yield json.loads(line)["address"], process.pid
    finally:
        process.kill()
        process.communicate()


def _ask_child(arguments: list[str]) -> Any:
    process = _start(arguments)
    try:
        return json.loads(_read_line(process))
    finally:
        process.kill()
        process.communicate()


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], ROW_TIMEOUT)[0]:
        raise RowError(f"no figures within {ROW_TIMEOUT:g} s")
    line = process.stdout.readline()
    if not line:
        lines = process.communicate()[1].splitlines()
        errors = [
            line.strip("| ") for line in lines if re.search(r"(Error|Failed|Exceeded)\b", line)
        ]
        raise RowError((errors or ["it ended without a word"])[-1][:300])
    return line


def _serve(name: str) -> None:
    def ready(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)

    ROWS[name][1](ready)


def _measure(name: str, where: str) -> None:
    address, server_pid = json.loads(where)
    usage = Usage([os.getpid(), server_pid])

    async def run() -> None:
        made = ROWS[name][2](address)
        if isinstance(made, Client):
            figures = await measure(made, usage)
        else:
            async with made as client:
                figures = await measure(client, usage)
                print(json.dumps(figures), flush=True)
                os._exit(0)
        print(json.dumps(figures), flush=True)
        os._exit(0)  # what is left to be closed is no part of the figures

    trio.run(run)


HEADER = (
    "",
    "64 KiB MB/s",
    "1 MiB MB/s",
    "4 MiB MB/s",
    "x raw",
    "p50 us",
    "p99 us",
    "stream us",
    "connect ms",
    "CPU s/GB",
    "peak MiB",
)
LEGEND = (
    "Throughput by size of the writes; x raw: 1 MiB against raw trio TCP; p50 and p99 of a round trip of 16 KiB; "
    "stream: a new stream with an echo of 16 KiB (for sockets a new connection); CPU of both sides at 1 MiB; peak: "
    "resident memory of the larger process. The Go and JavaScript pairs contain two hops over Unix sockets."
)


def _cells(name: str, figures: dict[str, float] | None, missing: dict[str, str]) -> list[str]:
    if figures is None:
        return [name, "missing" if name in missing else "-", *["-"] * (len(HEADER) - 2)]

    def show(key: str, scale: float, digits: int = 0) -> str:
        return f"{figures[key] * scale:.{digits}f}" if key in figures else "-"

    return [
        name,
        show(f"rate {64 * 1024}", 1e-6),
        show(f"rate {MIB}", 1e-6),
        show(f"rate {4 * MIB}", 1e-6),
        show("x raw", 1, 2),
        show("p50", 1e6),
        show("p99", 1e6),
        show("stream", 1e6),
        show("connect", 1e3, 1),
        show("cpu", 1, 2),
        show("memory", 1),
    ]


def _pacing() -> str:
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    name = control.read_text().strip() if control.exists() else "unknown"
    return (
        f"This system's TCP congestion control is {name}; BBR paces, loopback too. Not paced: reno. Ours takes reno "
        "within a machine, all other rows have what the system gives them."
    )


def _ratios(figures: dict[str, dict[str, float]]) -> str:
    """Ratios that were asked for, each with its target."""
    rate, ours = f"rate {MIB}", figures[OURS]
    lines = []
    for name, target in (
        (RAW, "0.35"),
        (UNPACED, "none"),
        (STOCK, "4"),
        (GO, "1.5, aim 2"),
        ("ssl, TLS 1.3", "aim 1.0"),
    ):
        if name in figures:
            ratio = ours[rate] / figures[name][rate]
            lines.append(f"- 1 MiB through Protocol: {ratio:.2f} x {name} (target {target})")
    for name, target in ((RAW, "at most 3, aim 2"), (GO, "below 1")):
        if name in figures:
            ratio = ours["p50"] / figures[name]["p50"]
            lines.append(f"- round trip through Protocol: {ratio:.2f} x {name} (target {target})")
    bare = figures.get("ours, bare stream")
    if bare and STOCK in figures:
        ratio = figures[STOCK]["stream"] / bare["stream"]
        lines.append(f"- new stream with an echo: {ratio:.1f} x faster than stock (target 2)")
    if OURS_QUIC in figures:
        quic = figures[OURS_QUIC][rate]
        lines.append(f"- QUIC: {quic / 1e6:.0f} MB/s (target 100)")
        if STOCK_QUIC in figures:
            ratio = quic / figures[STOCK_QUIC][rate]
            lines.append(f"- QUIC: {ratio:.0f} x {STOCK_QUIC} (target 10)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
