"""`neurogrid`: one command over coordinator and worker.

    neurogrid run [MODEL] TEXT      a coordinator with --prompt
    neurogrid chat [MODEL]          with --chat
    neurogrid serve [MODEL]         without either
    neurogrid plan [MODEL]          with --plan-only
    neurogrid diagnose              with --diagnose
    neurogrid ticket DIR            with --cluster DIR --ticket
    neurogrid join [TICKET]         a worker with --join
    neurogrid download NAME         fetches a model, and no more
    neurogrid identity [DIR]        shows who this peer is
    neurogrid train RUN.toml        leads a training run (`train_words`)

Each but the last three has the options of `neurogrid-coordinator` or `neurogrid-worker` that mean something to it, from
the same functions, and is carried out by the same code. What is different: without any option that names others, or
lets them in, a coordinator computes alone on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from neurogrid.cli.commands import coordinator, download, identity, worker
from neurogrid.cli.commands.cluster import add_ticket_options
from neurogrid.cli.commands.command import Command
from neurogrid.cli.commands.coordinator_options import (
    add_generation_options,
    add_model_options,
    add_prompt_options,
    add_worker_options,
)
from neurogrid.cli.commands.serve import add_serving_options
from neurogrid.cli.commands.train_words import TRAIN_COMMANDS
from neurogrid.cli.entry import leave
from neurogrid.cli.options.common import ArgumentParser, add_common_options
from neurogrid.cli.options.model import HUB_NAMES, named_model_place
from neurogrid.cli.options.trust import take_ticket
from neurogrid.cli.signals import ending_at_once
from neurogrid.cli.terminal.closed_pipe import ends_with_its_reader
from neurogrid.hub.names import model_place, parse_name

__all__ = ["COMMANDS", "build_parser", "is_alone", "main", "model_and_text", "parse"]

NAME: Final = "neurogrid"
EXAMPLES: Final = (
    (f'{NAME} run "A function definition"', "let the small model that comes along write"),
    (f"{NAME} chat DIR", "talk to the model in DIR, on this machine"),
    (
        f"{NAME} serve Qwen/Qwen3-8B",
        "the page and the API of OpenAI, at http://127.0.0.1:8090, of a model at the hub",
    ),
    (f"{NAME} serve DIR --new-cluster ~/cluster --min-peers 2", "the same, on two more machines"),
    (f"{NAME} join -", "on those, with the ticket that the line above prints"),
)
# What somebody asks of whichever of them.
OTHERS: Final = ("--new-cluster", "--cluster", "--min-peers", "--local-workers", "--peer")
SAMPLING: Final = ("--max-tokens", "--temperature", "--top-p", "--seed")
RUN_FILE: Final = ".toml"
# Files that are models, of kinds that are not read: whoever names one means a model.
WEIGHTS: Final = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ggml")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        type=model_place,
        metavar="MODEL",
        help=f"{HUB_NAMES} (default: a small model that comes along)",
    )
    add_model_options(parser)
    add_worker_options(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_arguments",
        nargs="*",
        type=named_model_place,
        metavar="[NAME=]MODEL",
        help=f"{HUB_NAMES} (default: a small model that comes along); several are served side by side, each under its "
        "name",
    )
    add_model_options(parser)
    add_worker_options(parser)
    add_serving_options(parser)
    _add_coordinator(parser)


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that has workers."""
    coordinator.add_coordinator_options(parser)
    add_ticket_options(parser.add_argument_group("cluster"))


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_generation_options(parser)
    _add_coordinator(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] TEXT",
        help=f"{HUB_NAMES} (default: a small model that comes along), and the text to continue, or - for standard "
        "input. One word alone is the text, unless it is a directory, a name at a hub, or written as a path; "
        "--model MODEL and --prompt TEXT say which is which",
    )
    add_model_options(parser)
    add_worker_options(parser)
    add_prompt_options(parser, with_chat=False)
    add_generation_options(parser, with_system=False)
    _add_coordinator(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_coordinator(parser)


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    add_worker_options(parser)
    add_common_options(parser, port_flag="--p2p-port", is_worker=False)


def _add_download(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the model at a hub: OWNER/NAME; OWNER/NAME:QUANT of several in GGUF (Q4_K_M); OWNER/NAME@REVISION for a "
        "branch, a tag or a commit",
    )
    download.add_download_options(parser)


def _add_identity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="what --cluster names to a worker or a coordinator, or the directory of a training run that is led here",
    )
    identity.add_identity_options(parser)


