"""The reference of the commands' flags, from their parsers: docs/reference/flags.md, which make_reference writes.

The parsers are imported, since they are put together at run time, out of parts that both commands share. Nothing on
the page depends on the machine or on the version of argparse.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import import_module

from sources import ROOT

__all__ = ["flags", "page"]

COMMANDS = {
    "neurogrid-coordinator": "neurogrid.cli.commands.coordinator",
    "neurogrid-worker": "neurogrid.cli.commands.worker",
}
# Its commands have flags of those, and arguments.
FRONT, FRONT_MODULE = "neurogrid", "neurogrid.cli.commands.main"
HEAD = """# Flags

Of all commands, as `--help-all` has them; `--help` shows those that most people need. Exit status: 0; 1, what was asked
for failed; 2, it cannot be right; 3, a bug of ours. Sizes take units: `8GiB`, `500MB`; time spans: `30m`, `24h`, `7d`.
`MULTIADDR` is an address as the commands print it: `/ip4/192.168.1.5/tcp/9000/p2p/12D3KooW…`.

| variable | |
|---|---|
| `NEUROGRID_BOOTSTRAP` | more addresses for `--bootstrap`, separated by commas or white space |
| `XDG_CACHE_HOME` | where the cache lies, in a directory `neurogrid`, without `--cache-dir` |
| `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` | of models by name: [models.md](../models.md) |
| `NO_COLOR` | no colours on a terminal |
"""


def _parser(module: str) -> argparse.ArgumentParser:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    parser = import_module(module).build_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def flags() -> dict[str, frozenset[str]]:
    """Every flag of each command, hidden ones included."""
    found = {command: _flags_of(_parser(module)) for command, module in COMMANDS.items()}
    front = _parser(FRONT_MODULE)
    return {**found, FRONT: _flags_of(front).union(*map(_flags_of, _parts(front).values()))}


def _flags_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


def _parts(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands below a command."""
    (parts,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(parts.choices)


def page() -> str:
    """The text of the page."""
    lines = [HEAD, *_front()]
    for command, module in COMMANDS.items():
        parser = _parser(module)
        lines += [f"## {command}", "", _cell(_joined(parser.description or "")), ""]
        for group in parser._action_groups:
            shown = [item for item in group._group_actions if item.help != argparse.SUPPRESS]
            if shown and group.title is not None:
                lines += [f"### {command}: {group.title}", ""]
                lines += [_cell(_joined(group.description)), ""] if group.description else []
                lines += ["| flag | |", "|---|---|", *(_row(parser, item) for item in shown), ""]
    return "\n".join(lines).rstrip() + "\n"


def _front() -> Iterator[str]:
    """The command over the two, and what each of its commands has of their flags."""
    parser = _parser(FRONT_MODULE)
    yield from (f"## {FRONT}", "", _cell(_joined(parser.description or "")), "")
    yield from ("| command | | flags, by groups |", "|---|---|---|")
    for part in _parts(parser).values():
        groups = [
            str(group.title)
            for group in part._action_groups[2:]
            if any(action.help != argparse.SUPPRESS for action in group._group_actions)
        ]
        usage = str(part.usage).replace("%(prog)s", part.prog).removesuffix(" [OPTION]...")
        yield f"| `{usage}` | {_cell(_joined(part.description or ''))} | {', '.join(groups)} |"
    yield ""
    for name, part in _parts(parser).items():
        for action in part._actions:
            if not action.option_strings:
                yield f"`{action.metavar}` of `{name}`: {_cell(_joined(action.help or ''))}."
                yield ""


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    explanation = _joined((action.help or "") % {**vars(action), "prog": parser.prog})
    return f"| {', '.join(_names(action))} | {_cell(explanation)} |"


def _names(action: argparse.Action) -> Iterator[str]:
    value = ""
    if action.nargs != 0:
        choices = "|".join(map(str, action.choices)) if action.choices is not None else ""
        name = action.metavar if isinstance(action.metavar, str) else ""
        value = f" {name or choices or action.dest.upper()}"
        if action.nargs == "?":
            value = f" [{value.strip()}]"
    for flag in action.option_strings:
        text = f"{flag}{value}".replace("|", r"\|")
        yield f"`{text}`"


def _joined(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Text of a cell in Markdown: flags as code, and nothing that would be taken for markup."""
    text = text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*( DIR)?)", r"`\1`", text)
