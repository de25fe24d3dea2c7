"""A hub of models on loopback: the routes that a download takes, and what can go wrong there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["Fault", "Hub", "Repository", "loopback_hub"]

# Files that a hub keeps beside git, by what their names end with.
LARGE = (".safetensors", ".bin", ".gguf", ".pt", ".model")
PIECE = 16 * 1024
# Where large files come from: another host, to which the hub leads.
STORE = "/store"


@dataclass
class Fault:
    """What happens at each request for a path that ends so, as often as it says.

    Attributes:
        status, error_code: the answer instead; None to answer.
        cut_at: bytes of the file after which the connection ends, counted in this answer.
        wrong_at: the byte of the file that is sent otherwise.
        stall_at: bytes of this answer after which nothing comes until the hub ends.
        seconds_a_piece: wait before each piece.
        body: sent instead, as HTML.
        without_ranges: the whole is sent, whatever is asked for.
    """

    path: str
    times: int = 1_000_000
    method: str = "GET"
    status: int | None = None
    error_code: str | None = None
    cut_at: int | None = None
    wrong_at: int | None = None
    stall_at: int | None = None
    seconds_a_piece: float = 0.0
    body: bytes | None = None
    without_ranges: bool = False


@dataclass
class Repository:
    """Files by path, under each revision's name; the commit is made of them.

    Attributes:
        token: what is asked for; None for nothing.
        is_gated: whether others are told that it exists.
    """

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None
    is_gated: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> Repository:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        return cls({"main": files})

    def commit(self, revision: str) -> str | None:
        """The commit that a revision is."""
        for name, files in self.revisions.items():
            commit = hashlib.sha1(name.encode() + b"".join(files.values())).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def files(self, revision: str) -> dict[str, bytes]:
        commit = self.commit(revision)
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Hub:
    """The hub: what it has, what goes wrong, and what it was asked.

    Attributes:
        requests: method, path and range of each.
        headers: of each request.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """That of a process which uses it, and a cache below `home`."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGING_FACE_"))
        }
        # As short as it may be: a hub that says nothing is given up after that.
        timeouts = {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home), **timeouts, **more}

    def gets(self, file: str) -> list[int]:
        """From which byte on the content of a file was asked for, at each request."""
        return [
            int(told.removeprefix("bytes=").partition("-")[0]) if told else 0
            for method, path, told in self.requests
            if method == "GET" and path.endswith(file)
        ]

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and path.endswith(fault.path) and method == fault.method:
                fault.times -= 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.headers.append(dict(self.headers))
        is_from_store = path.startswith(STORE)
        if is_from_store:
            # Whoever has the address has the file; a token is for the hub alone.
            assert self.headers.get("Authorization") is None
            path = path.removeprefix(STORE)
        elif self.command == "GET" and "/resolve/" in path and path.endswith(LARGE):
            hub.requests.append(("REDIRECT", path, None))
            store = hub.url.replace("127.0.0.1", "localhost") + STORE
            return self._send(302, b"", {"Location": store + path})
        hub.requests.append((self.command, path, self.headers.get("Range")))
        fault = hub.fault(self.command, path)
        if fault is not None and fault.body is not None:
            return self._send(200, fault.body, {"Content-Type": "text/html"})
        if fault is not None and fault.status is not None:
            told = {"X-Error-Code": fault.error_code} if fault.error_code else {}
            return self._send(fault.status, b"", told)
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
        ):
            found = re.fullmatch(pattern, path)
            if found:
                return self._of_repository(is_from_store, answer, fault, *found.groups())
        return self._send(404, b"")

    def _of_repository(
        self,
        is_from_store: bool,
        answer: Any,
        fault: Fault | None,
        name: str,
        revision: str,
        *rest: str,
    ) -> None:
        repository = self.hub.repositories.get(name)
        may_see = repository is not None and (
            repository.token is None
            or is_from_store
            or self.headers.get("Authorization") == f"Bearer {repository.token}"
        )
        if repository is None or not may_see:
            if repository is not None and repository.is_gated:
                status = 403 if self.headers.get("Authorization") else 401
                return self._send(status, b"", {"X-Error-Code": "GatedRepo"})
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        commit = repository.commit(revision)
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        answer(repository.files(revision), commit, name, fault, *rest)
        return None

    def _info(self, files: dict[str, bytes], commit: str, name: str, fault: Fault | None) -> None:
        siblings = [{"rfilename": path} for path in files]
        self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _tree(self, files: dict[str, bytes], commit: str, name: str, fault: Fault | None) -> None:
        listing: list[dict[str, object]] = []
        for path, data in files.items():
            entry: dict[str, object] = {
                "type": "file",
                "path": path,
                "size": len(data),
                "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if path.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entry["xetHash"] = digest
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            listing.append(entry)
        self._send_json(listing)

    def _file(
        self, files: dict[str, bytes], commit: str, name: str, fault: Fault | None, path: str
    ) -> None:
        if path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = files[path]
        etag = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            etag = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'}
        headers["ETag"] = f'"{etag}"'
        if fault is not None and fault.wrong_at is not None:
            at = fault.wrong_at
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and not (fault is not None and fault.without_ranges):
            start = int(asked[1])
            if start >= len(data):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            stop = min(int(asked[2]) + 1, len(data)) if asked[2] else len(data)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            return self._send(206, data[start:stop], headers, fault)
        return self._send(200, data, headers, fault)

    def _send_json(self, told: object) -> None:
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = fault or Fault("")
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            if fault.stall_at is not None and start >= fault.stall_at:
                self.hub.is_over.wait()
            if fault.cut_at is not None and start + len(piece) > fault.cut_at:
                self.wfile.write(piece[: max(fault.cut_at - start, 0)])
                self.close_connection = True
                return
            time.sleep(fault.seconds_a_piece)
            try:
                self.wfile.write(piece)
            except OSError:  # whoever asked has gone
                self.close_connection = True
                return


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    """A hub that has nothing yet, on a free port, as long as the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub, "timeout": 5})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.is_over.set()
            server.shutdown()
            thread.join()
