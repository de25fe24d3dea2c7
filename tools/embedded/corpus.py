"""The text that the embedded model is trained on: Python's own language reference, as plain prose.

Reads ``pydoc_data.topics``, which comes with every CPython, and tidies reStructuredText away: no
headings, underlines, code, grammar productions, tables, footnotes or emphasis marks, one line for
each paragraph. Knows nothing of tokens or models.

Strategy: split a topic into sections at the headings and into blocks at the blank lines; keep a
block if it reads as prose and drop it if it reads as code. A sentence that only introduces a
dropped example ("For instance:") goes with it, the items of a list join the sentence that
introduces them. Text that stands in several topics is kept once, so that a section held out for
validation is not also trained on.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Section", "prose_paragraphs", "python_prose"]

# Sections with less text than this are the remains of a table or an example.
MIN_SECTION_CHARS = 80
# A paragraph of fewer words, or with fewer words than this to ten characters, is no sentence;
# what only introduces a list ("Two rules hold:") may be shorter.
MIN_WORDS = 4
MIN_WORDS_OF_INTRODUCTION = 2
MIN_WORDS_IN_TEN_CHARS = 0.85

_UNDERLINE = re.compile(r"([*=~^\-])\1{2,}")
_FOOTNOTES = "-[ Footnotes ]-"
_ITEM = re.compile(r"(\*|\d+\.|[a-z]\.) +(?=\S)")
_CODE_MARKS = re.compile(r"::=|>>>|Traceback|\(Pdb\)|^\s*([|+$%#@>]|\.\.\. |->)", re.MULTILINE)
_SIGNATURE = re.compile(r"(class |(class|static)method |async )?[\w.]+(\(.*\))?( = .+)?")
_LABEL = re.compile(r"(Note|See also|Warning|Tip|Examples?|Source code: .*):?")
_NOTICE = re.compile(r"(Changed in|New in|Deprecated since|Source code|See also)\b")
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
_CONTINUATION = re.compile(r"(is|are|except|and|or|at|but|where|the|with|when)\b")
_LIST_END = re.compile(r"[.,;]*( and| or)?$")
_WORD = re.compile(r"[A-Za-z]+")
_TIDY = (
    (re.compile(r"\s*\[\d+\](?=[\s.,;:)]|$)"), ""),  # footnote marks
    (re.compile(r"(?<=[a-z])- (?=[a-z]+[ .,;:)])"), "-"),  # words broken at a hyphen
    (re.compile(r"\*\*(\w[^*()]*?)\*\*"), r"\1"),  # strong
    (re.compile(r"(?<![\w*\"])\*([A-Za-z_][^*\"()]*?)\*(?![\w*\"])"), r"\1"),  # emphasis
    (re.compile(r"\"((?:[^\"]|(?<=\w)\"(?=\w))+)\""), r"\1"),  # inline code
    (re.compile("[\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]"), '"'),
    (re.compile("[\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]"), "'"),
    (re.compile(" ?\N{EM DASH} ?"), " - "),
    (re.compile("\N{HORIZONTAL ELLIPSIS}"), "..."),
    (re.compile("\N{EN DASH}"), "-"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Section:
    """One section of the reference: its topic's name and its paragraphs, without newlines."""

    topic: str
    paragraphs: tuple[str, ...]


def python_prose(topics: Mapping[str, str] | None = None) -> list[Section]:
    """The language reference of the running Python as sections of prose, in order of topic name.

    ``topics`` maps a topic's name to reStructuredText as Sphinx's text builder writes it; without
    it ``pydoc_data.topics`` is read. No paragraph occurs twice.
    """
    if topics is None:
        from pydoc_data.topics import topics as python_topics

        topics = python_topics
    seen: set[str] = set()
    sections: list[Section] = []
    for topic in sorted(topics):
        for body in _split_at_headings(topics[topic]):
            new = [text for text in prose_paragraphs(body) if text not in seen]
            seen.update(new)
            if sum(map(len, new)) >= MIN_SECTION_CHARS:
                sections.append(Section(topic, tuple(new)))
    return sections


