"""`--help`, `--version` and completion, as somebody meets them who types a command for the first time."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest

from neurogrid import __version__
from neurogrid.cli.commands import coordinator, main, worker
from neurogrid.cli.options.parser import ArgumentParser

PARSERS = {"worker": worker.build_parser, "coordinator": coordinator.build_parser}
EXPLAINS_ITSELF = (argparse._HelpAction, argparse._VersionAction)


@pytest.fixture(params=sorted(PARSERS))
def parser(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> argparse.ArgumentParser:
    monkeypatch.setenv("COLUMNS", "80")
    return PARSERS[request.param]()


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if not isinstance(action, EXPLAINS_ITSELF) and action.help is not argparse.SUPPRESS
    ]


def whole_commands() -> list[ArgumentParser]:
    """All that one can type: the three commands, and the parts of the first."""
    front = main.build_parser()
    assert isinstance(front, ArgumentParser)
    (parts,) = (a for a in front._actions if isinstance(a, argparse._SubParsersAction))
    return [front, *parts.choices.values(), *(make() for make in PARSERS.values())]  # type: ignore[list-item]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for parser in whole_commands():
        for text in (parser.format_help(), parser.format_whole_help()):
            described, _, _ = text.partition("\nexamples:\n")
            assert [line for line in described.splitlines() if len(line) > width] == []
            assert "\x1b" not in text


def test_help_shows_a_dozen_options_and_help_all_shows_all() -> None:
    for parser in whole_commands():
        shown, whole = parser.format_help(), parser.format_whole_help()
        every = [a for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS]
        assert all(action.option_strings[-1] in whole for action in every)
        few = [action for action in every if f"  {action.option_strings[0]}" in shown]
        assert 3 <= len(few) <= 17, parser.prog
        assert ("--help-all" in shown) == (len(few) < len(every)), parser.prog


def test_every_default_is_shown(parser: argparse.ArgumentParser) -> None:
    silent = []
    for action in options(parser):
        is_switch = action.nargs == 0
        if is_switch or action.default in (None, [], argparse.SUPPRESS):
            continue
        shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
        text = parser._get_formatter()._expand_help(action)
        if f"default {shown}" not in text:
            silent.append(action.dest)
    assert silent == []


def test_options_stand_in_groups_and_the_examples_are_right(
    parser: argparse.ArgumentParser,
) -> None:
    (unsorted, *_) = parser._action_groups[1:]
    shown = [a for a in unsorted._group_actions if a.help is not argparse.SUPPRESS]
    names = {name for action in shown for name in action.option_strings}
    assert names == {"-h", "--help", "--help-all", "--version", "--print-completion"}
    examples = parser.format_help().partition("\nexamples:\n")[2]
    commands = [line.split() for line in examples.splitlines() if line[:3] != "   "]
    assert len(commands) >= 3
    known = {name for action in parser._actions for name in action.option_strings}
    for name, *words in commands:
        assert name == parser.prog
        assert {word for word in words if word.startswith("--")} <= known


def test_version(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{parser.prog} {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts(
    parser: argparse.ArgumentParser, shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert "--log-level" in script or "log-level" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_options_and_their_values(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--print-completion", "bash"])
    script = capsys.readouterr().out

    def complete(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in (parser.prog, *words))
        function = f"_shtab_{parser.prog.replace('-', '_')}"
        asked = (
            f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; {function}; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        run = subprocess.run(
            ["bash", "-c", f"{script}\n{asked}"], text=True, capture_output=True, check=True
        )
        return set(run.stdout.split())

    assert complete("--json") == {"--json-logs"}
    assert complete("--max-") >= {"--max-seq-len"}
    assert complete("--log-level", "") == {"debug-all", "debug", "info", "warning", "error"}
    assert complete("--log-level", "wa") == {"warning"}
