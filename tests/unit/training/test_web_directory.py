"""A data directory behind a web server: what comes from there is believed only where it is what its name says."""

from __future__ import annotations

import functools
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import neurogrid.training.data.web as web_module
from neurogrid.errors import ConfigurationError, RemoteProtocolError, TransportError
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.data.web import WebDirectory, is_web_address


@contextmanager
def web_server(folder: Path, failing: int = 0) -> Iterator[tuple[str, list[str]]]:
    """A server of the files in `folder`, and what it was asked for; the first answers are 503."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) <= failing:
                self.send_error(503)
            elif self.path.startswith("/moved/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/moved"))
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "_DELAYS", (0.01, 0.01))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Slices of token ids, and beside them files that are called a tokenizer."""
    ids = tmp_path / "ids.bin"
    np.random.default_rng(1).integers(0, 900, 40_000).astype("<u2").tofile(ids)
    prepare(ids, tmp_path / "data", vocab_size=900, sequence_length=64, slice_samples=64, seed=1)
    return tmp_path / "data"


async def test_a_directory_as_it_was_prepared(data: Path) -> None:
    manifest = read_manifest(data)
    with web_server(data.parent) as (url, _):
        for place in ("data", "data/", "moved/data"):
            web = WebDirectory(f"{url}/{place}")
            assert await web.manifest() == manifest
            for info in (*manifest.slices[:2], *manifest.held_out):
                blob = await web.fetch(info)
                assert bytes(blob.data) == slice_path(data, info).read_bytes()
                assert blob.info.blob_id == info.blob_id


async def test_a_server_that_is_busy_is_asked_again(data: Path) -> None:
    with web_server(data.parent, failing=2) as (url, asked):
        assert await WebDirectory(f"{url}/data").manifest() == read_manifest(data)
        assert asked == ["/data/manifest.json"] * 3


async def test_what_is_not_the_slice_is_refused(data: Path) -> None:
    manifest = read_manifest(data)
    changed, longer, gone = manifest.slices[:3]
    content = bytearray(slice_path(data, changed).read_bytes())
    content[-1] ^= 1
    slice_path(data, changed).write_bytes(content)
    slice_path(data, longer).write_bytes(slice_path(data, longer).read_bytes() + b"x")
    slice_path(data, gone).unlink()
    with web_server(data.parent) as (url, asked):
        web = WebDirectory(f"{url}/data")
        with pytest.raises(RemoteProtocolError, match="is not what its name says"):
            await web.fetch(changed)
        with pytest.raises(RemoteProtocolError, match="is longer than"):
            await web.fetch(longer)
        with pytest.raises(TransportError, match=r"is not there \(404\)"):
            await web.fetch(gone)
        assert len(asked) == 3  # none of these is mended by asking again


