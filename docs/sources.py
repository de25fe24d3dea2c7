"""Definitions in the sources, parsed and never imported: where a name comes from, its docstring, its bases.

Knows Python and this repository; what a page looks like is the matter of `make_reference`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = [
    "ROOT",
    "Definition",
    "Function",
    "Module",
    "bases_of",
    "decorators_of",
    "find",
    "load",
    "member_names",
    "real",
]

ROOT = Path(__file__).parents[1]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file, parsed."""

    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if _path(self.name).stem == "__init__" else self.name.rpartition(".")[0]

    @property
    def exports(self) -> list[str]:
        """`__all__`, in its own order, which is the order of reading."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        raise LookupError(f"{self.name} has no __all__")

    def source(self, node: ast.AST) -> str:
        return inspect.cleandoc(ast.get_source_segment(self.text, node, padded=True) or "")


@dataclass(frozen=True)
class Definition:
    """Definition of a name. `doc` stands below constants, within everything else."""

    module: Module
    name: str
    node: ast.stmt
    doc: str

    @property
    def key(self) -> tuple[str, str]:
        return self.module.name, self.name


def _path(name: str) -> Path:
    place = ROOT.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def load(name: str) -> Module:
    text = _path(name).read_text(encoding="utf-8")
    return Module(name, text, ast.parse(text))


def find(module: Module, name: str) -> Definition:
    """Follow imports to where `name` is defined."""
    for node in module.tree.body:
        # What a facade imports when it is asked for, it names for type checkers.
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for item in node.body:
                if isinstance(item, ast.ImportFrom) and name in {
                    alias.asname or alias.name for alias in item.names
                }:
                    return find(load(item.module or ""), name)
    for index, node in enumerate(module.tree.body):
        if isinstance(node, ast.ImportFrom):
            where = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), module.package
            )
            for alias in node.names:
                if (alias.asname or alias.name) == name and where.startswith("neurogrid"):
                    return find(load(where), alias.name)
        elif isinstance(node, ast.ClassDef | Function) and node.name == name:
            return Definition(module, name, node, ast.get_docstring(node) or "")
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name:
                doc = _doc_below(module.tree.body[index + 1 :]) or _comment_above(module, node)
                return Definition(module, name, node, doc)
    raise LookupError(f"{module.name} defines no {name}")


def real(definition: Definition) -> Definition:
    """Follow an alias of the form `Name = package.module.Name` to the definition that it stands for."""
    if isinstance(definition.node, ast.Assign):
        module, _, name = ast.unparse(definition.node.value).rpartition(".")
        return find(load(module), name)
    return definition


def _doc_below(following: list[ast.stmt]) -> str:
    match following[:1]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return inspect.cleandoc(text)
    return ""


def _comment_above(module: Module, node: ast.stmt) -> str:
    lines = module.text.splitlines()[: node.lineno - 1]
    comment: list[str] = []
    while lines and lines[-1].startswith("# "):
        comment.insert(0, lines.pop().removeprefix("# "))
    return "\n".join(comment)


def bases_of(definition: Definition) -> list[Definition]:
    """The bases that are ours, nearest first."""
    assert isinstance(definition.node, ast.ClassDef)
    result = []
    for base in definition.node.bases:
        try:
            found = find(definition.module, ast.unparse(base))
        except LookupError:
            continue  # it is not ours
        result += [found, *bases_of(found)]
    return result


def member_names(definition: Definition) -> dict[str, bool]:
    """Members of a class of ours and its bases, and whether each is a method or property, not a field."""
    if not isinstance(definition.node, ast.ClassDef):
        return {}
    names: dict[str, bool] = {}
    for place in [definition, *bases_of(definition)]:
        assert isinstance(place.node, ast.ClassDef)
        for item in place.node.body:
            if isinstance(item, Function):
                names[item.name] = True
            elif isinstance(item, ast.AnnAssign):
                names[ast.unparse(item.target)] = False
    return names


def decorators_of(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
