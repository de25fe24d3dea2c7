"""Write the picture and the tables of docs/architecture.md from the imports: python docs/make_architecture.py

Sources are parsed and never imported. What stands between the two marks of the page is made here, the rest of it by
hand. With --check nothing is written: it ends with status 1 if the page is not what it should be.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from sources import ROOT, load

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "neurogrid"
BEGIN, END = "<!-- made by docs/make_architecture.py -->\n", "<!-- until here -->\n"

Graph = dict[str, set[str]]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = {name for name, file in MODULES.items() if file.name == "__init__.py"}


def floor_of(module: str) -> str:
    """`neurogrid.p2p.link.yamux` stands on the floor `p2p`; what lies flat in the package on none: ``."""
    parts = module.split(".")
    return parts[1] if ".".join(parts[:2]) in FOLDERS and len(parts) > 1 else ""


def room_of(module: str) -> str:
    """`neurogrid.p2p.link.yamux` stands in `p2p.link`; what lies flat on a floor is a room of its own."""
    return ".".join(module.split(".")[1:3]) if floor_of(module) else ""


@cache
def imports_of(module: str) -> frozenset[str]:
    """Our modules that it imports, wherever in it that stands."""
    names = {
        name if (name := f"{node.module}.{alias.name}") in MODULES else node.module
        for node in ast.walk(load(module).tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    return frozenset(names & MODULES.keys())


def graph(place: dict[str, str]) -> Graph:
    """Places that each place imports, by the place of each module."""
    edges: Graph = {name: set() for name in place.values() if name}
    for module, here in place.items():
        for name in imports_of(module):
            there = place[name]
            if here and there and here != there:
                edges[here].add(there)
    return edges


def from_below(edges: Graph) -> list[str]:
    """Each after those that it imports; the same whenever it is asked for.

    Raises:
        CycleError: two of them import each other, over however many between.
    """
    return list(
        TopologicalSorter({name: sorted(edges[name]) for name in sorted(edges)}).static_order()
    )


def reduced(edges: Graph) -> Graph:
    """Leave out the arrows that follow from others."""
    reach: Graph = {}
    for name in from_below(edges):
        reach[name] = edges[name].union(*(reach[near] for near in edges[name]))
    return {
        name: {near for near in nearest if not any(near in reach[o] for o in nearest - {near})}
        for name, nearest in edges.items()
    }


def first_line(module: str) -> str:
    """Summary of a module's docstring, as one line."""
    return (ast.get_docstring(load(module).tree) or "").partition("\n\n")[0].replace("\n", " ")


def text() -> str:
    """The picture of the floors, and a table of rooms for each, from below."""
    floors = graph({module: floor_of(module) for module in MODULES})
    rooms = graph({module: room_of(module) for module in MODULES})
    order, in_order = from_below(floors), from_below(rooms)
    lines = ["```mermaid", "flowchart TD"]
    for name, below in sorted(reduced(floors).items(), key=lambda item: order.index(item[0])):
        lines += [f"    {name}", *(f"    {name} --> {near}" for near in sorted(below))]
    lines += ["```", ""]
    for floor in order:
        door = f"neurogrid.{floor}"
        lines += [f"### {floor}", "", first_line(door), ""]
        lines += ["| room or module | what it is | modules |", "|---|---|---|"]
        for room in in_order:
            if room.startswith(f"{floor}."):
                num_modules = sum(room_of(module) == room for module in MODULES)
                name = room.partition(".")[2] + "/" * (f"neurogrid.{room}" in FOLDERS)
                what = first_line(f"neurogrid.{room}")
                lines.append(f"| `{name}` | {what} | {num_modules} |")
        lines.append("")
    return "\n".join(lines)


def main(args: list[str]) -> int:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{text()}\n{END}{after}"
    if "--check" in args:
        if page != wanted:
            print("run docs/make_architecture.py", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
