"""A conversation grows token by token: what the model has seen stays as it was, where its template allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.cli.commands.conversation import Conversation
from neurogrid.errors import ConfigurationError
from neurogrid.model.files.tokenizer import Tokenizer
from tests.unit.test_chat_template import tokenizer

KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As templates do that leave out what a model thought before it answered.
SHORTENS = KEEPS.replace("{{ m.content }}", "{{ m.content.split('|')[-1] }}")


def written(chat: Tokenizer, text: str) -> list[int]:
    """An answer in tokens that no tokenizer would choose: one for each character."""
    return [id_ for letter in text for id_ in chat.encode(letter, add_special_tokens=False)]


def test_each_turn_extends_what_was_there(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, KEEPS)
    talk = Conversation(chat, system="Be brief.")
    first = talk.ask("What is a class?")
    assert first.text == "<system>Be brief.</s><user>What is a class?</s><assistant>"
    answer = written(chat, "A type.")
    talk.answered(first, answer, "A type.")
    assert (talk.num_turns, talk.num_tokens) == (1, len(first.token_ids) + len(answer))
    second = talk.ask("And a function?")
    assert second.text == f"{first.text}A type.</s><user>And a function?</s><assistant>"
    before = [*first.token_ids, *answer]
    assert second.token_ids[: len(before)] == before
    assert chat.decode(second.token_ids) == chat.decode(chat.encode(second.text))


def test_a_template_that_changes_earlier_turns_begins_anew(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, SHORTENS)
    talk = Conversation(chat)
    first = talk.ask("What?")
    talk.answered(first, written(chat, "hmm|That."), "hmm|That.")
    second = talk.ask("Why?")
    assert second.text == "<user>What?</s><assistant>That.</s><user>Why?</s><assistant>"
    assert second.token_ids == chat.encode(second.text, add_special_tokens=False)


def test_what_was_not_answered_is_forgotten(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, KEEPS)
    talk = Conversation(chat)
    talk.ask("What?")
    assert talk.num_turns == 0
    assert "What?" not in talk.ask("Why?").text
    talk.answered(talk.ask("Why?"), written(chat, "So."), "So.")
    talk.reset()
    assert (talk.num_turns, talk.num_tokens) == (0, 0)
    assert talk.ask("Who?").text == "<user>Who?</s><assistant>"


def test_without_a_template_text_is_continued(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, "")
    talk = Conversation(chat)
    assert talk.is_plain
    first = talk.ask("def f(x):")
    assert first.token_ids == chat.encode("def f(x):")
    answer = written(chat, " return x")
    talk.answered(first, answer, " return x")
    second = talk.ask("def g(x):")
    assert second.text == "def f(x): return x\ndef g(x):"
    assert second.token_ids[: len(first.token_ids) + len(answer)] == [*first.token_ids, *answer]


def test_a_template_may_refuse(tmp_path: Path) -> None:
    talk = Conversation(tokenizer(tmp_path, "{{ raise_exception('no') }}"))
    with pytest.raises(ConfigurationError, match="refuses these messages: no"):
        talk.ask("What?")
