"""The plan as a table: whole at any width of a terminal, and plain columns on a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from neurogrid.assembly.quantize_choices import QuantizeChoice
from neurogrid.cli.terminal.plan_table import COLUMNS, print_plan
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import Explanation, PeerReport, PeerSpeed

GB = 10**9
PEERS = ("12D3KooWAAAAAAAAfirst111", "12D3KooWBBBBBBBBsecond22", "12D3KooWCCCCCCCCthird333")
WORKERS = [
    WorkerInfo(
        peer_id=peer_id,
        name="NVIDIA GeForce RTX 4090",
        free_bytes=23 * GB,
        protocol_id="/neurogrid/tensor/1.1.0",
        memory_known=True,
        held_layers=(),
        speed=PeerSpeed(2e9, 1e-6),
        latency=0.002,
        total_bytes=24 * GB,
        device_kind="cuda",
        flops=10**13,
        machine=machine,
        address="192.168.178.123",
    )
    for peer_id, machine in zip(PEERS, ("attic", "a-machine-of-a-long-name", ""), strict=True)
]
TOLD = Explanation(
    (
        PeerReport(PEERS[0], 1, (0, 18), 9 * GB, GB, GB, 12 * GB, 9 * GB, 0.021, ""),
        PeerReport(PEERS[1], 2, (18, 36), 9 * GB, GB, GB, 12 * GB, 0, 0.034, ""),
        PeerReport(PEERS[2], None, None, 0, 0, 0, 23 * GB, 0, None, "two stages are enough"),
    ),
    18.2,
    29.4,
)


CHOICES = (
    QuantizeChoice(None, False, 72 * GB),
    QuantizeChoice("int8", True, 38 * GB, 20 * GB, 18.2),
    QuantizeChoice("int4", False, 0, refused="its experts are one tensor"),
)


def printed(*, width: int, is_terminal: bool = True) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None
    )
    print_plan(console, TOLD, WORKERS, CHOICES, note="a note")
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [48, 60, 80, 100, 120, 160, 200])
def test_it_is_whole_at_any_width(width: int) -> None:
    lines = printed(width=width)
    assert max(map(len, lines)) <= width
    text = re.sub(r"\s+", " ", " ".join(lines))
    assert not re.search(r"\w…", text)  # as rich cuts a cell
    for told in ("0-17", "18-35", "47.6", "29.4", "192.168.178.123", "a-machine-of-a-long-name"):
        assert told in text
    assert text.count("NVIDIA GeForce RTX 4090, 23.0 GB free") == 3
    assert text.count("12.0 GB") == 2
    assert "two stages are enough" in text


def test_each_form_of_the_layers_has_a_row() -> None:
    lines = printed(width=80, is_terminal=False)
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[-4:]]
    assert rows[:3] == [
        ["as it is", "72.0 GB", "does not fit", "-"],
        ["int8 *", "38.0 GB", "20.0 GB", "18.2"],
        ["int4", "-", "cannot be", "-"],
    ]
    assert lines[-1] == "--quantize int4: its experts are one tensor"


def test_a_wide_terminal_has_every_column() -> None:
    head = printed(width=200)[0]
    assert all(column in head for column in COLUMNS)


def test_a_pipe_has_a_line_for_each_worker() -> None:
    lines = printed(width=40, is_terminal=False)
    assert lines[0].split()[:3] == ["stage", "layers", "worker"]
    assert len([line for line in lines if "192.168.178.123" in line]) == 3
