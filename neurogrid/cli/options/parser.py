"""The parser of all commands: help that fits the terminal, mistakes in one line, version and shell completion."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
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
        first: the flags that `--help` shows, in that order, where `--help-all` shows all; empty where both are one.
        examples: pairs of a command line and what it does.
        usage: what stands behind the command's name.
        is_whole: a command by itself, and no part of one that tells its version and completes its options.
    """

    def __init__(
        self,
        *,
        prog: str,
        description: str,
        first: Sequence[str] = (),
        examples: Sequence[tuple[str, str]] = (),
        usage: str = "[OPTION]...",
        is_whole: bool = True,
    ) -> None:
        self._first = tuple(first)
        lines = [f"  {command}\n      {purpose}" for command, purpose in examples]
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {usage}",
            description=description,
            epilog="\n".join(["examples:", *lines]) if lines else None,
            formatter_class=HelpFormatter,
            # `--port 8123` is no `--port-mapping`, with 8123 for the model.
            allow_abbrev=False,
        )
        if self._first:
            self.add_argument(
                "--help-all",
                action=_PrintWholeHelp,
                nargs=0,
                help="show all options, not only those that most people need, and end",
            )
        if not is_whole:
            return
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

    def format_help(self) -> str:
        """Return what `--help` prints: the first flags, where there are such."""
        if not self._first:
            return self.format_whole_help()
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        words = [action for action in self._actions if not action.option_strings]
        shown = [*words, *(by_flag[flag] for flag in (*self._first, "--help", "--help-all"))]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("options, the first of them")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def format_whole_help(self) -> str:
        """Return what `--help-all` prints."""
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        # Without argparse's own, which takes a reader that has gone for one that has read.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if flag and (meant := self._like(flag[1])):
            message += f": is {meant} meant?"
        self.exit(USAGE_STATUS, f"{self.prog}: {message} (--help explains)\n")

    def _like(self, typed: str) -> str:
        """The flag that may be meant by what was typed; empty for none."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        ending = [flag for flag in flags if flag.endswith(typed.removeprefix("-"))]
        return next(iter(ending or get_close_matches(typed, flags, n=1)), "")


class _PrintWholeHelp(argparse.Action):
    """Prints all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, ArgumentParser)
        sys.stdout.write(parser.format_whole_help())
        parser.exit()


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

        kinds = {"DIR": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY, "FILE": shtab.FILE}
        _drop_phrases(parser)
        actions: list[Any] = list(_actions_of(parser))
        for action in actions:
            if action.metavar in kinds:
                action.complete = kinds[action.metavar]  # an attribute that argparse has not
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _drop_phrases(parser: argparse.ArgumentParser) -> None:
    """Leave out parts that are called by two words: shells complete one at a time."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in [name for name in action.choices if " " in name]:
                del action.choices[name]
            action._choices_actions = [
                each for each in action._choices_actions if " " not in each.dest
            ]


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser, and those of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for part in dict.fromkeys(action.choices.values()):
                yield from _actions_of(part)
