"""Tokenizers: read from a directory or refused with the reason; text streamed exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!  Two spaces, a\ttab and a\n\n  newline.",
    "naïve café, e\u0301 combining, Z\u0351\u036b\u0343 stacked",
    "你好、世界。日本語のテキスト 한국어",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇩🇪 in a row 😀😀😀",
    "    indented code: def f(x):\n        return x  # done",
    "עברית العربية हिन्दी",
    " leading and trailing ",
    "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} genuine",
    "don't can't , . ! ?",
]
SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def metaspace_unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return backend


def byte_fallback() -> Backend:
    """As Llama 2 and Gemma: sentencepiece BPE whose unknown characters are byte tokens."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [
        "▁",
        "▁▁",
        "▁Hello",
        "Hello",
        ",",
        "▁world",
        "!",
        "a",
        "e",
        "你",
        "好",
        "\N{REPLACEMENT CHARACTER}",
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False),
    )
    return backend


def suffix_bpe() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=SPECIAL,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    build.__name__: build
    for build in (byte_level, metaspace_unigram, byte_fallback, word_piece, suffix_bpe)
}


@cache
def fast(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(fast(kind))


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_text(kind: str) -> None:
    for text in [*TEXTS, "".join(TEXTS), " ".join(reversed(TEXTS))]:
        ids = tokenizer(kind).encode(text)
        assert "".join(streamed(tokenizer(kind), ids)) == tokenizer(kind).decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(text: str) -> None:
    subject = tokenizer("byte_level")
    ids = subject.encode(text)
    assert ids[0] == 0  # the <s> that the tokenizer adds
    assert subject.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids(kind: str, data: st.DataObject) -> None:
    subject = tokenizer(kind)
    some = st.integers(0, subject.vocab_size + 3)
    few = st.lists(some, min_size=1, max_size=4).flatmap(
        lambda few: st.lists(st.sampled_from(few), max_size=80)
    )
    ids = data.draw(st.lists(some, max_size=80) | few)
    assert "".join(streamed(subject, ids)) == subject.decode(ids)


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte, by the table of GPT-2: visible bytes stand for themselves."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    symbols = [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in data]
    ids = fast("byte_level").convert_tokens_to_ids(symbols)
    assert isinstance(ids, list)
    return ids


@settings(max_examples=100, deadline=None)
@example(b"\xf0\x9f\x98" * 40)
@example(b"\x80" * 200)
@example(b"\xf0\x90\x80\x80\xe4\xbd" * 30)
@given(st.binary(max_size=120) | st.text("aé你😀", max_size=40).map(lambda text: text.encode()))
def test_any_bytes_one_token_each(data: bytes) -> None:
    subject = tokenizer("byte_level")
    ids = byte_ids(data)
    assert subject.decode(ids) == data.decode("utf-8", errors="replace")
    assert "".join(streamed(subject, ids)) == subject.decode(ids)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    subject = tokenizer("byte_level")
    assert streamed(subject, byte_ids("a你b".encode())) == ["a", "", "", "你", "b", ""]
    assert streamed(subject, byte_ids(b"a\xe4\xbdb")) == ["a", "", "", "\ufffdb", ""]
    assert streamed(subject, byte_ids(b"a\xe4")) == ["a", "", "\ufffd"]
    assert streamed(subject, [0, *byte_ids(b"a"), 1, 9999]) == ["", "a", "", "", ""]


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    subject = tokenizer("byte_fallback")
    first = len(SPECIAL)
    run = [first + byte for byte in "你".encode()]
    letter = fast("byte_fallback").convert_tokens_to_ids("a")
    assert streamed(subject, [letter, *run, letter]) == ["a", "", "", "", "你a", ""]
    assert streamed(subject, [letter, *run]) == ["a", "", "", "", "你"]
    # One byte too many makes the whole run unreadable, so nothing of it may be given out before.
    broken = [*run, first + 0xFF]
    assert "".join(streamed(subject, [letter, *broken, letter])) == "a" + 4 * "\ufffd" + "a"
    # A special token inside a run is no end of it.
    assert "".join(streamed(subject, [letter, *run[:2], 1, run[2], letter])) == "a你a"


class Counting(Tokenizer):
    """Counts the tokens that are decoded."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        super().__init__(backend)
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("byte_level", "text"),
        ("byte_level", b"\x80"),
        ("byte_level", b"\xf0\x9f\x98"),
        ("byte_fallback", [4 + 0xE4, 4 + 0xBD]),
        ("byte_fallback", [271]),
        ("byte_fallback", [260]),
        ("byte_fallback", [1]),
        ("metaspace_unigram", "text"),
        ("word_piece", "text"),
    ],
)
def test_work_grows_with_the_length(kind: str, pattern: str | bytes | list[int]) -> None:
    subject = Counting(fast(kind))
    if isinstance(pattern, str):
        ids = subject.encode("".join(TEXTS))
    else:
        ids = byte_ids(pattern) if isinstance(pattern, bytes) else pattern
    ids = (ids * 3000)[:3000]
    pieces = streamed(subject, ids)
    assert subject.num_decoded < 80 * len(ids)
    assert "".join(pieces) == subject.decode(ids)


def save(folder: Path, kind: str = "byte_level") -> None:
    fast(kind).save_pretrained(folder)


def test_open_reads_what_was_saved(tmp_path: Path) -> None:
    save(tmp_path)
    subject = Tokenizer.open(str(tmp_path))
    assert subject.vocab_size == tokenizer("byte_level").vocab_size
    for text in TEXTS:
        assert subject.encode(text) == tokenizer("byte_level").encode(text)
        assert subject.decode(subject.encode(text)) == text


def test_cleaning_up_is_off_whatever_the_files_say(tmp_path: Path) -> None:
    save(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    table = json.loads(settings_file.read_text()) | {"clean_up_tokenization_spaces": True}
    settings_file.write_text(json.dumps(table))
    subject = Tokenizer.open(tmp_path)
    assert subject.decode(subject.encode("a , b .")) == "a , b ."


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(folder)
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize(
    "told",
    [
        "{{ messages[0].content }}!",
        {"default": "{{ messages[0].content }}!", "tool_use": "{{ tools }}"},
        [
            {"name": "tool_use", "template": "{{ tools }}"},
            {"name": "default", "template": "{{ messages[0].content }}!"},
        ],
    ],
    ids=["one", "by name", "list"],
)
def test_a_template_of_a_processor(tmp_path: Path, told: object) -> None:
    save(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": told}))
    subject = Tokenizer.open(tmp_path)
    assert subject.chat_template_text() == "{{ messages[0].content }}!"
    if not isinstance(told, str):
        assert subject.chat_template_text(tools=True) == "{{ tools }}"


def test_templates_of_which_none_is_the_default(tmp_path: Path) -> None:
    """A conversation with tools has its own; any other is refused, and says what there is."""
    save(tmp_path)
    told = {
        "rag": "{{ documents }}",
        "tool_use": "{{ tools[0].function.name }}: {{ messages[0].content }}",
    }
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": told}))
    subject = Tokenizer.open(tmp_path)
    messages = [{"role": "user", "content": "Hm."}]
    tools = [{"type": "function", "function": {"name": "time"}}]
    assert subject.chat_template_text() == ""
    assert not subject.template_names("documents")
    with pytest.raises(ConfigurationError, match=r"\(rag, tool_use\), and none called default"):
        subject.chat_text(messages)
    assert subject.chat_text(messages, variables={"tools": tools}) == "time: Hm."


@pytest.mark.parametrize("told", [None, 1, {"default": None}, [{"name": "default"}], ["{{ a }}"]])
def test_what_is_no_template_of_a_processor(tmp_path: Path, told: object) -> None:
    save(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": told}))
    assert "tokenizer cannot be read" in refusal(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "no tokenizer; copy tokenizer.json" in refusal(tmp_path)
    assert "no tokenizer" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"\xff\xfe", b"[]", b'{"version": "1.0"}'])
def test_damaged_tokenizer(tmp_path: Path, data: bytes) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert "tokenizer cannot be read" in refusal(tmp_path)


def test_settings_without_the_tokens(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    refusal(tmp_path)


def test_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    table = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code was run')")
    assert "needs code of its own, which is never run" in refusal(tmp_path)


def test_the_embedded_tokenizer() -> None:
    subject = Tokenizer.open(embedded_model_path())
    for text in TEXTS:
        ids = subject.encode(text)
        assert "".join(streamed(subject, ids)) == subject.decode(ids)
    assert subject.decode(subject.encode("def f(x): return x")) == "def f(x): return x"
