"""The Markdown reader of the page is the package `marked` as it is published, at the version of the lock file."""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parent / "js" / "node_modules" / "marked"
OURS = Path(__file__).parents[3] / "neurogrid" / "server" / "page" / "static"


def test_it_is_what_its_authors_published() -> None:
    published = (PUBLISHED / "lib" / "marked.esm.js").read_text()
    # Without the address of its source map: a browser with its tools open would ask for that.
    assert (OURS / "marked.js").read_text() == published.partition("//# sourceMappingURL")[0]
    assert (OURS / "marked-license.txt").read_text() == (PUBLISHED / "LICENSE").read_text()
