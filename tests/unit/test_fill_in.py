"""Filling in: the tokens that tokenizers have for it, in the order that each family wants, and what texts write out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.fill_in import ExtraText, FillIn, read_fill_in
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend as ServerBackend
from neurogrid.server.llama_cpp.paths import LLAMA_CPP_PATHS
from neurogrid.server.llama_cpp.routes import llama_cpp_routes
from neurogrid.server.ollama.routes import ollama_routes
from neurogrid.server.openai.routes import openai_routes
from tests.fill_in_checkpoint import QWEN, make_fill_in_checkpoint
from tests.unit.asgi_client import Answered, ask, run
from tests.unit.told_coordinator import TEXT, Told, load_embedded


def byte_level(names: Sequence[str]) -> Tokenizer:
    """Each byte is a token, and so is each of `names`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def sentence_piece(names: Sequence[str]) -> Tokenizer:
    """As Code Llama and Codestral: a space before each text, `names` in the vocabulary, bytes for the rest."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abxy", *names]
    backend = Backend(
        models.BPE(
            vocab={text: i for i, text in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def filling(tokenizer: Tokenizer) -> FillIn:
    found = read_fill_in(tokenizer)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (QWEN, ("<|endoftext|>", "<|fim_pad|>")),
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<|file_separator|>",)),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<fim_pad>", "<|endoftext|>")),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ()),  # noqa: RUF001
    ],
    ids=["qwen", "codegemma", "starcoder", "deepseek"],
)
def test_prefix_then_suffix(names: Sequence[str], ends: Sequence[str]) -> None:
    tokenizer = byte_level([*names, *ends])
    ids = [tokenizer.token_id(name) for name in names]
    plain = partial(tokenizer.encode, add_special_tokens=False)
    found = filling(tokenizer)
    expected = [ids[0], *plain("def f("), ids[1], *plain("):\n"), ids[2]]
    assert found.prompt("def f(", "):\n") == expected
    assert found.prompt(plain("def f("), "):\n") == expected
    assert found.prompt("", "") == ids[:3]
    assert set(found.end_ids) == {tokenizer.token_id(name) for name in (*names, *ends)}


def test_code_llama_has_no_space_before_the_suffix() -> None:
    tokenizer = sentence_piece(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    prompt = filling(tokenizer).prompt("ab", "xy")
    names = ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "x", "y", "▁<MID>"]
    assert tokenizer.names(prompt) == names
    assert tokenizer.token_id("▁<EOT>") in filling(tokenizer).end_ids


def test_codestral_has_the_suffix_first_and_no_middle() -> None:
    tokenizer = sentence_piece(["[PREFIX]", "[SUFFIX]"])
    prompt = filling(tokenizer).prompt("ab", " xy")
    assert tokenizer.names(prompt) == ["[SUFFIX]", "▁", "x", "y", "[PREFIX]", "▁", "a", "b"]


def test_what_begins_any_text_begins_this_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(make_fill_in_checkpoint(tmp_path / "model"))
    prompt = filling(tokenizer).prompt("a", "b")
    assert prompt[0] == tokenizer.token_id("<s>")
    assert prompt.count(prompt[0]) == 1


def test_without_tokens_there_is_none() -> None:
    assert read_fill_in(Tokenizer.open(embedded_model_path())) is None
    assert read_fill_in(byte_level(["<|fim_prefix|>", "<|fim_suffix|>"])) is None
    assert read_fill_in(sentence_piece(["[PREFIX]"])) is None  # others are <unk> there


def test_a_text_that_writes_the_tokens_out_is_text() -> None:
    tokenizer = byte_level(QWEN)
    text = f"MIDDLE = '{QWEN[2]}' + '{QWEN[0]}'"
    prompt = filling(tokenizer).prompt(text, QWEN[1] * 3)
    assert [prompt.count(tokenizer.token_id(name) or 0) for name in QWEN[:3]] == [1, 1, 1]
    assert tokenizer.decode_verbatim(prompt) == f"{QWEN[0]}{text}{QWEN[1]}{QWEN[1] * 3}{QWEN[2]}"


def test_extra_texts_are_files_and_the_last_ones_that_fit() -> None:
    tokenizer = byte_level(QWEN)
    texts = [ExtraText("a.py", "x = 1"), ExtraText("b.py", "y = 2")]
    found = filling(tokenizer)
    both = found.extra(texts, max_tokens=1000)
    _, _, _, file, project = QWEN
    written = f"{project}project\n{file}a.py\nx = 1\n{file}b.py\ny = 2\n{file}file\n"
    assert tokenizer.decode_verbatim(both) == written
    fewer = tokenizer.decode_verbatim(found.extra(texts, max_tokens=len(both) - 1))
    assert fewer == f"{project}project\n{file}b.py\ny = 2\n{file}file\n"
    assert found.extra(texts, max_tokens=10) == []
    assert found.extra([], max_tokens=1000) == []
    prompt = found.prompt("p", "s", extra=both)
    assert tokenizer.decode_verbatim(prompt) == f"{written}{QWEN[0]}p{QWEN[1]}s{QWEN[2]}"
    plain = byte_level(QWEN[:3])
    told = filling(plain).extra(texts, max_tokens=1000)
    assert plain.decode_verbatim(told) == "x = 1\n\ny = 2\n\n"


# ------------------------------------------------------------------ asked for over HTTP


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_fill_in_checkpoint(tmp_path_factory.mktemp("fill_in") / "coder")
    return LoadedModel.load(path, name="coder", max_seq_len=128, dtype="float32")


def asked(coordinator: Told, path: str, **body: Any) -> Answered:
    backend = ServerBackend()
    makers = (openai_routes, ollama_routes, llama_cpp_routes)
    app = make_app([route for make in makers for route in make(backend, request_timeout=20.0)])
    with backend.serving(coordinator):  # type: ignore[arg-type]
        return run(partial(ask, app, "POST", path, json_body=body))


def test_each_api_asks_the_same(model: LoadedModel) -> None:
    found = filling(model.tokenizer)
    prompt, suffix = "def f(", "):\n    pass"
    told = Told(model)
    fields = {"model": "coder", "prompt": prompt, "suffix": suffix}
    completion = asked(told, "/v1/completions", **fields, max_tokens=20)
    generated = asked(told, "/api/generate", **fields, stream=False)
    infill = asked(told, "/infill", input_prefix="def ", prompt="f(", input_suffix=suffix)
    assert completion.json["choices"][0]["text"] == TEXT
    assert generated.json["response"] == TEXT
    assert infill.json["content"] == TEXT
    assert told.prompts == [found.prompt(prompt, suffix)] * 3
    for sampling in told.sampling:
        assert set(sampling.stop_token_ids) == set(found.end_ids)
    shown = asked(told, "/api/show", model="coder").json
    assert "insert" in shown["capabilities"]


def test_an_infill_is_streamed_with_counts_at_the_end(model: LoadedModel) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b", "n_predict": 3, "stream": True}
    answered = asked(Told(model), "/infill", **fields)
    *events, last = answered.events
    assert "".join(event["content"] for event in events) == model.tokenizer.decode(
        model.tokenizer.encode(TEXT)[1:4]
    )
    assert not any(event["stop"] for event in events)
    # An end follows in any case there, and counts.
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "eos", 4)
    assert last["timings"]["predicted_n"] == 4
    picked = ["content", "timings/prompt_n", "no/such"]
    whole = asked(Told(model), "/infill", **{**fields, "stream": False}, response_fields=picked)
    assert list(whole.json) == ["content", "timings/prompt_n"]


def test_a_prompt_may_be_read_alone(model: LoadedModel) -> None:
    told = Told(model)
    fields = {"input_prefix": "a", "input_suffix": "b", "n_predict": 0, "response_fields": [""]}
    assert asked(told, "/infill", **fields).json == {}
    assert len(told.prompts) == 1
    del fields["response_fields"]
    whole = asked(told, "/infill", **fields).json
    assert (whole["content"], whole["tokens_predicted"]) == ("", 0)


def test_extra_texts_give_way_and_the_gap_does_not(model: LoadedModel) -> None:
    told = Told(model)
    extra = [{"filename": f"{n}.py", "text": "x = 1\n" * 4} for n in range(40)]
    fields: dict[str, Any] = {"input_suffix": "b", "n_predict": 30, "input_extra": extra}
    assert asked(told, "/infill", input_prefix="a", **fields).status == 200
    (prompt,) = told.prompts
    assert 60 < len(prompt) <= 98
    assert "39.py" in model.tokenizer.decode_verbatim(prompt)
    answered = asked(told, "/infill", input_prefix="a " * 200, **fields)
    assert (answered.status, answered.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ],
)
def test_other_models_refuse_it(path: str, body: dict[str, Any], param: str) -> None:
    answered = asked(Told(load_embedded()), path, **body)
    assert (answered.status, answered.error["param"]) == (400, param)
    assert "its tokenizer has no tokens" in answered.error["message"]


def test_what_cannot_be_is_refused(model: LoadedModel) -> None:
    gap = {"input_prefix": "a", "input_suffix": "b"}
    for path, body, status in (
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, 422),
        ("/v1/completions", {"prompt": "a", "suffix": 1}, 400),
        ("/v1/chat/completions", {"messages": [], "suffix": "b"}, 400),
        ("/api/generate", {"model": "coder", "suffix": "b", "system": "c"}, 400),
        ("/api/generate", {"model": "coder", "suffix": "b", "format": "json"}, 400),
        ("/infill", {"input_prefix": "a"}, 400),
        ("/infill", {**gap, "grammar": "root ::= x"}, 400),
        ("/infill", {**gap, "n_probs": 3}, 400),
        ("/infill", {**gap, "model": "other"}, 404),
        ("/infill", {**gap, "input_extra": [{"text": 1}]}, 400),
    ):
        answered = asked(Told(model), path, **body)
        assert answered.status == status, (path, body, answered.body)


def test_the_document_has_the_paths() -> None:
    routes: list[Any] = llama_cpp_routes(ServerBackend(), request_timeout=1.0)
    assert {route.path for route in routes} == set(LLAMA_CPP_PATHS)
