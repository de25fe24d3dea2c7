"""`neurogrid train`: what its words take, what `check` prints, and what is said where something is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import trio

from neurogrid.cli.commands import train, worker
from neurogrid.cli.commands.main import COMMANDS, parse
from neurogrid.cli.commands.train import TrainingLines, _judge_directory, _take_cluster, told
from neurogrid.cli.commands.training.change import change
from neurogrid.cli.commands.training.files import status
from neurogrid.cli.commands.training.model import check_paths, place_of, run_directory
from neurogrid.cli.commands.worker import take_work
from neurogrid.cli.entry import neurogrid
from neurogrid.cli.options.trust import Trust
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import DirectoryInUseError
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.model_numbers import model_numbers
from neurogrid.training.leading.opening import rules_of
from neurogrid.training.runs.entries import ChangedEntry, EndEntry, ResumedEntry, StoppingEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.run_directory import RunDirectory, read_run_file
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import Phase
from tests.unit.forked import Forked
from tests.unit.training.simulated_run import RUN, Cluster, rules

LEAST = '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\ntokens = 2_000_000\n'


def parsed(*words: str) -> Namespace:
    command, _, options = parse(words)
    assert command.carrier is train
    return options


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@cache
def import_libraries() -> None:
    """What a check imports when it comes to it, once for all processes forked from this one."""
    import_module("neurogrid.training.leading.chains.numbers")
    model_numbers(embedded_model_path(), "causal-lm")


def run_command(words: tuple[str, ...], cwd: Path) -> None:
    os.chdir(cwd)
    sys.argv = ["neurogrid", "train", *words]
    neurogrid()


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What the command did, in a process of its own, from its entry on."""
    import_libraries()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(run_command, words, cwd, **pipes) as process:
        told, said = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, told, said)


def test_the_first_word_says_what_it_is() -> None:
    for words, word in {
        ("run.toml",): "run",
        ("./check",): "run",
        ("check", "run.toml"): "check",
        ("prepare", "a", "b"): "prepare",
        ("data", "d", "--join", "x"): "data",
        ("deputy", "d", "--join", "x"): "deputy",
        ("status", "d"): "status",
        ("verify", "d"): "verify",
        ("change", "d", "stop.steps=1"): "change",
        ("export", "d", "o"): "export",
        ("testnet", "run.toml"): "testnet",
    }.items():
        assert parsed("train", *words).word == word
    names = {each.name for each in COMMANDS if each.carrier is train}
    assert names == {
        "train",
        *(f"train {w}" for w in ("check", "prepare", "data", "status", "change")),
        *(f"train {w}" for w in ("export", "testnet", "verify", "deputy")),
    }


def test_a_run_is_led_as_the_options_say() -> None:
    options = parsed("train", "run.toml")
    assert (options.run_file, options.dir, options.resume) == (Path("run.toml"), None, False)
    assert (options.local_workers, options.wait, options.threads) == (0, 1800, None)
    options = parsed(
        *("train", "--local-workers", "3", "run.toml", "--dir", "d", "--wait", "5", "--resume"),
    )
    assert (options.dir, options.resume, options.wait) == (Path("d"), True, 5)
    assert options.local_workers == 3
    run = parse_run_file(LEAST, name="tiny.toml")
    assert run_directory(options, run) == Path("d")
    assert run_directory(parsed("train", "tiny.toml"), run) == Path("runs/tiny")


