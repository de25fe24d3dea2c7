"""Write docs/reference/ from the docstrings: python docs/make_reference.py

One page for each module of `PAGES`, about the names of its `__all__`. Sources are parsed and never imported, so that
the outcome depends on nothing but the sources; the pages of flags and run files alone need what they are about. A name
is described once, on the first page that exports it; pages further down refer to it. With --check nothing is written:
it ends with status 1 and names the pages that are not what they should be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import flags
import run_file
from docstrings import (
    PAGES,
    anchor,
    first_sentence,
    homes,
    link_names,
    markdown,
    public_names,
    resolve,
)
from signatures import call, signature
from sources import (
    ROOT,
    Definition,
    Function,
    Module,
    bases_of,
    decorators_of,
    find,
    load,
    real,
)

TARGET = ROOT / "docs" / "reference"

TWINS = ("twin(", "sync_twin(", "iterating_twin(")

# Signatures


def aliases(module: Module, text: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Values of those names in a signature that are aliases and stand on no page, as lines of comment."""
    for name in dict.fromkeys(re.findall(r"\b[A-Z]\w+", text)):
        if name in seen or name in public_names():
            continue
        try:
            node = find(module, name)
        except LookupError:
            continue
        if isinstance(node.node, ast.Assign | ast.AnnAssign):
            value = ast.unparse(node.node.value) if node.node.value else ""
            yield f"# {name} = {value}"
            yield from aliases(node.module, value, seen | {name})


# Classes


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def _class_signature(definition: Definition) -> str:
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    head = f"class {definition.name}"
    bases = [ast.unparse(base) for base in node.bases]
    # These are not called by a reader.
    if "Made by" in definition.doc or {"ABC", "IntEnum", "Enum"} & set(bases):
        return f"{head}({', '.join(bases)})" if bases else head
    if any(base.split(".")[-1] == "Protocol" and base != definition.name for base in bases):
        return f"{head}({', '.join(bases)})"
    if _commented_fields(definition):
        return f"{head}(...)"  # a table follows
    if "dataclass" in decorators_of(node):
        arguments = [
            ast.unparse(field) for field in _fields(node) if "ClassVar" not in ast.unparse(field)
        ]
        return call(head, [re.sub(r" = field\(.*\)$", "", text) for text in arguments], "")
    for place in [definition, *bases_of(definition)]:
        assert isinstance(place.node, ast.ClassDef)
        for item in place.node.body:
            if isinstance(item, Function) and item.name == "__init__":
                return signature(
                    item, prefix="class ", name=definition.name, is_method=True
                ).removesuffix(" -> None")
    return f"{head}({', '.join(bases)})"


def _values(definition: Definition) -> Iterator[str]:
    """The members of an enum; the fields of bounds, with the comment above each."""
    node, module = definition.node, definition.module
    assert isinstance(node, ast.ClassDef)
    members = [item for item in node.body if isinstance(item, ast.Assign)]
    if members and any(ast.unparse(base).endswith(("Enum", "Code")) for base in node.bases):
        yield from ("| member | value |", "|---|---|")
        for item in members:
            value = item.value
            if isinstance(value, ast.Tuple):  # a number, and what is said of it
                told = f"{module.source(value.elts[0])}, `{ast.unparse(value.elts[1])}`"
            else:
                told = module.source(value)
            yield f"| `{ast.unparse(item.targets[0])}` | {told} |"
        yield ""
    if fields := _commented_fields(definition):
        yield from ("| field | default | |", "|---|---|---|")
        for field, comment in fields.items():
            assert field.value is not None
            value = module.source(field.value)
            yield f"| `{ast.unparse(field.target)}` | `{value}` | {link_names(comment, '')} |"
        yield ""


def _commented_fields(definition: Definition) -> dict[ast.AnnAssign, str]:
    """The fields that have a default, each with the comment above it; none if no field has one."""
    assert isinstance(definition.node, ast.ClassDef)
    lines = definition.module.text.splitlines()
    result = {}
    for field in _fields(definition.node):
        if field.value is None:
            return {}
        above = field.lineno - 1
        while lines[above - 1].startswith("    #"):
            above -= 1
        result[field] = " ".join(line.strip("# ") for line in lines[above : field.lineno - 1])
    return result if any(result.values()) else {}


def _members(definition: Definition) -> Iterator[str]:
    """Methods and properties, those of bases included that no page describes."""
    seen: set[str] = set()
    described = homes()
    for place in [definition, *bases_of(definition)]:
        if place is not definition and place.key in described:
            continue
        assert isinstance(place.node, ast.ClassDef)
        for item in place.node.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.value).startswith(TWINS):
                yield from _twin(definition, item)
            if not isinstance(item, Function) or item.name.startswith("_") or item.name in seen:
                continue
            if any(
                decorator.endswith((".setter", "overload")) for decorator in decorators_of(item)
            ):
                continue
            seen.add(item.name)
            yield from _member(definition, place, item)


