"""The parser of both commands: help that fits the terminal, mistakes in one line, version and shell completion."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from neurogrid import __version__
from neurogrid.extras import missing_extra, missing_of

__all__ = ["ArgumentParser", "SHELLS"]

USAGE_STATUS: Final = 2
SHELLS: Final = ("bash", "zsh", "tcsh")
# Columns: wider lines are hard to read; and where the explanations begin.
MAX_WIDTH: Final = 100
HELP_POSITION: Final = 26


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and no wider than people read."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=HELP_POSITION, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in text.strip("\n").splitlines())


class ArgumentParser(argparse.ArgumentParser):
    """Tells a mistake in one line that names it, not below a page of usage.

    Args:
        examples: pairs of a command line and what it does.
    """

    def __init__(
        self, *, prog: str, description: str, examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        lines = [f"  {command}\n      {purpose}" for command, purpose in examples]
        super().__init__(
            prog=prog,
            usage="%(prog)s [OPTION]...",
            description=description,
            epilog="\n".join(["examples:", *lines]) if lines else None,
            formatter_class=HelpFormatter,
        )
        self.add_argument(
            "--version",
            action=_PrintVersion,
            nargs=0,
            help="print the version, and end",
        )
        self.add_argument(
            "--print-completion",
            action=_PrintCompletion,
            choices=SHELLS,
            help="print a script by which that shell completes this command's options, and end",
        )

    def print_help(self, file: Any = None) -> None:
        # Without argparse's own, which takes a reader that has gone for one that has read.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"{self.prog}: {message} (--help explains)\n")


class _PrintVersion(argparse.Action):
    """Prints the version, and whether this is the transport library alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        missing = missing_of("inference")
        print(f"{parser.prog} {__version__}" + (f" ({missing})" if missing else ""))
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a shell's completion script, made from the parser by shtab."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        try:
            import shtab  # here, not above: nobody else needs it
        except ModuleNotFoundError as exc:
            parser.error(str(missing_extra(exc)))

        kinds = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}
        actions: list[Any] = parser._actions  # shtab is told by an attribute that argparse has not
        for action in actions:
            if action.metavar in kinds:
                action.complete = kinds[action.metavar]
        print(shtab.complete(parser, shell=values))
        parser.exit()
