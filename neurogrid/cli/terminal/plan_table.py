"""The plan as `--plan-only` prints it: a table on a terminal, the same in plain columns on a pipe.

Where a terminal is too narrow for all columns, the last that anybody looks for are told in lines below.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from neurogrid.assembly.quantize_choices import QuantizeChoice
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.p2p.hosts.machine import named_peer
from neurogrid.planner import Explanation, PeerReport, format_bytes

__all__ = ["Stdout", "print_plan"]

COLUMNS = (
    "stage",
    "layers",
    "worker",
    "machine",
    "address",
    "weights",
    "caches",
    "left",
    "to send",
    "tokens/s",
    "device",
)
# The columns of numbers.
RIGHT = frozenset({"weights", "caches", "left", "to send", "tokens/s", "largest stage"})
GAP = "  "
# Of the forms that layers can have.
FORM_COLUMNS = ("--quantize", "weights", "largest stage", "tokens/s")
# What a narrow terminal's table goes without, in this order.
FIRST_TO_GO = ("device", "address", "caches", "left", "machine", "weights")


class Stdout(Console):
    """stdout, for rich, which would end the process by itself where its reader has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_plan(
    console: Console,
    told: Explanation,
    workers: Sequence[WorkerInfo],
    choices: Sequence[QuantizeChoice] = (),
    *,
    note: str = "",
) -> None:
    """Print to the console: a row for each worker, why some have no stage, a note, and the expected speed; then a row
    for each form that the layers can have."""
    by_peer = {worker.peer_id: worker for worker in workers}
    rows = [_row(report, by_peer[report.peer_id]) for report in told.peers]
    if console.is_terminal:
        table, below = _fitting(console, rows)
        console.print(table)
        for report, row in zip(told.peers, rows, strict=True):
            cells = dict(zip(COLUMNS, row, strict=True))
            rest = [f"{column} {cells[column]}" for column in below if column != "device"]
            if below:
                _say(
                    console,
                    f"{_name(by_peer[report.peer_id])}: {', '.join([cells['device'], *rest])}",
                )
    else:
        for line in _plain(COLUMNS, rows):
            _say(console, line)
    for report in told.peers:
        if report.reason:
            _say(console, f"{_name(by_peer[report.peer_id])}: {report.reason}")
    if note:
        _say(console, note)
    _say(console, _expectation(told, by_peer))
    if choices:
        _print_choices(console, choices)


def _print_choices(console: Console, choices: Sequence[QuantizeChoice]) -> None:
    rows = [_choice_row(choice) for choice in choices]
    _say(console, "\nwhat each form of the layers takes on these workers (*: this plan)")
    if console.is_terminal:
        console.print(_table(FORM_COLUMNS, rows))
    else:
        for line in _plain(FORM_COLUMNS, rows):
            _say(console, line)
    for choice in choices:
        if choice.refused:
            _say(console, f"--quantize {choice.method}: {choice.refused}")


def _choice_row(choice: QuantizeChoice) -> tuple[str, ...]:
    name = (choice.method or "as it is") + (" *" if choice.is_chosen else "")
    if choice.refused:
        return name, "-", "cannot be", "-"
    largest, rate = choice.largest_bytes, choice.tokens_per_second
    return (
        name,
        format_bytes(choice.weight_bytes),
        "does not fit" if largest is None else format_bytes(largest),
        "-" if rate is None else f"{rate:.1f}",
    )


def _row(report: PeerReport, worker: WorkerInfo) -> tuple[str, ...]:
    assumed = "" if worker.memory_known else " (memory assumed)"
    layers = f"{report.layers[0]}-{report.layers[1] - 1}" if report.layers else "-"
    without_stage = "replica" if report.layers else "-"
    return (
        without_stage if report.stage is None else str(report.stage),
        layers,
        short_peer_id(worker.peer_id),
        worker.machine or "-",
        worker.address or "-",
        format_bytes(report.weight_bytes) if report.layers else "-",
        format_bytes(report.cache_bytes) if report.layers else "-",
        format_bytes(report.spare_bytes),
        format_bytes(report.missing_bytes) if report.layers else "-",
        f"{1 / report.step_seconds:.1f}" if report.step_seconds else "-",
        f"{worker.name}, {format_bytes(worker.free_bytes)} free{assumed}",
    )


def _name(worker: WorkerInfo) -> str:
    return named_peer(worker.peer_id, worker.machine)


def _fitting(console: Console, rows: Sequence[tuple[str, ...]]) -> tuple[Table, tuple[str, ...]]:
    """The table with as many columns as the terminal has room for, and the names of the others."""
    unbounded = console.options.update(max_width=1000)
    for num_gone in range(len(FIRST_TO_GO) + 1):
        gone = FIRST_TO_GO[:num_gone]
        shown = [index for index, column in enumerate(COLUMNS) if column not in gone]
        table = _table(
            [COLUMNS[index] for index in shown], [[row[index] for index in shown] for row in rows]
        )
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table, tuple(column for column in COLUMNS if column in gone and column != "machine")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _plain(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [columns, *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    return [
        GAP.join(
            cell.rjust(width) if column in RIGHT else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    ]


def _expectation(told: Explanation, by_peer: dict[str, WorkerInfo]) -> str:
    if told.tokens_per_second is None or told.peak_tokens_per_second is None:
        unknown = [
            _name(by_peer[report.peer_id])
            for report in told.peers
            if report.stage is not None and by_peer[report.peer_id].speed is None
        ]
        return f"expected speed: not known, {', '.join(unknown)} did not say how fast they compute"
    return (
        f"expected speed: {told.tokens_per_second:.1f} tokens/s for one session, "
        f"{told.peak_tokens_per_second:.1f} with every stage busy (estimates)"
    )


def _say(console: Console, text: str) -> None:
    # A terminal's lines end between words; what reads a pipe has lines of any length.
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)