@contextmanager
def breaking_server(
    content: bytes, *, broken: int, parts: bool, other: bytes = b"", says_length: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """A server of one content, whose first answers end after 1,000 bytes of it; and the ranges that it was asked for.

    Args:
        broken: answers that end too early.
        parts: whether it gives parts of files.
        other: what it gives at the first time instead.
        says_length: whether it says how many bytes come.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            asked.append(wanted)
            now = other if other and len(asked) == 1 else content
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and parts else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(now) - 1}/{len(now)}")
            if says_length:
                self.send_header("Content-Length", str(len(now) - start))
            self.end_headers()
            is_broken = len(asked) <= broken
            self.wfile.write(now[start : start + 1000] if is_broken else now[start:])

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    with serving(Handler) as url:
        yield url, asked


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("parts", "ranges"),
    [(True, ["", "bytes=1000-", "bytes=2000-"]), (False, ["", "bytes=1000-", "bytes=1000-"])],
)
@pytest.mark.parametrize("says_length", [True, False])
async def test_what_was_broken_off_goes_on(
    data: Path, parts: bool, ranges: list[str], says_length: bool
) -> None:
    """Where a server gives parts; where it gives whole files only, it begins anew."""
    info = read_manifest(data).slices[0]
    content = slice_path(data, info).read_bytes()
    with breaking_server(content, broken=2, parts=parts, says_length=says_length) as (url, asked):
        blob = await WebDirectory(url).fetch(info)
        assert bytes(blob.data) == content
        assert asked == ranges


async def test_parts_of_two_files_are_asked_for_as_a_whole(data: Path) -> None:
    """A file that was changed between two answers; and a server that goes on giving the wrong one."""
    info, wrong = read_manifest(data).slices[:2]
    content, other = (slice_path(data, each).read_bytes() for each in (info, wrong))
    with breaking_server(content, broken=1, parts=True, other=other) as (url, asked):
        blob = await WebDirectory(url).fetch(info)
        assert bytes(blob.data) == content
        assert asked == ["", "bytes=1000-", ""]
    with breaking_server(other, broken=1, parts=True) as (url, asked):
        with pytest.raises(RemoteProtocolError, match="is not what its name says"):
            await WebDirectory(url).fetch(info)
        assert asked == ["", "bytes=1000-", ""]


async def test_a_server_that_sends_a_little_again_and_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for slices has a time for it; a manifest and a tokenizer have one here."""
    monkeypatch.setattr(web_module, "_SILENCE", 0.5)
    monkeypatch.setattr(web_module, "_SENT_PER_SECOND", 2**60)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(30):
                    self.wfile.write(b" ")
                    time.sleep(0.1)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    with serving(Handler) as url:
        web = WebDirectory(f"{url}/data")
        with pytest.raises(ConfigurationError, match="did not give all of it within"):
            await web.manifest()
        with pytest.raises(ConfigurationError, match="did not give all of it within"):
            await web.tokenizer(tmp_path / "out", "")


async def test_a_server_that_breaks_off_each_time(data: Path) -> None:
    info = read_manifest(data).slices[0]
    content = slice_path(data, info).read_bytes()
    with breaking_server(content, broken=9, parts=True) as (url, asked):
        with pytest.raises(TransportError):
            await WebDirectory(url).fetch(info)
        assert asked == ["", "bytes=1000-", "bytes=2000-"]


async def test_a_server_that_is_not_there(data: Path) -> None:
    with web_server(data.parent) as (url, _):
        pass
    with pytest.raises(ConfigurationError, match="/data/ is no data directory that can be read"):
        await WebDirectory(f"{url}/data").manifest()
    with pytest.raises(TransportError):
        await WebDirectory(f"{url}/data").fetch(read_manifest(data).slices[0])


async def test_another_tokenizer_than_the_manifests_is_refused(data: Path, tmp_path: Path) -> None:
    (data / "tokenizer").mkdir()
    (data / "tokenizer" / "tokenizer.json").write_text("{}")
    with web_server(data.parent) as (url, _):
        web = WebDirectory(f"{url}/data")
        with pytest.raises(ConfigurationError, match="another tokenizer than the manifest says"):
            await web.tokenizer(tmp_path / "out", "sha256:" + "0" * 64)
        assert not (tmp_path / "out").exists()
        await web.tokenizer(tmp_path / "out", "")
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
        await WebDirectory(f"{url}/nothing").tokenizer(tmp_path / "none", "")
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "url",
    ["http://", "ftp://host/data", "http://host:port/data", "https://host/data?x=1", "http://[::1"],
)
def test_what_is_no_address_of_a_directory(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is no address of a directory"):
        WebDirectory(url)


def test_a_password_is_not_told_to_all_members() -> None:
    with pytest.raises(ConfigurationError, match="all members would be told") as caught:
        WebDirectory("https://somebody:secret-word@host/data")
    assert "secret-word" not in str(caught.value)


def test_paths_are_no_addresses() -> None:
    assert is_web_address("https://host/data")
    assert not is_web_address("data/https://host")
