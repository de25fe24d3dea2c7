"""Conversations in the words of the checkpoint's own template, or a refusal that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files import chat_template
from neurogrid.model.files.chat_template import TemplateBusyError
from neurogrid.model.files.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "What is a class?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def tokenizer(directory: Path, template: str) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model_path() / name, directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return Tokenizer.open(directory)


def test_a_conversation_ends_where_the_answer_begins(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, TEMPLATE)
    assert chat.has_chat_template
    text = chat.chat_text([SYSTEM, QUESTION])
    assert text == "<system>Be brief.\n<user>What is a class?\n<assistant>"
    assert chat.decode(chat.encode_chat([SYSTEM, QUESTION])) == text


def test_a_template_may_refuse(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, TEMPLATE)
    with pytest.raises(ConfigurationError, match="system comes first"):
        chat.chat_text([QUESTION, SYSTEM])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for m in messages %}",
    ],
)
def test_a_template_is_kept_in_a_sandbox(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigurationError):
        tokenizer(tmp_path, template).chat_text([QUESTION])


def test_other_names_than_the_templates_own_are_variables(tmp_path: Path) -> None:
    chat = tokenizer(tmp_path, "{{ template }}{{ special_tokens }}{{ arguments }}{{ bos_token }}")
    told = {"template": "a", "special_tokens": "b", "arguments": "c", "bos_token": "d"}
    assert chat.chat_text([QUESTION], variables=told) == "abcd"


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("{{ 'x' * 4000000000 }}", "more than 512 MiB of memory"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            r"longer than 0\.2 s",
        ),
    ],
)
def test_a_template_that_takes_too_much_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, says: str
) -> None:
    only_then = "{% if messages[0].content == 'now' %}" + expression + "{% endif %}well"
    chat = tokenizer(tmp_path, only_then)
    assert chat.chat_text([QUESTION]) == "well"
    with monkeypatch.context() as patched:
        if "longer" in says:
            patched.setattr(chat_template, "RENDER_SECONDS", 0.2)
        with pytest.raises(ConfigurationError, match=f"given up on these messages: .*{says}"):
            chat.chat_text([{"role": "user", "content": "now"}])
    assert chat.chat_text([QUESTION]) == "well"


def test_nobody_waits_for_ever_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROCESSES", 1)
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.1)
    chat = tokenizer(tmp_path, TEMPLATE)
    chat._renderer._idle.get()  # as a conversation that is being rendered has it
    with pytest.raises(TemplateBusyError, match="try again"):
        chat.chat_text([QUESTION])


def test_a_model_without_a_template_is_not_talked_to(tmp_path: Path) -> None:
    plain = tokenizer(tmp_path, "")
    assert not plain.has_chat_template
    with pytest.raises(ConfigurationError, match="no chat template"):
        plain.encode_chat([QUESTION])
