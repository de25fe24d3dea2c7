"""The commands behind `neurogrid train`: a run file, or a word that says what else.

    neurogrid train RUN.toml            lead a run
    neurogrid train check RUN.toml      whether it is right, and what it takes
    neurogrid train prepare SOURCE OUT  make a data set
    neurogrid train data DIR            serve one to the members of a run
    neurogrid train deputy DIR          copy a run, and lead it when its leader is dead
    neurogrid train status DIR          how far a run is
    neurogrid train verify JOURNAL      whether its journal is whole
    neurogrid train change DIR KEY=VALUE    change what a run goes by
    neurogrid train export DIR OUT      write its model
    neurogrid train testnet RUN.toml    try it on this machine, with workers that are killed

A file that is called like one of the words is ./check.
"""

from __future__ import annotations

from typing import Final

from neurogrid.cli.commands.command import Command
from neurogrid.cli.commands.train import (
    add_change_options,
    add_check_options,
    add_data_options,
    add_deputy_options,
    add_export_options,
    add_prepare_options,
    add_run_options,
    add_status_options,
    add_testnet_options,
    add_verify_options,
)

__all__ = ["TRAIN_COMMANDS"]

TRAIN_COMMANDS: Final = (
    Command(
        "train",
        "RUN.toml",
        "train a model together with other machines",
        "Lead a training run to its end. Others join it with the ticket that it prints (neurogrid join); the path of "
        "the last checkpoint goes to stdout. The run file needs [model] config, [data] path, and something in [stop].",
        ("--local-workers", "--dir", "--resume", "--wait", "--p2p-port", "--ticket-file"),
        (
            ("train run.toml --local-workers 2", "on two workers of this machine"),
            ("train run.toml", "on the machines that join"),
            ("train run.toml --resume", "go on with it"),
            ("train check run.toml", "whether it is right, and what it takes"),
        ),
        add_run_options,
        {"word": "run"},
    ),
    Command(
        "train check",
        "RUN.toml",
        "whether a run file is right, and what the run takes",
        "Print a run file with all its defaults, and below it, as comments, what the run takes: parameters, memory of "
        "a member, bytes and time of a round; of a model in stages, what each of them takes.",
        (),
        (
            ("train check run.toml", "memory, bytes and rounds"),
            ("train check run.toml --speed 4000 --bandwidth 10MB", "and how long it takes"),
            ("train check run.toml --memory 4GB", "whether a model in stages fits"),
        ),
        add_check_options,
        {"word": "check"},
    ),
    Command(
        "train prepare",
        "SOURCE OUT",
        "make a data set of text or images",
        "Make a data set: slices, which machines send one another, and a manifest. Its directory is [data] path of run "
        "files.",
        (),
        (
            ("train prepare texts/ data/", "with a tokenizer that is trained on the text"),
            ("train prepare texts.jsonl data/ --tokenizer DIR", "with one that there is"),
        ),
        add_prepare_options,
        {"word": "prepare"},
    ),
    Command(
        "train data",
        "DIR",
        "serve a data set to the members of a run",
        "Serve the slices of a data set to the members of a run, until a signal ends it.",
        ("--join", "--cluster", "--port", "--listen"),
        (
            ("train data data/ --join @ticket", "with the ticket of the run in a file"),
            ("train data data/ --join - --cluster ~/member", "and remember the cluster"),
        ),
        add_data_options,
        {"word": "data"},
    ),
    Command(
        "train deputy",
        "DIR",
        "copy a run as it goes, and lead it when its leader is dead",
        "Keep a copy of a run in DIR, line by line as its leader writes the journal. When the leader has been silent "
        "for some seconds, ask the members, and lead the run to its end with the promises of most of them.",
        ("--join", "--cluster", "--port", "--listen"),
        (
            ("train deputy copy/ --join @ticket", "with a ticket for deputies in a file"),
            ("train deputy copy/", "the same again: it remembers the run"),
        ),
        add_deputy_options,
        {"word": "deputy"},
    ),
    Command(
        "train status",
        "DIR",
        "how far a run is",
        "Print how far a run is, by what is in its directory: whether or not it is going on.",
        (),
        (("train status runs/run", "rounds, loss, speed, and the newest checkpoint"),),
        add_status_options,
        {"word": "status"},
    ),
    Command(
        "train verify",
        "JOURNAL",
        "whether the journal of a run is whole, and what the run came to",
        "Go through the journal of a run from its first line: whether each is as it was signed and follows from those "
        "before, and whether each sample of an epoch was used exactly once. Status 0 if so; else 1, and the first line "
        "that is wrong.",
        ("--json",),
        (
            ("train verify runs/run", "of the run that is kept there"),
            ("train verify copy-of-journal --json", "of a file alone, for a program"),
        ),
        add_verify_options,
        {"word": "verify"},
    ),
    Command(
        "train change",
        "DIR KEY=VALUE...",
        "change a run while it goes on",
        "Change values of a run file while the run goes on. Its leader takes them in before the next step, or when it "
        "is started again with --resume, and says so in the journal.",
        (),
        (
            ("train change runs/run inner.lr=1e-4", "of a model in stages: another learning rate"),
            (
                "train change runs/run stop.steps=500 eval.every=20",
                "another end, fewer evaluations",
            ),
            ("train change runs/run pause", "of a witnessed run: stop until go-on"),
        ),
        add_change_options,
        {"word": "change"},
    ),
    Command(
        "train export",
        "DIR OUT",
        "write the model of a run for transformers and neurogrid serve",
        "Write the model of a run's newest checkpoint, as transformers and neurogrid serve open it. An adapter is "
        "merged into its model for that.",
        (),
        (("train export runs/run model/", "then neurogrid chat model/ talks to it"),),
        add_export_options,
        {"word": "export"},
    ),
    Command(
        "train testnet",
        "RUN.toml",
        "try a run on this machine, with workers that are killed on the way",
        "Lead a run with workers in processes of this machine, kill some of them on the way, and say what came of it: "
        "whether it ended, what its journal proves, and how soon it went on after each kill. Status 0 if it ended and "
        "each sample was used as it should.",
        (),
        (
            ("train testnet run.toml --workers 4", "nobody is killed"),
            ("train testnet run.toml --kill 5 --leader-kills 1 --seed 7", "six times somebody is"),
        ),
        add_testnet_options,
        {"word": "testnet"},
    ),
)
