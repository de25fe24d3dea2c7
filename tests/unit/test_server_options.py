"""Where to serve, and whom: the options of a coordinator that serves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neurogrid.cli.commands.coordinator import build_parser
from neurogrid.cli.commands.serve import ServingOptions, serving_options
from neurogrid.errors import ConfigurationError


def options(*args: str) -> ServingOptions:
    return serving_options(build_parser().parse_args(args))


def test_loopback_unless_asked() -> None:
    chosen = options()
    assert (chosen.host, chosen.port, chosen.keys) == ("127.0.0.1", 8090, ())
    assert options("--http-host", "::1", "--http-port", "0").port == 0


def test_beyond_loopback_with_a_key_or_on_purpose(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigurationError, match="is not loopback, and anybody"):
            options("--http-host", host)
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text("# for the team\n\n  a-key-of-enough-characters \nanother-key-of-characters")
    chosen = options("--http-host", "0.0.0.0", "--api-key-file", str(file))
    assert chosen.keys == ("a-key-of-enough-characters", "another-key-of-characters")
    assert options("--http-host", "0.0.0.0", "--insecure").keys == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "there is no key in"),
        (b"# nothing\n", "there is no key in"),
        (b"a-key-of-enough-characters\nshort\n", "line 2: a key has 16 characters or more"),
        (b"a key with spaces in it\n", "line 1: a key has .* without spaces"),
        ("schlüssel-mit-umlaut".encode(), "line 1: a key has .* ASCII"),
        (b"k" * 1024 * 1024 + b"\n", "is longer than"),
    ],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_bytes(text)
    with pytest.raises(ConfigurationError, match=says):
        options("--api-key-file", str(file))


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o604, 0o620, 0o660])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-enough-characters")
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode is {mode:04o} .* 0600: chmod 600 {file}"):
        options("--api-key-file", str(file))
    file.chmod(0o400)
    assert options("--api-key-file", str(file)).keys == ("a-key-of-enough-characters",)


def test_keys_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a-key-of-enough-characters")
    os.close(writing)
    try:
        chosen = options("--api-key-file", f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert chosen.keys == ("a-key-of-enough-characters",)


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://", "https://a/b", "ftp://a"])
def test_an_origin_is_scheme_and_host(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="is no origin"):
        options("--cors-origin", origin)
    assert options("--cors-origin", "https://chat.example").cors_origins == (
        "https://chat.example",
    )