def prose_paragraphs(body: str) -> list[str]:
    """The paragraphs of a section's text that read as prose, each tidied and on one line."""
    paragraphs: list[str] = []
    items: list[str] = []
    term = ""
    after_code = False

    def close_list() -> None:
        if items:
            joined = "; ".join(items).replace(":; ", ": ")
            paragraphs[-1] = f"{paragraphs[-1]} {joined}" + "." * (not joined.endswith("."))
            items.clear()

    for block in _split_blocks(body):
        if _is_code(block):
            close_list()
            if paragraphs:
                paragraphs[-1] = _without_introduction(paragraphs[-1])
                if not paragraphs[-1]:
                    paragraphs.pop()
            after_code, term = True, ""
            continue
        item = _ITEM.match(block.strip())
        text = _tidy(block.strip()[item.end() :] if item else _joined_definition(block))
        if _LABEL.fullmatch(text) or _NOTICE.match(text):
            continue
        if after_code and _CONTINUATION.match(text):
            continue  # of the sentence that was dropped with the example
        after_code = False
        if _SIGNATURE.fullmatch(text):
            term = text
            continue
        if item and paragraphs and paragraphs[-1].endswith(":"):
            items.append(_LIST_END.sub("", text))
            continue
        close_list()
        if _is_prose(text):
            paragraphs.append(f"{term}: {text}" if term else text)
        term = ""
    close_list()
    return [text for text in paragraphs if not text.endswith(":")]


def _split_at_headings(topic: str) -> Iterator[str]:
    """The bodies between headings; footnotes are left out."""
    lines = topic.splitlines()
    body: list[str] = []
    for index, line in enumerate(lines):
        if line.strip() == _FOOTNOTES:
            break
        if _UNDERLINE.fullmatch(line):
            if index and lines[index - 1].strip() and body:
                body.pop()
            yield "\n".join(body)
            body = []
        else:
            body.append(line)
    yield "\n".join(body)


def _split_blocks(body: str) -> list[str]:
    """The blocks between blank lines, items of a list that follow each other each for itself."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", body.strip("\n")):
        start = 0
        lines = block.splitlines()
        for index, line in enumerate(lines):
            if index and _ITEM.match(line.strip()) and not _is_code(block):
                blocks.append("\n".join(lines[start:index]))
                start = index
        blocks.append("\n".join(lines[start:]))
    return [block for block in blocks if block.strip()]


def _is_code(block: str) -> bool:
    """Whether a block is an example, a grammar production or a table.

    Only these carry the marks of one, or are indented and parse as Python or end as no sentence.
    """
    if _CODE_MARKS.search(block):
        return True
    if not block.startswith("   "):
        return False
    source = textwrap.dedent(block)
    if _SIGNATURE.fullmatch(source.strip()):
        return False
    last = source.rstrip()[-1]
    if not (_ITEM.match(source) or last in ".:" or (last in ";,)" and "." in source)):
        return True
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _joined_definition(block: str) -> str:
    """A block as one line; a term with its indented explanation below becomes "term: text"."""
    lines = block.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    if len(lines) > 1 and all(indent > indents[0] for indent in indents[1:]):
        lines[0] = lines[0].rstrip(":") + ":"
    return " ".join(line.strip() for line in lines)


def _without_introduction(paragraph: str) -> str:
    """A paragraph without the last sentence, if that sentence goes on in what follows it."""
    if paragraph[-1] in ".!?)\"'":
        return paragraph
    return " ".join(_SENTENCE_BREAK.split(paragraph)[:-1])


def _is_prose(text: str) -> bool:
    words = [word for word in _WORD.findall(text) if len(word) > 1 or word in "aAI"]
    enough = MIN_WORDS_OF_INTRODUCTION if text.endswith(":") else MIN_WORDS
    return len(words) >= enough and 10 * len(words) >= MIN_WORDS_IN_TEN_CHARS * len(text)


def _tidy(text: str) -> str:
    """Text on one line without the marks of reStructuredText and with plain quotes and dashes."""
    text = " ".join(text.split())
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip()