def _member(owner: Definition, place: Definition, item: Function) -> Iterator[str]:
    decorators = decorators_of(item)
    yield f"### {owner.name}.{item.name}"
    yield ""
    yield "```python"
    if decorators & {"property", "cached_property"}:
        assert item.returns is not None
        yield f"{item.name}: {ast.unparse(item.returns)}"
    else:
        kind = "async def " if isinstance(item, ast.AsyncFunctionDef) else "def "
        if decorators & {"asynccontextmanager", "contextmanager"}:
            kind = "async with " if "asynccontextmanager" in decorators else "with "
        name = f"{owner.name}.{item.name}" if "classmethod" in decorators else item.name
        is_method = "staticmethod" not in decorators
        text = signature(item, prefix=kind, name=name, is_method=is_method)
        yield text
        yield from aliases(place.module, text)
    yield "```"
    yield ""
    yield from markdown(_doc_of(owner, item), about=owner.name)
    yield ""


def _twin(owner: Definition, item: ast.Assign) -> Iterator[str]:
    """A method that is made of an async one, and has its parameters, result and docstring."""
    assert isinstance(item.value, ast.Call)
    name, _, method = ast.unparse(item.value.args[0]).partition(".")
    inner = real(find(owner.module, name))
    for place in [inner, *bases_of(inner)]:
        assert isinstance(place.node, ast.ClassDef)
        for other in place.node.body:
            if isinstance(other, Function) and other.name == method:
                yield f"### {owner.name}.{method}"
                yield ""
                yield "```python"
                text = signature(other, prefix="def ", name=method, is_method=True)
                yield re.sub(r"-> AsyncGenerator\[(.*), None\]$", r"-> Iterator[\1]", text)
                yield "```"
                yield ""
                page = f"{homes()[inner.key][0]}.md"
                yield f"As [`{method}`]({page}#{anchor(f'{inner.name}.{method}')}) of the async API."
                yield ""
                return
    raise LookupError(f"{inner.name} has no {method}")


def _doc_of(owner: Definition, item: Function) -> str:
    """The docstring, or that of the method which this one overrides."""
    doc = ast.get_docstring(item)
    for base in bases_of(owner):
        assert isinstance(base.node, ast.ClassDef)
        for other in base.node.body:
            if not doc and isinstance(other, Function) and other.name == item.name:
                doc = ast.get_docstring(other)
    return doc or ""


# Pages


def describe(definition: Definition, name: str) -> Iterator[str]:
    node = definition.node
    yield f"## {name}"
    yield ""
    yield "```python"
    if isinstance(node, ast.ClassDef):
        yield _class_signature(definition)
    elif isinstance(node, Function):
        kind = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
        if decorators_of(node) & {"asynccontextmanager", "contextmanager"}:
            kind = "async with " if isinstance(node, ast.AsyncFunctionDef) else "with "
        text = signature(node, prefix=kind, name=name, is_method=False)
        yield text
        yield from aliases(definition.module, text)
    else:
        yield definition.module.source(node)
    yield "```"
    yield ""
    yield from markdown(definition.doc, about=name)
    yield ""
    if isinstance(node, ast.ClassDef):
        described = homes()
        inherited = [base.name for base in bases_of(definition) if base.key in described]
        if inherited:
            yield (
                "Inherits from "
                + ", then ".join(link_names(f"`{base}`", "") for base in inherited)
                + "."
            )
            yield ""
        yield from _values(definition)
        yield from _members(definition)


def page(name: str) -> str:
    module = load(name)
    here: list[tuple[str, Definition]] = []
    elsewhere: list[tuple[str, Definition]] = []
    for export in module.exports:
        definition = find(module, export)
        place = here if homes()[definition.key] == (name, export) else elsewhere
        place.append((export, definition))
    lines = [f"# {name}", "", *markdown(ast.get_docstring(module.tree) or ""), ""]
    lines += ["| name | |", "|---|---|"]
    lines += [
        f"| [`{export}`](@{export}) | {link_names(first_sentence(definition.doc), export)} |"
        for export, definition in [*here, *elsewhere]
    ]
    lines.append("")
    for export, definition in here:
        lines += describe(definition, export)
    text = "\n".join(line.rstrip() for line in lines)
    return resolve(re.sub(r"\n{3,}", "\n\n", text).strip(), name) + "\n"


def pages() -> dict[str, str]:
    """The text of every page, by the name of its file."""
    modules = {f"{name}.md": page(name) for name in PAGES}
    return {**modules, "flags.md": flags.page(), "run-file.md": run_file.page()}


def main(args: list[str]) -> int:
    """Write the pages, or check them."""
    TARGET.mkdir(exist_ok=True)
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in TARGET.glob("*.md")}
    stale = sorted(name for name in wanted | there if wanted.get(name) != there.get(name))
    if "--check" in args:
        if stale:
            print(f"run docs/make_reference.py: {', '.join(stale)}", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        if name in wanted:
            (TARGET / name).write_text(wanted[name], encoding="utf-8")
        else:
            (TARGET / name).unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
