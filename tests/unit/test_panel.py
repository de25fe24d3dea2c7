"""The panel as somebody sees it: on wide, narrow and low terminals, without colour and without Unicode."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from neurogrid.cli.terminal.panel.coordinator import coordinator_view
from neurogrid.cli.terminal.panel.view import View, bar, draw, spark
from neurogrid.cli.terminal.panel.worker import worker_view
from neurogrid.cli.terminal.transfer_view import part_of
from neurogrid.fleet.board.status import Health, PeerStatus, Phase, Role, TransferStatus
from neurogrid.inference.board.status import ClusterStatus
from neurogrid.inference.sessions.board import PeerTraffic, TenantStatus, WorkerStatus
from neurogrid.inference.sessions.load import WorkerLoad
from neurogrid.node.events import Event, EventKind, Severity
from neurogrid.worker.state import WeightSource

GB = 10**9
LOST = "Lost worker …xAAAAAA4 with layers 18 to 35: the stream ended; looking for a worker for them"


def peer(tail: str, stage: int | None, layers: range, **changed: Any) -> PeerStatus:
    known = PeerStatus(
        peer_id=f"12D3KooWabcdef{tail}",
        machine="gpu-box",
        address="192.168.1.7",
        name="NVIDIA H200",
        device_kind="cuda",
        protocol_id="/neurogrid/tensor/1.1.0",
        role=Role.STAGE,
        stage=stage,
        layers_assigned=layers,
        layers_held=layers,
        memory_known=True,
        memory_total_bytes=141 * GB,
        memory_free_bytes=70 * GB,
        memory_used_bytes=GB,
        memory_stage_bytes=12 * GB,
        flops=None,
        read_bytes_per_second=None,
        latency=0.0012,
        step_seconds=0.0123,
        last_step_seconds=0.02,
        health=Health.READY,
        since=0.0,
        num_sessions=3,
        sent_bytes=0,
        received_bytes=0,
        transfer=None,
        lost_reason="",
    )
    return replace(known, **changed)


def cluster(**changed: Any) -> ClusterStatus:
    transfer = TransferStatus(12 * GB, 4 * GB, GB, 0, 120e6, 59.0, is_done=False)
    peers = [
        peer("xAAAAAA4", None, range(18, 36), health=Health.LOST, lost_reason="the stream ended"),
        peer("xAAAAAA2", 2, range(18, 36), health=Health.RECEIVING, transfer=transfer),
        peer("xAAAAAA1", 1, range(18)),
        peer("xAAAAAA3", None, range(18), role=Role.REPLICA, memory_known=False),
    ]
    told = [
        (EventKind.WORKING, Severity.INFO, "Reading the model"),
        (EventKind.PLANNED, Severity.INFO, "Planned 36 layers in 2 stages"),
        (EventKind.WORKER_LOST, Severity.ERROR, LOST),
    ]
    known = ClusterStatus(
        at=1090.0,
        started_at=1000.0,
        peer_id="12D3KooWcoordinator",
        machine="desk",
        addresses=(),
        model="Qwen3-8B",
        total_layers=36,
        phase=Phase.MENDING,
        phase_text="placing layers 18 to 35 anew",
        workers_found=3,
        workers_wanted=2,
        peers={known.peer_id: known for known in peers},
        stages=(),
        links=(),
        num_running=2,
        num_waiting=1,
        num_requests=17,
        num_failed=1,
        num_tokens=12345,
        tokens_per_second=42.34,
        tokens_history=(1.0, 2.0, 4.0),
        requests=(),
        speculation="off",
        num_proposed=0,
        num_accepted=0,
        tokens_per_pass=None,
        failures=(),
        events=tuple(Event(i, 1000.0, *event) for i, event in enumerate(told, 1)),
    )
    return replace(known, **changed)


def rows(
    view: View, *, width: int, height: int = 40, encoding: str = "utf-8", colour: bool = False
) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(
        file=stream,
        force_terminal=True,
        width=width,
        height=height,
        color_system="truecolor" if colour else None,
        _environ={},
    )
    console.print(draw(view, width=width, height=height, encoding=encoding))
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_every_row_has_one_width(width: int, encoding: str) -> None:
    drawn = rows(coordinator_view(cluster(), encoding=encoding), width=width, encoding=encoding)
    assert {cell_len(row) for row in drawn} == {min(width, 150)}
    assert not any("\x1b" in row for row in drawn)


def test_what_it_says() -> None:
    drawn = rows(coordinator_view(cluster(), url="http://127.0.0.1:8090"), width=120)
    assert drawn[0].startswith("╭─ NeuroGrid · Qwen3-8B, 36 layers  placing layers 18 to 35 anew ─")
    assert "http://127.0.0.1:8090 · up 1 min" in drawn[-1]
    first, second, standby, lost = drawn[2:6]
    assert "…xAAAAAA1" in first
    assert "12.0/70.0 GB" in first
    assert "12.3 ms" in first  # a step
    assert "1.2 ms" in first.split("12.3 ms")[1]  # to get there
    assert "[####......]  42% 120.0 MB/s" in second
    assert "stands by" in standby
    assert "70.0 GB?" in standby  # assumed
    assert "lost: the stream ended" in lost
    text = "\n".join(drawn)
    assert "42.3 tokens/s ▃▅█ · 2 running · 1 waiting · 17 done · 1 failed · 12,345 tokens" in text
    assert LOST in text
    assert "Reading the model" not in text


def test_several_models_and_where_each_is() -> None:
    states = [("one", "ready"), ("other", "idle")]
    text = "\n".join(rows(coordinator_view(cluster(), models=states), width=120))
    assert "one ready" in text
    assert "other idle" in text


def test_who_is_waited_for_is_named() -> None:
    silent = {"health": Health.SUSPECTED, "suspicion": "does not answer"}
    stalled = TransferStatus(12 * GB, 4 * GB, GB, 0, 0.0, None, is_done=False, stalled_seconds=23.4)
    status = cluster(
        phase=Phase.READY,
        phase_text="waiting for …xAAAAAA1, which does not answer",
        peers={
            known.peer_id: known
            for known in (
                peer("xAAAAAA1", 1, range(18), **silent),
                peer("xAAAAAA2", 2, range(18, 36), health=Health.RECEIVING, transfer=stalled),
            )
        },
    )
    view = coordinator_view(status)
    assert (view.state, view.state_style) == (status.phase_text, "yellow")
    first, second = rows(view, width=120)[2:4]
    assert "does not answer" in first
    assert "[####......]  42% stalled 23 s" in second


def test_what_was_done_is_told_in_full_on_a_narrow_terminal() -> None:
    drawn = rows(coordinator_view(cluster()), width=60)
    told = " ".join(" ".join(row.strip("│╭╮╰╯─ ").split()) for row in drawn)
    assert LOST in told
    assert "1 failed · 12,345 tokens" in told


def test_colour_says_nothing_that_words_do_not() -> None:
    view = coordinator_view(cluster())
    coloured = rows(view, width=100, colour=True)
    assert any("\x1b[" in row for row in coloured)
    assert [Text.from_ansi(row).plain for row in coloured] == rows(view, width=100)


@pytest.mark.parametrize("height", [10, 14, 24])
def test_a_low_terminal_shows_what_fits(height: int) -> None:
    peers = {
        f"12D3KooW{i:08}": replace(peer("x", i, range(i, i + 1)), peer_id=f"12D3KooW{i:08}")
        for i in range(1, 33)
    }
    drawn = rows(coordinator_view(cluster(peers=peers)), width=80, height=height)
    assert len(drawn) <= max(height - 1, 12)
    assert any(row.startswith("│ and ") and " more" in row for row in drawn)
    assert "looking for a worker for them" in "\n".join(drawn)


def test_before_anything_is_known() -> None:
    begun = cluster(
        model="",
        total_layers=0,
        phase=Phase.READING,
        phase_text="reading the model",
        peers={},
        events=(),
        num_running=0,
        num_waiting=0,
        num_requests=0,
    )
    drawn = rows(coordinator_view(begun), width=60)
    assert drawn[0].startswith("╭─ NeuroGrid  reading the model ─")
    assert len(drawn) == 2


def test_names_of_others_do_not_steer_the_terminal() -> None:
    words = "\x1b[2J\x9b31m[red]evil[/red]\n"
    evil = peer("xAAAAAA1", 1, range(3), name=words, machine=words)
    drawn = rows(coordinator_view(cluster(peers={evil.peer_id: evil})), width=150)
    assert not any("\x1b" in row or "\x9b" in row for row in drawn)
    assert "[red]e" in "\n".join(drawn)  # of the rest the column has no room


def test_generations_that_went_on_together_are_one_note() -> None:
    peer_id = f"12D3KooW{'a' * 44}"
    told = [(EventKind.WORKER_LOST, f"Lost worker …aaaaaaaa: the stream to {peer_id} broke")]
    told += [(EventKind.SESSION_REROUTED, f"Generation {i} goes on: {peer_id}") for i in (4, 7, 2)]
    events = tuple(
        Event(i, 1000.0, kind, Severity.WARNING, text) for i, (kind, text) in enumerate(told, 1)
    )
    lost, went_on = coordinator_view(cluster(events=events)).notes
    assert lost.text == "Lost worker …aaaaaaaa: the stream to …aaaaaaaa broke"
    assert went_on.text == "Generation 4 goes on: …aaaaaaaa (and 2 more)"


def tenant(**changed: Any) -> TenantStatus:
    known = TenantStatus(
        coordinator="12D3KooWxCCCCCCC",
        machine="desk",
        model="Qwen3-8B",
        total_layers=36,
        layers_assigned=range(18, 36),
        num_confirmed=18,
        num_sessions=3,
        promised_bytes=9 * GB,
        has_given_way=False,
    )
    return replace(known, **changed)


def worker(**changed: Any) -> WorkerStatus:
    load = WorkerLoad(
        num_coordinators=1,
        num_sessions=3,
        num_waiting=2,
        weight_bytes=7 * GB,
        cache_used_bytes=GB // 4,
        cache_reserved_bytes=GB,
        cache_limit_bytes=2 * GB,
    )
    coordinator = PeerTraffic(
        "12D3KooWxCCCCCCC", "desk", "192.168.1.2", True, True, 6 * GB, 4000, 0.0, 1500.0
    )
    gone = PeerTraffic("12D3KooWxWWWWWWW", "", "", False, False, 9000, 0, 0.0, 0.0)
    known = WorkerStatus(
        uptime=3725.0,
        peer_id="12D3KooWxOOOOOOO",
        machine="gpu-box",
        name="NVIDIA H200",
        tenants=(tenant(),),
        kept_models=(),
        layers_held=tuple(range(18, 36)),
        memory_total_bytes=141 * GB,
        memory_free_bytes=120 * GB,
        num_given_way=0,
        load=load,
        tokens_per_second=84.2,
        prompt_tokens_per_second=0.0,
        rows_per_pass=2.8,
        busy=0.43,
        weights_from={WeightSource.COORDINATOR: 5 * GB, WeightSource.WORKER: 0},
        peers=(coordinator, gone),
        disk_bytes=3 * GB,
        disk_limit_bytes=50 * GB,
    )
    return replace(known, **changed)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_worker(width: int, encoding: str) -> None:
    drawn = rows(worker_view(worker()), width=width, encoding=encoding)
    assert {cell_len(row) for row in drawn} == {width}
    text = " ".join(" ".join(row.strip("│|").split()) for row in drawn)
    dots = "..." if encoding == "ascii" else "…"
    assert f"NeuroGrid worker {'-' if encoding == 'ascii' else '·'} NVIDIA" in text
    assert f"serves desk {dots}xCCCCCCC" in text
    assert f"gpu-box {dots}xOOOOOOO" in text
    if width >= 120:
        assert f"{dots}xCCCCCCC desk 192.168.1.2 coordinator" in text
    assert "not connected" in text
    for figure in (
        "layers 18-35 of 36",
        "weights 7.0 GB",
        "KV caches 0.2/2.0 GB",
        "84.2 tokens/s",
        "2.8 at once",
        "busy 43%",
        "5.0 GB from the coordinator",
        "cache 3.0/50.0 GB",
    ):
        assert figure in text
    assert "from other workers" not in text


def test_a_worker_that_gets_its_layers_and_one_that_waits() -> None:
    begun = worker_view(worker(tenants=(tenant(num_confirmed=9),)))
    assert begun.state == "gets its layers"
    assert "layers 18-35 [#####.....] 9 of 18" in begun.figures[0]
    waits = worker_view(worker(tenants=(), kept_models=("Qwen3-8B",)))
    assert waits.state == "waits for a coordinator"
    assert waits.figures[0][0] == "Qwen3-8B"
    assert "18 layers kept for the next coordinator" in waits.figures[0]


def test_a_worker_of_several_coordinators() -> None:
    gone = tenant(
        coordinator="12D3KooWxDDDDDDD",
        machine="attic",
        model="Llama-3-8B",
        layers_assigned=range(0),
        num_confirmed=0,
        num_sessions=0,
        promised_bytes=0,
        has_given_way=True,
    )
    view = worker_view(worker(tenants=(tenant(), gone)))
    assert view.state == "serves 2 coordinators"
    first, second = view.figures[:2]
    assert first == (
        "desk …xCCCCCCC",
        "Qwen3-8B",
        "layers 18-35 of 36",
        "3 sessions",
        "memory 9.0 GB",
    )
    assert second[:3] == ("attic …xDDDDDDD", "Llama-3-8B", "gave way while it was idle")


def test_machines_have_names_beside_their_peer_ids() -> None:
    two = [peer("xAAAAAA1", 1, range(18)), peer("xAAAAAA2", 2, range(18, 36), machine="m" * 32)]
    view = coordinator_view(cluster(peers={known.peer_id: known for known in two}))
    first, second = rows(view, width=80)[2:4]
    assert "…xAAAAAA1 gpu-box " in first
    assert f"…xAAAAAA2 {'m' * 15}… ready" in second
    wide = rows(view, width=150)[2]
    assert "…xAAAAAA1 gpu-box " in wide
    assert " 192.168.1.7 " in wide


def test_small_parts() -> None:
    assert bar(0.0, cells=4) == "[....]"
    assert bar(0.5, cells=4) == "[##..]"
    assert bar(7.0, cells=4) == "[####]"
    assert spark([0.0, 0.0]) == ""
    assert spark([1.0, 8.0]) == "▂█"
    assert spark([1.0, 8.0], "ascii") == ""
    assert part_of(3e8, 12.3e9) == "0.3/12.3 GB"
    assert part_of(5e6, 0) == "5.0 MB/0 B"
    assert part_of(3.9e6, 5.7e9) == "3.9 MB/5.7 GB"
    assert part_of(1.2e9, 12.3e9) == "1.2/12.3 GB"
