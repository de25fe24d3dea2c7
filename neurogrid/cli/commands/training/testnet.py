"""`neurogrid train testnet`: a run in processes of this machine, some of which are killed, and a report at the end.

stdout gets the report, and `testnet.json` in the run's directory has it for programs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from neurogrid.cli.commands.training.model import add_run_file, run_directory
from neurogrid.cli.options.common import (
    ExitStatus,
    add_output_options,
    positive_float,
    positive_int,
    whole_number,
)
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.testnet import Chaos, ChaosReport, ProcessSettings

__all__ = ["add_testnet_options", "testnet"]


def add_testnet_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_run_file(parser)
    group = parser.add_argument_group("processes", "a leader, and workers that join it")
    group.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="keep the run and the report here (default: runs/NAME, by the name of the run)",
    )
    group.add_argument(
        "--workers",
        type=positive_int,
        default=4,
        metavar="N",
        help="start N workers (default %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=positive_int,
        default=1,
        metavar="N",
        help="each process computes on the CPU with N threads (default %(default)s)",
    )
    group.add_argument(
        "--wait",
        type=positive_float,
        default=300.0,
        metavar="SECONDS",
        help="give the run up when no round comes for so long (default %(default)g)",
    )
    network = parser.add_argument_group(
        "lines", "with one of these each process gets a network namespace; needs Linux and root"
    )
    network.add_argument(
        "--delay",
        type=positive_float,
        metavar="MS",
        help="milliseconds from each process to each other, one way",
    )
    network.add_argument(
        "--rate",
        type=positive_float,
        metavar="MBIT",
        help="megabits that each worker sends and receives in a second",
    )
    chaos = parser.add_argument_group("chaos", "what is killed, and when")
    chaos.add_argument(
        "--kill",
        type=whole_number,
        default=0,
        metavar="N",
        help="kill workers N times in all, each at random, and start them again after a moment (default %(default)s)",
    )
    chaos.add_argument(
        "--join",
        type=whole_number,
        default=0,
        metavar="N",
        help="of the workers that are killed, N are replaced by new ones, which have only the ticket (default "
        "%(default)s)",
    )
    chaos.add_argument(
        "--leader-kills",
        type=whole_number,
        default=0,
        metavar="N",
        help="the same of the leader, in between (default %(default)s)",
    )
    chaos.add_argument(
        "--kill-every",
        type=positive_float,
        default=20.0,
        metavar="SECONDS",
        help="from one kill to the next, from half of it to half as much again (default %(default)g)",
    )
    chaos.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="N",
        help="which are killed and when follows from it (default %(default)s)",
    )
    chaos.add_argument(
        "--undisturbed",
        action="store_true",
        help="afterwards the same run again without kills, in DIR/undisturbed, and how far their held-out losses are "
        "apart",
    )
    add_output_options(parser)


async def testnet(options: argparse.Namespace, screen: Screen) -> int:
    """Carry the run out, and print what came of it; returns the exit status."""
    from neurogrid.training.runs.run_directory import read_run_file

    with ending_at_once():
        run = read_run_file(options.run_file)
    from neurogrid.training.testnet import Chaos, Lines, ProcessSettings
    from neurogrid.training.testnet.network import check_namespaces

    directory = run_directory(options, run)
    chaos = Chaos(
        options.seed,
        options.workers,
        options.kill,
        options.leader_kills,
        options.join,
        options.kill_every,
    )
    if options.undisturbed and run.checkpoints.dir:
        raise ConfigurationError(
            "--undisturbed makes a second run, and [checkpoints] dir is for one alone: leave it out"
        )
    if run.members.min > chaos.num_workers:
        raise ConfigurationError(
            f"the run waits for {run.members.min} members, and a testnet with --workers {chaos.num_workers} never has "
            "as many"
        )
    lines = None
    if options.delay is not None or options.rate is not None:
        check_namespaces()
        rate = None if options.rate is None else options.rate * 1e6
        lines = Lines((options.delay or 0.0) / 1000, rate)
    settings = ProcessSettings(
        options.run_file,
        directory,
        num_threads=options.threads,
        wait=options.wait,
        lines=lines,
        has_seats=not run.is_chain and not run.is_witnessed,
    )
    report = await _carry_out(settings, chaos, screen)
    is_sound = report.is_sound
    if options.undisturbed:
        settings = replace(settings, directory=directory / "undisturbed")
        chaos = replace(chaos, worker_kills=0, leader_kills=0, joins=0)
        screen.say("the same without kills")
        undisturbed = await _carry_out(settings, chaos, screen)
        is_sound = is_sound and undisturbed.is_sound
        screen.print(report.beside(undisturbed))
    return ExitStatus.OK if is_sound else ExitStatus.FAILURE


async def _carry_out(settings: ProcessSettings, chaos: Chaos, screen: Screen) -> ChaosReport:
    """One run, and its report in its directory and on stdout."""
    from neurogrid.training.testnet import run_testnet

    directory = settings.directory
    screen.say(f"the run is kept in {directory}; what each process says is in {settings.logs}")
    report = await run_testnet(settings, chaos, screen.say)
    file = directory / "testnet.json"
    try:
        file.write_text(json.dumps(report.json(), indent=2) + "\n")
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be written: {exc.strerror or exc}") from exc
    for line in report.rows():
        screen.print(line)
    return report
