"""Markdown of docstrings, with links: which page describes which name, and what a name in a docstring means."""

from __future__ import annotations

import ast
import re
from functools import cache

from sources import find, load, member_names

__all__ = [
    "PAGES",
    "anchor",
    "first_sentence",
    "homes",
    "link_names",
    "markdown",
    "public_names",
    "resolve",
]

PAGES = (
    "neurogrid.errors",
    "neurogrid.p2p.wire",
    "neurogrid.p2p",
    "neurogrid.p2p.blocking",
    "neurogrid.p2p.transport",
    "neurogrid.p2p.transfer",
    "neurogrid.p2p.memory",
    "neurogrid.p2p.discovery",
    "neurogrid.p2p.reach.reach",
    "neurogrid.p2p.trust",
    "neurogrid",
    "neurogrid.blocking",
)

SECTIONS = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


@cache
def homes() -> dict[tuple[str, str], tuple[str, str]]:
    """Page of each public definition, and its name there, by its key."""
    result: dict[tuple[str, str], tuple[str, str]] = {}
    for page in PAGES:
        for name in load(page).exports:
            result.setdefault(find(load(page), name).key, (page, name))
    return result


@cache
def classes() -> dict[str, dict[str, bool]]:
    """The public classes, and the members of each: True for those that have a heading."""
    found = {name: find(load(page), name) for page, name in homes().values()}
    return {
        name: member_names(definition)
        for name, definition in found.items()
        if isinstance(definition.node, ast.ClassDef)
    }


@cache
def public_names() -> frozenset[str]:
    """Names that are links in docstrings: public ones, but those that are also members of public classes."""
    members = frozenset().union(*classes().values())
    return frozenset(name for _, name in homes().values()) - members


def resolve(text: str, page: str) -> str:
    """Give links their targets: of the names that several pages describe, that of the same page, or the first."""

    def one(match: re.Match[str]) -> str:
        module, _, wanted = match[1].rpartition(".")
        if module in PAGES:
            place = homes()[find(load(module), wanted).key][0]
        else:
            wanted = match[1]
            where = {home for home, name in homes().values() if name == wanted.partition(".")[0]}
            place = page if page in where else next(home for home in PAGES if home in where)
        return f"({'' if place == page else place + '.md'}#{anchor(wanted)})"

    return re.sub(r"\(@([\w.]+)\)", one, text)


def anchor(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    return heading.lower().replace(".", "")


# Docstrings to Markdown


def markdown(doc: str, *, about: str = "") -> list[str]:
    """Paragraphs as they are, sections as lists, names as links."""
    lines: list[str] = []
    section: list[str] = []
    for line in [*doc.splitlines(), "end"]:
        if section and line and not line.startswith(" "):
            lines += _section(section, about)
            section = []
        if SECTIONS.match(line):
            section = [line]
        elif section:
            section.append(line)
        else:
            # What is indented is code.
            lines.append(line if line.startswith("    ") else link_names(line, about))
    return lines[:-1]


def _section(section: list[str], about: str) -> list[str]:
    title, *body = section
    indent = min(len(line) - len(line.lstrip()) for line in body if line.strip())
    entries: list[str] = []
    for line in filter(str.strip, body):
        if line[indent:].startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    if title == "Returns:" or title == "Yields:":
        return [f"**{title[:-1]}** " + link_names(" ".join(entries), about), ""]
    return [f"**{title[:-1]}**", "", *(f"- {_entry(entry, about)}" for entry in entries), ""]


def _entry(entry: str, about: str) -> str:
    names, separator, text = entry.partition(": ")
    if not separator or not re.fullmatch(r"[*\w]+(, [*\w]+)*", names):
        return link_names(entry, about)
    # Errors are linked, arguments and attributes are what is described.
    code = [
        link_names(f"`{name}`", about) if name[0].isupper() else f"`{name}`"
        for name in names.split(", ")
    ]
    return f"{', '.join(code)}: {link_names(text, about)}"


def link_names(line: str, about: str) -> str:
    """Escape what Markdown would take for its own, and link public names."""

    def one(match: re.Match[str]) -> str:
        code, error = match.groups()
        if error is not None:
            return f"[{error}](@{error})" if error in public_names() and error != about else error
        if code is None:
            return "\\" + match[0]
        name = code[1:-1].removesuffix("()")
        module, _, last = name.rpartition(".")
        if name in PAGES:
            return f"[{code}]({name}.md)"
        if module in PAGES and last in load(module).exports:
            return f"[{code}](@{module}.{last})"
        if module in classes() and last in classes()[module]:
            return f"[{code}](@{name if classes()[module][last] else module})"
        return f"[{code}](@{name})" if name in public_names() and name != about else code

    # Errors are known for such by their names, quoted or not.
    return re.sub(r"(`[^`]+`)|\b([A-Z]\w+(?:Error|Timeout))\b|[*<]", one, line)


def first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=[\w)`])[.:](?=\s|$)", paragraph)[0]
