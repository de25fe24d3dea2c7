"""`--prompt` and `--prompt-file`: one text, read, continued and written."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from neurogrid.cli.commands.pace import Pace
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.inference.generation.sampling import SamplingParams

__all__ = ["read_prompt", "write_completion"]

# A prompt is read whole before its tokens are counted; no context holds this many bytes.
MAX_PROMPT_BYTES: Final = 64 * 1024 * 1024


def read_prompt(options: argparse.Namespace) -> str:
    """The text to continue. Blocks: it may come from a pipe.

    Raises:
        ConfigurationError: the file cannot be read, or what is in it is no text.
    """
    if options.prompt is not None:
        return _decode(os.fsencode(options.prompt), "the command line")
    name: str = options.prompt_file
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise ConfigurationError(f"the prompt in {name} is longer than {MAX_PROMPT_BYTES:,} B")
    except OSError as exc:
        raise ConfigurationError(f"cannot read the prompt from {name}: {exc.strerror}") from exc
    return _decode(data, name)


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"the prompt in {source} is not UTF-8 text") from exc


async def write_completion(
    coordinator: Coordinator,
    token_ids: Sequence[int],
    screen: Screen,
    *,
    sampling: SamplingParams,
    max_tokens: int,
    adapter: str | None,
) -> None:
    """Stream the completion to stdout, and say at the end how fast it was."""
    from neurogrid.cli.terminal.show import format_bytes
    from neurogrid.p2p.exchange.counters import Direction

    text = coordinator.model.tokenizer.stream()
    pace = Pace()
    async for token_id in coordinator.generate(
        token_ids, max_tokens=max_tokens, sampling=sampling, adapter=adapter
    ):
        pace.tick()
        screen.write(text.push(token_id))
    screen.write(text.finish() + "\n")
    sent = coordinator.counters.total(Direction.SENT).num_bytes
    counted = f" ({len(token_ids)} prompt + {pace.num_tokens} new)" if pace.num_tokens else ""
    told = f", {format_bytes(sent)} sent" if sent else ""  # nothing where it computes alone
    screen.say(
        f"{pace}{counted}{told}",
        event="generated",
        num_tokens=pace.num_tokens,
    )
