"""Reports that all benchmarks write: machine, versions, command, and a file under `results/` by date and processor."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

__all__ = ["Spread", "spread", "table", "write_report"]

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("neurogrid", "torch", "transformers", "libp2p", "trio")


class Spread(tuple[float, float, float]):
    """Minimum, median and maximum of a figure."""

    @property
    def middle(self) -> float:
        return self[1]

    def show(self, digits: int = 1) -> str:
        low, mid, high = self
        return f"{mid:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise the rounds of one figure."""
    return Spread((min(values), median(values), max(values)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads well as plain text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


def write_report(name: str, question: str, body: str) -> Path:
    """Write `results/DATE-NAME-PROCESSOR.md` and print it; returns the path.

    By processor, since figures differ more between those than between commits: of one day there may be several.
    """
    today = datetime.datetime.now(datetime.UTC).date()
    versions = ", ".join(f"{p} {version}" for p in PACKAGES if (version := _version(p)))
    command = " ".join([Path(sys.executable).name, *sys.argv])
    text = (
        f"# {name}, {today}\n\n{question}\n\n{body}\n\n"
        f"- machine: {_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, "
        f"{platform.system()} {platform.release()}; load average at the end {os.getloadavg()[0]:.1f}\n"
        f"- versions: Python {platform.python_version()}, {versions}; commit {_commit()}\n"
        f"- command: `{command}`\n"
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{today}-{name}-{_slug(_cpu())}.md"
    path.write_text(text)
    print(text)
    return path


def _version(package: str) -> str | None:
    """None where it is not installed: the transport library has benchmarks without torch."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _slug(cpu: str) -> str:
    """A processor's name for a file's: `intel-xeon` of "Intel(R) Xeon(R) Processor"."""
    plain = re.sub(r"\(\w+\)|\bprocessor\b|\bcpu\b.*", " ", cpu.lower())
    return "-".join(re.findall(r"[a-z0-9]+", plain))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return result.stdout.strip() or "unknown"
