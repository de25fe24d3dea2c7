"""`neurogrid download`: have a model in the cache, and print where it lies."""

from __future__ import annotations

import argparse

from neurogrid.cli.options.common import (
    ArgumentParser,
    ExitStatus,
    add_output_options,
    run_command,
    set_up_logging,
)
from neurogrid.cli.options.model import add_offline_option, named_model
from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import parse_name

__all__ = ["add_download_options", "build_parser", "run"]

NAME = "neurogrid download"


def build_parser() -> argparse.ArgumentParser:
    """The options of the command, without what it is to fetch."""
    parser = ArgumentParser(prog=NAME, description="", is_whole=False)
    add_download_options(parser)
    return parser


def add_download_options(parser: argparse.ArgumentParser) -> None:
    """All options of the command."""
    add_offline_option(parser.add_argument_group("model"))
    add_output_options(parser)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit status."""
    screen = set_up_logging(options.log_level, as_json=options.json_logs)

    async def fetch() -> int:
        name = parse_name(options.name)
        if name is None:
            raise ConfigurationError(
                f"{options.name[:200]!r} is no name of a model at a hub: those are OWNER/NAME, OWNER/NAME:QUANT or "
                "OWNER/NAME@REVISION, of letters, digits, -, _ and ."
            )
        folder = await named_model(name, screen, is_offline=options.offline, is_renewed=True)
        screen.print(str(folder))
        return ExitStatus.OK

    return run_command(parser.prog, fetch, screen=screen)
