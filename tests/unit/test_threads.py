"""What the commands tell OpenMP before torch is loaded, and whose word counts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from neurogrid.cli.options.threads import prepare_threads
from neurogrid.fleet.local_workers import _threads_of_each


def told(environment: dict[str, str], threads: int | None = None) -> dict[str, str]:
    prepare_threads(argparse.Namespace(threads=threads), environment)
    return environment


def test_who_waits_sleeps_unless_the_user_says_otherwise() -> None:
    assert told({}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    for own in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "1"}):
        assert told(dict(own)) == own


def test_the_option_counts_before_the_environment() -> None:
    assert told({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert told({"OMP_NUM_THREADS": "8"}, 3)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("total", "count", "each"), [(8, 2, "4"), (8, 3, "2"), (1, 4, "1")])
def test_local_workers_get_equal_parts(total: int, count: int, each: str) -> None:
    assert _threads_of_each(count, total) == ("--threads", each)


def test_local_workers_have_what_the_environment_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _threads_of_each(2, None) == ()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _threads_of_each(10**6, None) == ("--threads", "1")


def test_nothing_of_the_command_line_loads_torch_before_it_is_told() -> None:
    """OpenMP would have read its environment by then."""
    code = "import sys, neurogrid.cli.commands.main; sys.exit('torch' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