def test_what_is_prepared() -> None:
    options = parsed("train", "prepare", "a", "b")
    run = parse_run_file(LEAST)
    for name in ("sequence_length", "held_out", "slice_samples"):
        # The same as where a run prepares its data.
        assert getattr(options, name) == getattr(run.data, name)
    assert (options.tokenizer, options.seed, options.licence) == (None, 0, "")
    assert (options.vocab_size, options.image_size, options.token_bytes) == (None, 0, 0)
    assert (options.sources, options.out) == ([Path("a")], Path("b"))
    assert (options.weights, options.repeat) == ((), 1)
    options = parsed("train", "prepare", "a", "b", "c", "--weights", "3,0.5", "--repeat", "4")
    assert (options.sources, options.out) == ([Path("a"), Path("b")], Path("c"))
    assert (options.weights, options.repeat) == ((3.0, 0.5), 4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train"], "RUN.toml"),
        (["train", "chek", "run.toml"], "unrecognized arguments: run.toml"),
        (["train", "check"], "RUN.toml"),
        (["train", "prepare", "a"], "OUT"),
        (["train", "prepare", "a", "b", "--held-out", "0.6"], "0.6 is not from 0 to 0.5"),
        (["train", "prepare", "a", "b", "--held-out", "x"], "'x' is no number"),
        (["train", "prepare", "a", "b", "c", "--weights", "3;1"], "'3;1' is no list of numbers"),
        (["train", "prepare", "a", "b", "c", "--weights", "3,0"], "3,0: a weight is above zero"),
        (["train", "run.toml", "--local-workers", "-1"], "-1 is not between 0"),
        (["train", "run.toml", "--wait", "0"], "0 is not above zero"),
        (["train", "check", "run.toml", "--speed", "0"], "0 is not above zero"),
        (["train", "check", "run.toml", "--bandwidth", "fast"], "'fast' is no size"),
        (["train", "export", "a"], "OUT"),
        (["train", "change", "a"], "KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, *words)
    assert says in told
    assert told.count("\n") == 1


def test_what_a_model_is_named_by(tmp_path: Path) -> None:
    assert place_of("embedded") == embedded_model_path()
    assert place_of(str(tmp_path)) == tmp_path
    assert place_of("./config.json") == Path("config.json")
    assert place_of("Qwen/Qwen3-0.6B") == ModelName("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        ("config.json", 'path = "config.json"', ""),
        ("config.json", 'path = "https://example.org/data"', ""),
        ("empty", 'path = "empty"', '[model] config = "m": this directory has no config.json'),
        ("config.json", 'path = "no"', '[data] path = "no": there is no such file or directory'),
        (
            "config.json",
            'mixture = [{ path = ".", weight = 1 }, { path = "no", weight = 2 }]',
            '[data] mixture: path = "no": there is no such file or directory: no',
        ),
        (
            "config.json",
            'path = "empty"\ntokenizer = "empty"',
            '[data] tokenizer = "empty": there is no such file: empty/tokenizer.json',
        ),
    ],
)
def test_what_a_run_file_names_is_there(
    model: str, data: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    run = parse_run_file(f'[model]\nconfig = "m"\n[data]\n{data}\n[stop]\nrounds = 1\n')
    if not told:
        check_paths(run, Path(model))
        return
    with pytest.raises(ConfigurationError) as refusal:
        check_paths(run, Path(model))
    assert str(refusal.value).startswith(told)


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    _judge_directory(directory, resume=False)
    with pytest.raises(ConfigurationError, match="has no run to go on with"):
        _judge_directory(directory, resume=True)
    directory.journal.touch()  # it failed before it began
    _judge_directory(directory, resume=True)
    _judge_directory(directory, resume=False)
    directory.journal.write_text("x")
    with pytest.raises(ConfigurationError, match="has a run already: --resume goes on with it"):
        _judge_directory(directory, resume=False)
    directory.journal.unlink()
    with Journal.open(directory.journal, Identity.generate()):
        for resume in (True, False):
            with pytest.raises(DirectoryInUseError, match=f"journal: process {os.getpid()} on"):
                _judge_directory(directory, resume=resume)
    _judge_directory(directory, resume=True)


def test_the_cluster_of_a_run_is_made_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    options = parsed("train", "run.toml")
    _take_cluster(options, directory)
    assert (options.cluster, options.new_cluster) == (None, tmp_path / "cluster")
    directory.cluster.mkdir()
    _take_cluster(options, directory)
    assert (options.cluster, options.new_cluster) == (tmp_path / "cluster", None)


def test_a_worker_does_both_unless_one_is_named() -> None:
    for words, (serves, trains) in {
        (): (True, True),
        ("--serve",): (True, False),
        ("--train",): (False, True),
        ("--serve", "--train"): (True, True),
    }.items():
        options = worker.build_parser().parse_args(words)
        take_work(options)
        assert (options.serve, options.train) == (serves, trains)


def test_a_run_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = TrainingLines(Screen(), Trust(), [])
    lines.listening("12D3", ["/ip4/127.0.0.1/tcp/1"])  # nobody joins a peer without a cluster
    lines.say("a member joined")
    lines.metrics({"round": 2, "step": 40, "loss": 3.5, "tokens": 12345, "members": 2})
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "a member joined",
        "round 2, step 40, loss 3.5000, 12,345 tokens, 2 members",
    ]
    assert told({"eval_loss": 1.25}) == "held-out loss 1.2500"
    mixture = {"eval_loss": 1.5, "eval_loss/web": 1, "eval_loss/code": 2}
    assert told(mixture) == "held-out loss 1.5000 (web 1.0000, code 2.0000)"
    chain = {"round": 2, "step": 2, "loss": 3.5, "tokens": 512, "members": 1, "stages": 2}
    assert told(chain) == "step 2, loss 3.5000, 512 tokens, 2 stages"
    assert told({**chain, "stages": 1}) == "step 2, loss 3.5000, 512 tokens, 1 stage"
    replicas = {**chain, "step": 40, "members": 4, "replicas": 2}
    assert told(replicas) == "round 2, step 40, loss 3.5000, 512 tokens, 2 replicas, 4 members"


def rows(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert trio.run(status, Namespace(directory=directory), Screen()) == 0
    written = capsys.readouterr()
    assert written.err == ""
    return dict(line.split(maxsplit=1) for line in written.out.splitlines())


def test_how_far_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="has no run in it"):
        rows(tmp_path, capsys)
    (tmp_path / "run.toml").write_text(parse_run_file(LEAST, name="tiny.toml").text())
    told = rows(tmp_path, capsys)
    assert told == {"run": "tiny, embedded on data/", "round": "none yet"}
    lines = [
        {"step": 20, "tokens": 400_000, "loss": 4.0, "round": 1, "members": 2, "seconds": 100.0},
        {"step": 20, "eval_loss": 4.25},
        {"step": 40, "tokens": 900_000, "loss": 3.5, "round": 2, "members": 2, "seconds": 200.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoints" / "step-40").mkdir(parents=True)
    told = rows(tmp_path, capsys)
    assert told.pop("as").startswith("of ")
    assert told.pop("held").split() == ["out", "4.2500", "at", "step", "20"]
    assert told == {
        "run": "tiny, embedded on data/",
        "round": "2",
        "step": "40",
        "tokens": "900,000",
        "loss": "3.5000",
        "members": "2",
        "speed": "5,000 tokens a second, of all members",
        "stops": "2,000,000 tokens (45%)",
        "checkpoint": f"{tmp_path}/checkpoints/step-40, of 1",
    }


def test_what_was_checked_in_all_rounds_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a long run, too: other rows look at its last rounds alone."""
    (tmp_path / "run.toml").write_text(parse_run_file(LEAST, name="tiny.toml").text())
    assert "checked" not in rows(tmp_path, capsys)
    lines = [{"round": number, "checked": 2, "checked_held": 1} for number in range(20_000)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = rows(tmp_path, capsys)
    assert told["checked"] == "20,000 of 40,000 results that were computed again hold"


def test_how_far_a_chain_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(parse_run_file(CHAIN, name="tiny.toml").text())
    assert rows(tmp_path, capsys)["step"] == "none yet"
    line = {"step": 20, "tokens": 400_000, "round": 20, "members": 1, "stages": 2, "seconds": 9.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    told = rows(tmp_path, capsys)
    assert (told["step"], told["stages"]) == ("20", "2")
    assert not {"round", "members", "waited"} & told.keys()
    wide = {**line, "members": 5, "waited": 0.3, "bubble": 0.2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(wide) + "\n")
    told = rows(tmp_path, capsys)
    assert told["stages"] == "2, of 5 members"
    assert told["waited"] == (
        "30% of the last step; 20% are to be waited by the order of micro-batches alone"
    )


def test_status_says_what_the_journal_proves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(parse_run_file(LEAST, name="tiny.toml").text())
    cluster = Cluster(rules(), num_epochs=1)
    cluster.join()
    leader = Identity.generate()
    run = replace(RUN, leader=leader.peer_id)
    with Journal.open(tmp_path / "journal", leader) as journal:
        assert "journal" not in rows(tmp_path, capsys)
        journal.append(run)
        while cluster.state.phase is not Phase.ENDED:
            cluster.average()
            for entry in cluster.journal[len(journal.entries) - 1 :]:
                journal.append(entry)
            if cluster.round == 3:
                told = rows(tmp_path, capsys)["journal"]
                assert told == "sound: 18 samples in 3 rounds, none twice in an epoch"
        told = rows(tmp_path, capsys)["journal"]
        assert told == "sound: 24 samples in 4 rounds, each of 1 epoch once"
        for _ in range(2):
            journal.append(StoppingEntry("again"))
    assert rows(tmp_path, capsys)["journal"].startswith("not sound: stopping comes after the end")
    assert rows(tmp_path, capsys)["journal"].endswith("and 3 more")
    (tmp_path / "journal").write_text("altered\n")
    assert "line 1 does not say whose journal" in rows(tmp_path, capsys)["journal"]


def change_run(directory: Path, *words: str) -> None:
    options = parsed("train", "change", str(directory), *words)
    assert trio.run(change, options, Screen()) == 0


def test_a_run_is_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="has no run in it"):
        change_run(tmp_path, "inner.lr=1e-4")
    directory = RunDirectory(tmp_path)
    run = parse_run_file(LEAST + "[layout]\nstages = 2\n", name="tiny.toml")
    directory.run_file.write_text(run.text())
    line = {"step": 20, "tokens": 400_000, "round": 20, "members": 1, "stages": 2, "seconds": 9.0}
    directory.metrics.write_text(json.dumps(line) + "\n")
    change_run(tmp_path, "inner.lr=1e-4", "stop.tokens=800_000")
    told = capsys.readouterr()
    assert told.out == "[inner]\nlr = 0.0001\n[stop]\ntokens = 800000\n"
    assert "before the next step, or with --resume" in told.err
    # What is wanted later goes with what is wanted already; what is wrong changes nothing.
    change_run(tmp_path, "eval.every=9")
    with pytest.raises(ConfigurationError, match="lr is a number above 0"):
        change_run(tmp_path, "inner.lr=0")
    text = "[eval]\nevery = 9\n\n[inner]\nlr = 0.0001\n\n[stop]\ntokens = 800000\n"
    assert directory.changes.read_text() == text
    capsys.readouterr()
    told_rows = rows(tmp_path, capsys)
    assert told_rows["wanted"] == "eval.every = 9, inner.lr = 0.0001, stop.tokens = 800000"
    assert told_rows["stops"] == "2,000,000 tokens (20%)"
    leader = Identity.generate()
    with Journal.open(directory.journal, leader) as journal:
        journal.append(replace(RUN, leader=leader.peer_id))
        journal.append(ChangedEntry(1, (("inner.lr", "0.0001"), ("stop.tokens", "800000"))))
        told_rows = rows(tmp_path, capsys)
        changed = "from step 1 on: inner.lr = 0.0001, stop.tokens = 800000"
        assert (told_rows["changed"], told_rows["wanted"]) == (changed, "eval.every = 9")
        assert told_rows["stops"] == "800,000 tokens (50%)"
        journal.append(EndEntry("800,000 tokens"))
        with pytest.raises(ConfigurationError, match="has ended: 800,000 tokens"):
            change_run(tmp_path, "inner.lr=1e-5")
        journal.append(ResumedEntry(0))
        change_run(tmp_path, "inner.lr=1e-5")


def test_a_witnessed_run_is_paused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path)
    directory.run_file.write_text(parse_run_file(LEAST, name="tiny.toml").text())
    with pytest.raises(ConfigurationError, match=r'only a run with \[outer\] method = "distro"'):
        change_run(tmp_path, "pause")
    run = parse_run_file(f'preset = "psyche"\n{LEAST}', name="tiny.toml")
    directory.run_file.write_text(run.text())
    change_run(tmp_path, "pause")
    assert directory.pause.exists()
    assert "stops where it is within a second" in capsys.readouterr().err
    for _ in range(2):
        change_run(tmp_path, "go-on")
        assert not directory.pause.exists()
    with pytest.raises(ConfigurationError, match='"pause" is no KEY=VALUE'):
        change_run(tmp_path, "pause", "go-on")


def test_check_says_what_a_witnessed_run_takes(tmp_path: Path) -> None:
    run = f'preset = "psyche"\n{LEAST}[epochs]\nwitnesses = 3\n'
    (tmp_path / "run.toml").write_text(run)
    done = command("check", "run.toml", "--members", "5", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "# an epoch     500 rounds with the same members, 3 of them witnesses of each"
        in done.stdout
    )
    # A thousandth of gradients of 14.6 MB, to and from four others.
    assert "# bytes        46.7 kB sent and 46.7 kB received by a member in a round" in done.stdout
    assert parse_run_file(done.stdout) == parse_run_file(run)


def test_check_prints_a_run_file_and_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(LEAST)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"round": n, "seconds": 30 * n, "tokens": 9000 * n}) + "\n"
            for n in (1, 2, 3)
        )
    )
    done = command(
        *("check", "run.toml", "--speed", "4000", "--speed", "2000", "--bandwidth", "10MB"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert parse_run_file(done.stdout) == parse_run_file(LEAST), "it is a run file again"
    _, _, told = done.stdout.partition("# what it takes, with 2 members\n")
    assert "# parameters   3,640,512 that are trained\n" in told
    # 2 members, 5 steps of 4,096 tokens, of which there are 2 million; 6,000 tokens a second.
    assert "# a round      5 steps of 16 samples (4,096 tokens) for each member, 160 " in told
    assert "# rounds       49\n" in told
    assert "# time         a round takes 6.8 s computing, and 0.3 s exchanging\n" in told
    assert "# measured     a round took 30.0 s in runs/run\n" in told
    assert "300 tokens a second, of all members" in told


def test_check_takes_samples_as_they_are_prepared(tmp_path: Path) -> None:
    """Longer than a batch by the run file: that has one of them then, as in the run itself."""
    text = f"{LEAST}[inner]\nbatch_tokens = 64\n".replace(
        'path = "data/"', 'path = "data/"\nsequence_length = 32'
    )
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "data").mkdir()
    slices = (SliceInfo(bytes(32), 8, 8 * 4 * 128 + 8),)
    manifest = Manifest("text", slices, sequence_length=128, vocab_size=500)
    (tmp_path / "data" / "manifest.json").write_bytes(manifest.encode())
    done = command("check", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# a round      5 steps of 1 samples (128 tokens) for each member, 10 " in done.stdout
    run = read_run_file(tmp_path / "run.toml")
    assert parse_run_file(done.stdout) == run
    assert rules_of(run, manifest).batch_samples == 1


CHAIN = f"{LEAST}[layout]\nstages = 2\n"
# What a model of 0.6 B parameters is like.
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_check_tells_what_stages_take(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CHAIN)
    words = ("--memory", "800MB", "--memory", "450MB", "--speed", "2000", "--bandwidth", "10MB")
    done = command("check", "run.toml", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert parse_run_file(done.stdout) == parse_run_file(CHAIN), "it is a run file again"
    _, _, told = done.stdout.partition("# what it takes, in 2 stages\n")
    lines = {line[2:15].strip(): line[15:] for line in told.splitlines() if line[2] != " "}
    assert lines["parameters"] == "3,640,512 that are trained"
    assert lines["stage 1"].startswith("layers 0 to ")
    assert re.search(r": (\S+ MB) for weights, \1 for gradients, \S+ MB for the optimiser, ", told)
    assert "for 2 micro-batches under way, the rest for Python and torch" in lines["stage 1"]
    assert "for 1 micro-batch under way" in lines["stage 2"]
    assert "# " + 13 * " " + "stage 2 may take more than its member lends: " in told
    assert lines["members"].startswith("2 members, one for each stage; others stand by")
    # Eight, which it would be otherwise, leave less room still.
    assert lines["a step"].endswith("in 16 micro-batches, stages wait for others 6% of the time")
    assert lines["bytes"].endswith("to the next stage in a step, and as many back")
    assert lines["state"].endswith(
        "come to the leader after every 25 steps, and for a checkpoint after every 10"
    )
    assert lines["steps"] == "489"
    assert "computing, and 0.2 s sending beside it, then 0.3 s for what is tied" in lines["time"]
    (tmp_path / "run.toml").write_text(f"{CHAIN}recompute = true\n[adapter]\nr = 8\n")
    told = command("check", "run.toml", cwd=tmp_path).stdout
    assert " that are trained of an adapter, beside 3,640,512 that are not\n" in told
    assert "for the inputs of 2 micro-batches, and one of them under way" in told
    assert "come to the leader after each step\n" in told
    replicas = CHAIN.replace("stages = 2", "stages = 2\nreplicas = 3")
    (tmp_path / "run.toml").write_text(f'{replicas}[outer]\nmethod = "diloco"\nevery = 10\n')
    told = command("check", "run.toml", cwd=tmp_path).stdout
    assert "# what it takes, in 2 stages of each of 3 replicas\n" in told
    assert "# replicas     3 at most, each of 2 members or fewer; one that lends 506.8 MB" in told
    assert "# a round      10 steps of each, then about 9.7 MB from each replica to the" in told
    assert "come to the leader after every 30 steps, and for a checkpoint after every 100\n" in told
    with (tmp_path / "run.toml").open("a") as file:
        file.write("[checkpoints]\nevery = 6\n")
    told = command("check", "run.toml", cwd=tmp_path).stdout
    assert "come to the leader after every 30 steps\n" in told


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """How many stages would do is said, too; also where a run file is what a plan is asked of."""
    (tmp_path / "model.json").write_text(json.dumps(QWEN))
    text = CHAIN.replace("embedded", "model.json")
    (tmp_path / "run.toml").write_text(f"{text}[members]\nmemory = '4GB'\n")
    done = command("check", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "neurogrid train check: the model does not fit into 2 stages: weights, gradients and optimiser take "
        "9,536,798,720 bytes, and its members have room for 7,161,139,200, none of which may be too small for a layer "
        "of 251,695,104. Cut it into more stages ([layout] stages), learn an adapter ([adapter] r), or lend more "
        "(--memory-limit). 4 stages would do, of 4.0 GB each\n"
    )


def test_a_plan_of_a_run_file_is_what_it_takes() -> None:
    chosen, parser, options = parse(["plan", "--offline", "run.toml", "--memory", "4GB"])
    assert (chosen.name, chosen.carrier, parser.prog) == (
        "train check",
        train,
        "neurogrid train check",
    )
    assert (options.run_file, options.word, options.memory) == (
        Path("run.toml"),
        "check",
        [4 * 10**9],
    )
    chosen, _, _ = parse(["plan", "model/"])
    assert chosen.name == "plan"


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (LEAST.replace("2_000_000", '"x"'), [], "run.toml:6: [stop] tokens is a whole number"),
        (LEAST.replace("embedded", "./none"), [], '[model] config = "./none": there is no such '),
        (LEAST.replace("embedded", "a/b"), ["--offline"], "a/b is neither a directory here"),
        (LEAST, ["--speed", "1", "--speed", "2", "--members", "3"], "give --speed once for all"),
        (LEAST, ["--memory", "1GB"], "--memory is for a model in stages: [layout] stages, or"),
        (
            CHAIN,
            ["--members", "3"],
            "--members 3: a chain has a member for each stage, and [layout]",
        ),
        (
            CHAIN,
            3 * ["--memory", "1GB"],
            "give --memory once for all members, or for each of 2 stages",
        ),
        (f"{LEAST}[members]\nmin = 0\n", [], "run.toml:8: [members] min is a whole number from 1"),
        (
            LEAST.replace('"data/"', '"data/"\nsequence_length = 2048'),
            [],
            "[data] sequence_length is 2048, and the model's sequences have at most 1024 tokens",
        ),
    ],
)
def test_check_refuses_in_one_line(text: str, words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    done = command("check", "run.toml", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"neurogrid train check: {told}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_with_a_wrong_file_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(LEAST.replace("[stop]", "[stp]"))
    done = command("run.toml", "--local-workers", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('neurogrid train: run.toml:5: a run file has no "stp": ')
    assert [file.name for file in tmp_path.iterdir()] == ["run.toml"]


def test_data_is_served_to_a_run_alone(tmp_path: Path) -> None:
    done = command("data", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("neurogrid train data: a ticket is needed, ")