def _add_ticket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="of the cluster, on the machine that made it",
    )
    add_ticket_options(parser)
    parser.add_argument(
        "--deputy",
        action="store_true",
        help="the ticket is for a deputy of the run that has this cluster (neurogrid train deputy), which may lead it",
    )
    add_common_options(parser, port_flag="--p2p-port", is_worker=False)


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ticket_argument",
        nargs="?",
        metavar="TICKET",
        help="what the coordinator printed; @FILE reads it from a file, - from standard input. With --cluster DIR "
        "it is needed the first time only",
    )
    worker.add_worker_options(parser)


COMMANDS: Final = (
    Command(
        "run",
        "[MODEL] TEXT",
        "continue a text, and end",
        "Let a model continue a text, on stdout, and end.",
        (*SAMPLING, "--prompt-file", "--adapter", "--dtype", "--quantize", *OTHERS),
        (
            ('run "A function definition"', "the small model that comes along"),
            ('run ~/models/Qwen3-8B "The first law" --max-tokens 60', "a model of yours"),
            ("run ~/models/Qwen3-8B - < text.txt", "a text from a file"),
        ),
        _add_run,
        {"chat": False, "system": None},
    ),
    Command(
        "chat",
        "[MODEL]",
        "talk to a model in the terminal",
        "Talk to a model in the terminal; on a pipe, each line of stdin is a turn.",
        ("--system", *SAMPLING, "--adapter", "--max-seq-len", "--dtype", "--quantize", *OTHERS),
        (
            ("chat ~/models/Qwen3-8B", "on this machine"),
            ('chat ~/models/Qwen3-8B --system "Be brief."', "told something first"),
            ("chat ~/models/Qwen3-8B --cluster ~/cluster --min-peers 2", "on two workers"),
        ),
        _add_chat,
        {"chat": True, "prompt": None, "prompt_file": None},
    ),
    Command(
        "serve",
        "[MODEL]...",
        "serve a model, or several, over HTTP: a page, and the API of OpenAI",
        "Serve a model, or several, over HTTP: a page, and the API of OpenAI below /v1.",
        (
            *("--http-port", "--http-host", "--api-key-file", "--max-sessions", "--max-seq-len"),
            *("--adapter", "--dtype", "--quantize", *OTHERS),
        ),
        (
            ("serve ~/models/Qwen3-8B", "on this machine"),
            (
                "serve ~/models/Qwen3-8B --new-cluster ~/cluster --min-peers 2",
                "on two workers that join with the ticket it prints",
            ),
            ("serve ~/models/Qwen3-8B --cluster ~/cluster --min-peers 2", "the next time"),
            ("serve ~/models/Qwen3-8B --adapter runs/adapter", "with what a run has learned"),
            ("serve ~/models/Qwen3-8B small=~/models/Qwen3-1.7B", "two models, by their names"),
        ),
        _add_serve,
        {"chat": False, "prompt": None, "prompt_file": None, "system": None},
    ),
    Command(
        "join",
        "[TICKET]",
        "lend this machine to a cluster that serves, or to a training run",
        "Hold some layers of a model that is served, or train one together with others. Nothing is needed on disk: "
        "config, weights and data come from whoever printed the ticket.",
        worker.FIRST,
        (
            (
                "join - --cluster ~/member",
                "with the ticket, when it is asked for, and remember the cluster",
            ),
            ("join @ticket --cluster ~/member", "the same, with the ticket in a file"),
            ("join --cluster ~/member", "the next time"),
        ),
        _add_join,
        {},
    ),
    Command(
        "ticket",
        "DIR",
        "print a line by which a machine joins a cluster",
        "Print the line by which a worker joins the cluster that was made in DIR; a coordinator that runs goes on.",
        (
            "--expires",
            "--uses",
            "--ticket-role",
            "--ticket-file",
            "--announce",
            "--listen",
            "--relay",
        ),
        (
            ("ticket ~/cluster", "good for a day"),
            ("ticket ~/cluster --expires 7d --uses 3", "for a week, and for three machines"),
            (
                "ticket runs/run/cluster --ticket-role trainer",
                "to train in that run, and nothing else",
            ),
        ),
        _add_ticket,
        {"ticket": True},
    ),
    Command(
        "identity",
        "[DIR]",
        "who this peer is, and what it is a member of",
        "Print the peer id, the fingerprint and the file of this peer's key, and which cluster it is a member of, in "
        "which role and until when. The key itself is never printed.",
        (),
        (
            ("identity ~/member", "of the worker that joins with --cluster ~/member"),
            ("identity runs/run --json", "of the leader of a training run, for a program"),
            ("identity ~/member --new", "make the key before the worker runs the first time"),
        ),
        _add_identity,
        {},
    ),
    Command(
        "plan",
        "[MODEL]",
        "which machine would hold which layers, and how fast that would be",
        "Wait for the workers, print which layers each would hold and how fast that would be, and end: nothing is "
        "sent.",
        (
            "--stages",
            "--max-sessions",
            "--max-seq-len",
            "--dtype",
            "--quantize",
            "--local-layers",
            *OTHERS,
        ),
        (
            ("plan ~/models/Qwen3-8B", "on this machine"),
            ("plan ~/models/Qwen3-8B --cluster ~/cluster --min-peers 2", "on two workers"),
            ("plan run.toml", "of a training run: what each stage takes (train check)"),
        ),
        _add_plan,
        {"plan_only": True, "prompt": None, "prompt_file": None},
    ),
    Command(
        "download",
        "NAME",
        "fetch a model, and print where it lies",
        "Fetch a model from a hub into the cache of this machine, as far as it is not there, and print its directory. "
        "Config, safetensors and tokenizer are fetched, or one model in GGUF, and nothing else.",
        (),
        (
            ("download Qwen/Qwen3-8B", "what every command takes by its name from then on"),
            ("download Qwen/Qwen3-8B@REVISION", "as it is at a commit, a tag or a branch"),
        ),
        _add_download,
        {},
    ),
    Command(
        "diagnose",
        "",
        "which workers are there, and what was tried to find them",
        "Look for workers, print what was tried and what came of it, and end.",
        ("--cluster", "--peer", "--bootstrap", "--dht", "--relay", "--mdns-interface", "--wait"),
        (
            ("diagnose --cluster ~/cluster", "the members of a cluster"),
            ("diagnose --peer MULTIADDR", "whether that worker answers"),
        ),
        _add_diagnose,
        {"diagnose": True},
    ),
    *TRAIN_COMMANDS,
)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `neurogrid`: a parser for each of `COMMANDS` below it."""
    parser = ArgumentParser(
        prog=NAME,
        description="One model on several machines, or on this one. COMMAND --help explains a command.",
        examples=EXAMPLES,
        usage="COMMAND ...",
    )
    parts = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", prog=NAME, parser_class=_PartParser
    )
    for command in COMMANDS:
        parts.add_parser(command.name, help=command.summary)
    parser._action_groups.insert(0, parser._action_groups.pop())  # what is typed first stands first
    return parser


class _PartParser(ArgumentParser):
    """The parser of one of the commands, as argparse makes it: by both words."""

    def __init__(self, *, prog: str) -> None:
        command = _command(prog.removeprefix(f"{NAME} "))
        super().__init__(
            prog=prog,
            description=command.description,
            first=command.first,
            examples=[(f"{NAME} {line}", purpose) for line, purpose in command.examples],
            usage=" ".join(filter(None, [command.argument, "[OPTION]..."])),
            is_whole=False,
        )
        command.add_options(self)


def _command(name: str) -> Command:
    return next(command for command in COMMANDS if command.name == name)


def _typed(argv: Sequence[str]) -> tuple[Command | None, Sequence[str]]:
    """The command that the first words are, and what stands behind it: `train check` before `train`.

    What a run file comes to is told by `train check`, also where it is asked of `plan`.
    """
    for length in (2, 1):
        for command in COMMANDS:
            if list(argv[:length]) == command.name.split(" "):
                rest = argv[length:]
                is_run = command.name == "plan" and any(word.endswith(RUN_FILE) for word in rest)
                return (_command("train check") if is_run else command), rest
    return None, argv


def parse(argv: Sequence[str]) -> tuple[Command, ArgumentParser, argparse.Namespace]:
    """The command, its parser, and its options as those of `neurogrid-coordinator` or `neurogrid-worker`."""
    command, rest = _typed(argv)
    if command is None:
        parser = build_parser()
        parser.parse_args(argv)  # says its help or version, or what is wrong
        parser.print_help()
        parser.exit()
    parser = _PartParser(prog=f"{NAME} {command.name}")
    whole = command.carrier.build_parser()
    # What the command has no option for has its default, or what the command stands for.
    options = argparse.Namespace(**{**vars(whole.parse_args([])), **command.mode})
    # Intermixed: arguments may stand before, behind and between options.
    parser.parse_intermixed_args(rest, options)
    _take_arguments(command, parser, options)
    if command.carrier is coordinator:
        options.alone = not options.diagnose and not options.ticket and is_alone(options)
        if options.alone:
            options.min_peers = 0
    return command, parser, options


def _take_arguments(command: Command, parser: ArgumentParser, options: argparse.Namespace) -> None:
    """Put what stands without a flag where the options have it."""

    def once(flag: str, has: object) -> None:
        if has:
            parser.error(f"{flag} names it already: give one of both")

    if command.name == "run":
        _take_words(parser, options)
    elif command.name == "serve":
        if options.model_arguments:
            once("--model", options.model)
            (name, options.model), *others = options.model_arguments
            if name is not None:
                once("--model-name", options.model_name)
                options.model_name = name
            options.with_model = [*others, *options.with_model]
    elif command.takes_model:
        if options.model_argument is not None:
            once("--model", options.model)
            options.model = options.model_argument
    elif command.name == "ticket":
        once("--cluster", options.cluster)
        options.cluster = options.directory
    elif command.name == "join":
        if options.ticket_argument is not None:
            once("--join", options.join)
            options.join = options.ticket_argument
        take_ticket(options)
        if not (options.join or options.cluster or options.allow or options.insecure):
            parser.error(
                "a ticket is needed, which the coordinator prints (neurogrid serve DIR --new-cluster DIR), or "
                "--cluster DIR where this machine has joined before; for a worker of this machine alone type "
                "neurogrid-worker"
            )


def _take_words(parser: ArgumentParser, options: argparse.Namespace) -> None:
    words: list[str] = options.words
    has_text = options.prompt is not None or options.prompt_file is not None
    most = 2 - has_text - (options.model is not None)
    if len(words) > most:
        if len(words) > 2:
            quoted = " ".join(words)
            parser.error(f"a text of several words stands in quotes: {NAME} run {quoted!r}")
        _refuse(parser, f"{words[-1]!r} is more than there is place for")
    if options.model is not None:
        model, text = None, words[0] if words else None
    elif has_text:
        model, text = words[0] if words else None, None
    else:
        model, text = model_and_text(words)
    if model is not None:
        options.model = model_place(model)
    if text == "-":
        options.prompt_file = "-"
    elif text is not None:
        options.prompt = text
    elif not has_text:
        named = f"{model} is taken for a model, and " if model is not None else ""
        _refuse(parser, f"{named}there is no text to continue")


def _refuse(parser: ArgumentParser, what: str) -> NoReturn:
    parser.error(
        f"{what}: {NAME} run [MODEL] TEXT, where - reads the text from standard input; --prompt TEXT and --model MODEL "
        "say which is which"
    )


def model_and_text(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return which of at most two words is the model, and which the text to continue; None for what is not there.

    One word alone is the text, unless it is a directory, a file of weights, or written as a path or as the name of a
    model elsewhere: it has a slash, and no white space.
    """
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    (word,) = words
    is_model = (
        os.path.isdir(word)
        or word.endswith(WEIGHTS)
        or parse_name(word) is not None
        or (word.startswith(("/", "./", "../", "~")) and not any(map(str.isspace, word)))
    )
    return (word, None) if is_model else (None, word)


def is_alone(options: argparse.Namespace) -> bool:
    """Whether a coordinator with these options is to compute by itself: nothing names others, or lets them in."""
    others = (
        *(options.peer, options.local_workers, options.bootstrap, options.dht, options.relay),
        *(options.cluster, options.new_cluster, options.allow, options.insecure),
        os.environ.get("NEUROGRID_BOOTSTRAP"),
    )
    return options.min_peers is None and options.local_layers == "auto" and not any(others)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    with ending_at_once():
        command, parser, options = parse(sys.argv[1:] if argv is None else argv)
        status: int = command.carrier.run(parser, options)
        return status


if __name__ == "__main__":
    leave(main())
