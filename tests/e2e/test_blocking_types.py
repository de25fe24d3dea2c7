"""What type checkers, and so editors, see of the blocking face, whose methods are made and not written.

Of other packages, and of what else is here, mypy reads nothing: that would take it half a minute.
"""

from __future__ import annotations

from pathlib import Path

from mypy import api as mypy

PROGRAM = """
from neurogrid.p2p import TensorMessage, blocking
from neurogrid.p2p.transfer import FetchedBlob

with blocking.open_host(listen=["/ip4/127.0.0.1/tcp/0"]) as host:
    peer_id: str = host.connect("/memory/1")
    protocol = blocking.Protocol(host, role="worker")
    protocol.on_activation_received(lambda message: message.data)
    reply: TensorMessage = protocol.request_activation(peer_id, 0, 0, b"", timeout=1.0)
    layers: tuple[int, ...] = protocol.request_layer_status(peer_id, timeout=1.0)
    transfers = blocking.Transfers(protocol)
    fetched: FetchedBlob = transfers.fetch_blob(peer_id, bytes(32))
    num_sent: int = blocking.send_blob(protocol, peer_id, b"").sent_bytes
"""
CONFIG = """
[mypy]
strict = True
follow_imports = skip
[mypy-neurogrid,neurogrid.errors,neurogrid.p2p.*]
follow_imports = normal
"""
MISTAKES = {
    'protocol.request_activation(peer_id, 0, 0, b"")': 'Missing named argument "timeout"',
    "protocol.send_layer_status(peer_id, 1)": "incompatible type",
    "host.connect(1)": "incompatible type",
    "host.dial(peer_id)": "has no attribute",
    "number: int = protocol.request_gpu_info(peer_id, timeout=1.0)": 'has type "GPUInfo"',
    "transfers.fetch_blob(peer_id, 1)": "incompatible type",
    "blocking.send_blob(host, peer_id, b'')": "incompatible type",
    "blocking.open_host(listening=[])": "Unexpected keyword argument",
}


def test_type_checkers_see_through_it(tmp_path: Path) -> None:
    file, config = tmp_path / "program.py", tmp_path / "mypy.ini"
    file.write_text(PROGRAM + "".join(f"    {mistake}\n" for mistake in MISTAKES))
    config.write_text(CONFIG)
    options = ["--no-error-summary", "--hide-error-context", "--cache-dir", str(tmp_path / "cache")]
    report, errors, _ = mypy.run([*options, "--config-file", str(config), str(file)])
    assert errors == ""
    # What is wrong elsewhere is the matter of `make check`.
    found = [line for line in report.splitlines() if f"/{file.name}:" in line]
    assert len(found) == len(MISTAKES), report
    for line, what in zip(found, MISTAKES.values(), strict=True):
        assert what in line
