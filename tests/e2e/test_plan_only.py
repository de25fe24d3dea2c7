"""`--plan-only`: workers say what they have, the plan is printed, and nothing is sent."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.commands import Ended, expect, run_preloaded
from tests.e2e.support import WorkerProcess, start_worker

# The embedded model's eight layers take 8 MB with one session; 5 MiB are room for some of them.
TIGHT = "5MiB"


def plan(*args: str) -> Ended:
    return run_preloaded("coordinator", "--plan-only", *args)


def peers(*workers: WorkerProcess) -> list[str]:
    return [word for worker in workers for word in ("--peer", worker.address)]


def rows(ended: Ended) -> dict[str, dict[str, str]]:
    """The table on stdout, by the end of the worker's peer id."""
    lines = ended.stdout.partition("\n\n")[0].splitlines()
    columns = re.split(r"\s{2,}", lines[0].strip())
    table = {}
    for line in lines[1:]:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            table[row["worker"].lstrip("…")] = row
    return table


def test_who_gets_what_who_stands_by_and_how_fast_it_would_be(tmp_path: Path) -> None:
    # Workers of its own: those that files share may hold the layers since another file's test.
    with start_worker(tmp_path) as one, start_worker(tmp_path) as other:
        ended = plan(*peers(one, other), "--stages", "1", "--max-sessions", "3")
    assert ended.status == 0, ended.stderr
    table = rows(ended)
    assert set(table) == {one.peer_id[-8:], other.peer_id[-8:]}
    assert sorted(row["stage"] for row in table.values()) == ["1", "replica"]
    for row in table.values():
        assert row["layers"] == "0-7"
        assert row["to send"] == row["weights"] != "0 B"
        # Three sessions of 1,024 tokens, keys and values of 128 floats in 8 layers.
        assert row["caches"] == "6.3 MB"
    (stage,) = (row for row in table.values() if row["stage"] == "1")
    assert float(stage["tokens/s"]) > 1
    assert "stands by for stage 1" in ended.stdout
    assert re.search(r"expected speed: [\d.]+ tokens/s for one session", ended.stdout)
    *_, rate = next(line for line in ended.stdout.splitlines() if line.startswith("int4")).split()
    assert float(rate) > 1


def test_what_each_form_of_the_layers_would_take(tmp_path: Path) -> None:
    def form_rows(ended: Ended) -> dict[str, list[str]]:
        assert ended.status == 0, ended.stderr
        lines = ended.stdout.splitlines()
        first = next(i for i, line in enumerate(lines) if line.strip().startswith("--quantize"))
        cells = [re.split(r"\s{2,}", line.strip()) for line in lines[first + 1 :]]
        return {name: rest for name, *rest in cells}

    # Room for all of the layers in 8 bits, and not as they are.
    with start_worker(tmp_path, "--memory-limit", "13MiB") as worker:
        choices = form_rows(plan(*peers(worker), "--quantize", "int8", "--local-layers", "none"))
        alone = plan(*peers(worker), "--local-layers", "none")
    assert set(choices) == {"as it is", "int8 *", "int4"}
    assert choices["as it is"][1:] == ["does not fit", "-"]
    whole, largest, _ = choices["int4"]
    assert whole == largest
    sizes = [float(row[0].split()[0]) for row in choices.values()]
    assert sizes[0] > 1.7 * sizes[1] > 1.7 * 1.7 * sizes[2]
    expect(alone, status=1, says="smaller with --quantize")


def test_layers_that_are_there_need_not_be_sent(tmp_path: Path) -> None:
    with start_worker(tmp_path, "--cache-dir", str(tmp_path / "cache")) as worker:
        written = run_preloaded(
            *("coordinator", *peers(worker), "--prompt", "A class", "--max-tokens", "1")
        )
        assert written.status == 0, written.stderr
        held = plan(*peers(worker))
    assert rows(held)[worker.peer_id[-8:]]["to send"] == "0 B", held.stdout
    # Nor by a worker that has them on its disk alone.
    with start_worker(tmp_path, "--cache-dir", str(tmp_path / "cache")) as worker:
        cached = plan(*peers(worker))
    assert rows(cached)[worker.peer_id[-8:]]["to send"] == "0 B", cached.stdout


def test_why_a_worker_gets_nothing_and_what_is_missing(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    with start_worker(tmp_path, "--memory-limit", TIGHT, "--name", "attic") as tight:
        ended = plan(*peers(workers[0], tight))
        assert ended.status == 0, ended.stderr
        row = rows(ended)[tight.peer_id[-8:]]
        assert (row["stage"], row["machine"], row["address"]) == ("-", "attic", "127.0.0.1")
        assert (
            f"attic …{tight.peer_id[-8:]}: not needed, and too little memory to stand by: 4.7 MB usable, "
            "and the smallest stage takes " in ended.stdout
        )
        alone = plan(*peers(tight), "--local-layers", "none")
    expect(alone, status=1, says="the layers do not fit: ")
    assert "available on 1 worker" in alone.error
    assert alone.stdout == ""
