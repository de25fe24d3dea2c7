"""`neurogrid`: what is typed comes to the options of a coordinator or of a worker."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.cli.commands import coordinator, download, worker
from neurogrid.cli.commands.main import COMMANDS, main, model_and_text, parse
from neurogrid.hub.names import ModelName

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGRUPGPvcvyhCwDCZ8oMZjXtKL4GmFzq6v8fSZ1T4bXhN"


@pytest.fixture(autouse=True)
def _nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEUROGRID_BOOTSTRAP", raising=False)


def parsed(*words: str) -> Namespace:
    _, _, options = parse(words)
    return options


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"neurogrid {words[0]}: ")
    return written.err


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        (["A function"], None, "A function"),
        (["hello"], None, "hello"),
        (["DIR", "hello"], "DIR", "hello"),
        (["--max-tokens", "3", "DIR", "hello"], "DIR", "hello"),
        (["DIR", "--max-tokens", "3", "hello"], "DIR", "hello"),
        (["--model", "DIR", "hello"], "DIR", "hello"),
        (["DIR", "--prompt", "hello"], "DIR", "hello"),
        (["--prompt", "/etc"], None, "/etc"),
        (["what is 1/2 of this"], None, "what is 1/2 of this"),
    ],
)
def test_run_takes_a_model_and_a_text(words: list[str], model: str | None, prompt: str) -> None:
    options = parsed("run", *words)
    assert options.model == (Path(model) if model else None)
    assert (options.prompt, options.prompt_file, options.chat) == (prompt, None, False)


def test_run_reads_standard_input() -> None:
    for words in (["-"], ["--prompt-file", "-"], ["DIR", "-"]):
        options = parsed("run", *words)
        assert (options.prompt, options.prompt_file) == (None, "-")


def test_one_word_that_is_a_directory_or_written_as_a_path_is_a_model(tmp_path: Path) -> None:
    for word in (str(tmp_path), "./nowhere", "~/models/x", "a.gguf", "Qwen/Qwen3-8B"):
        assert model_and_text([word]) == (word, None)
    for word in ("text", "and so on / forth", "3.5", "~ about", "", "x" * 5000):
        assert model_and_text([word]) == (None, word)


def test_a_name_at_a_hub_may_stand_for_a_directory() -> None:
    name = ModelName("Qwen/Qwen3-8B", "v1")
    for words in (
        *(["run", "Qwen/Qwen3-8B@v1", "text"], ["run", "text", "--model", "Qwen/Qwen3-8B@v1"]),
        *(["chat", "Qwen/Qwen3-8B@v1"], ["serve", "--model", "Qwen/Qwen3-8B@v1"]),
        ["plan", "Qwen/Qwen3-8B@v1", "--offline"],
    ):
        options = parsed(*words)
        assert (options.model, options.offline) == (name, "--offline" in words)
    options = worker.build_parser().parse_args(["--model", "Qwen/Qwen3-8B@v1"])
    assert (options.model, options.offline) == (name, False)
    command, _, options = parse(["download", "Qwen/Qwen3-8B@v1", "--json-logs"])
    assert (command.carrier, options.name, options.offline) == (download, str(name), False)
    # What is written as a path is one.
    assert parsed("serve", "./Qwen/Qwen3-8B").model == Path("Qwen/Qwen3-8B")


@given(st.lists(st.text(), max_size=2))
def test_no_word_is_lost(words: list[str]) -> None:
    found = [
        word for word in model_and_text([w.replace("\0", "") for w in words]) if word is not None
    ]
    assert found == [w.replace("\0", "") for w in words]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no text to continue"),
        (["./dir"], "./dir is taken for a model, and there is no text"),
        (
            ["A", "function", "definition"],
            "stands in quotes: neurogrid run 'A function definition'",
        ),
        (["--model", "DIR", "a", "b"], "'b' is more than there is place for"),
        (["a", "--prompt", "b", "c"], "'c' is more than there is place for"),
    ],
)
def test_what_run_cannot_make_out(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "run", *words)


@pytest.mark.parametrize("command", ["chat", "serve", "plan"])
def test_a_model_is_named_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(command).model is None
    assert parsed(command, "DIR").model == parsed(command, "--model", "DIR").model == Path("DIR")
    assert "give one of both" in refused(capsys, command, "DIR", "--model", "DIR")


def test_each_is_what_the_old_commands_do() -> None:
    old = coordinator.build_parser()
    for new, typed in {
        ("run", "text", "--local-workers", "2"): ["--prompt", "text", "--local-workers", "2"],
        ("chat", "DIR", "--peer", PEER): ["--model", "DIR", "--chat", "--peer", PEER],
        ("serve", "DIR", "--new-cluster", "c"): ["--model", "DIR", "--new-cluster", "c"],
        ("plan", "DIR", "--min-peers", "1"): ["--model", "DIR", "--plan-only", "--min-peers", "1"],
        ("diagnose", "--cluster", "c"): ["--diagnose", "--cluster", "c"],
        ("ticket", "c", "--expires", "7d"): ["--cluster", "c", "--ticket", "--expires", "7d"],
    }.items():
        options, wanted = vars(parsed(*new)), vars(old.parse_args(typed))
        assert {name: options[name] for name in wanted} == wanted
    options, wanted = (
        vars(parsed("join", "ngt1x", "--gpu", "1")),
        vars(worker.build_parser().parse_args(["--join", "ngt1x", "--gpu", "1"])),
    )
    assert {name: options[name] for name in wanted} == wanted


def test_alone_unless_something_names_others_or_lets_them_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for alone in (["chat"], ["run", "x"], ["serve", "DIR", "--http-port", "0"], ["plan"]):
        assert (parsed(*alone).alone, parsed(*alone).min_peers) == (True, 0)
    for more in (
        *(["--peer", PEER], ["--local-workers", "1"], ["--bootstrap", PEER], ["--insecure"]),
        *(
            ["--cluster", "c"],
            ["--new-cluster", "c"],
            ["--min-peers", "2"],
            ["--allow", "x=worker"],
        ),
        *(["--local-layers", "none"], ["--dht"]),
    ):
        options = parsed("serve", *more)
        assert not options.alone
        assert options.min_peers == (2 if more[0] == "--min-peers" else None)
    monkeypatch.setenv("NEUROGRID_BOOTSTRAP", PEER)
    assert not parsed("serve").alone


def test_join_needs_a_ticket_or_a_membership(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a ticket is needed" in refused(capsys, "join")
    assert "give one of both" in refused(capsys, "join", "ngt1a", "--join", "ngt1b")
    assert parsed("join", "--cluster", "c").join is None
    assert parsed("join", "-").join == "-"


def test_alone_it_says_what_can_be_typed_next(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    written = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command.name} " in written
    assert 'neurogrid run "' in written
    assert "neurogrid join -" in written


def test_a_size_that_lacks_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert "8 is 8 bytes: 8G is meant" in refused(capsys, "join", "x", "--memory-limit", "8")
    assert parsed("join", "x", "--memory-limit", "8G").memory_limit == 8 * 1024**3
