"""Rows of `transport.py` without libp2p: sockets, TLS, ZeroMQ, gRPC, Gloo. What others build on, and its limit."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import trio
from transport_load import MIB, Client, Duplex, StreamClient, serve_stream

__all__ = ["ROWS"]

Ready = Callable[[str], None]


class TrioDuplex(Duplex):
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        # The stream's own methods, unwrapped: a call of ours in between would be measured too.
        self.send = stream.send_all  # type: ignore[method-assign]
        self.receive = stream.receive_some  # type: ignore[method-assign]
        self.close = stream.aclose  # type: ignore[method-assign]

    async def send(self, data: bytes | bytearray) -> None: ...

    async def receive(self, max_bytes: int) -> Any: ...

    async def close(self) -> None: ...


class TrioClient(StreamClient):
    def __init__(self, address: str) -> None:
        self._port = int(address)

    async def open(self) -> Duplex:
        return TrioDuplex(await trio.open_tcp_stream("127.0.0.1", self._port))

    async def connect(self) -> float:
        started = time.perf_counter()
        stream = await self.open()
        seconds = time.perf_counter() - started
        await stream.close()
        return seconds


def serve_trio(ready: Ready) -> None:
    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        ready(str(listener.socket.getsockname()[1]))
        await trio.serve_listeners(lambda stream: serve_stream(TrioDuplex(stream)), [listener])

    trio.run(main)


class UnpacedClient(TrioClient):
    async def open(self) -> Duplex:
        stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        _leave_unpaced(stream)
        return TrioDuplex(stream)


def serve_unpaced(ready: Ready) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        _leave_unpaced(stream)
        await serve_stream(TrioDuplex(stream))

    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        ready(str(listener.socket.getsockname()[1]))
        await trio.serve_listeners(serve, [listener])

    trio.run(main)


def _leave_unpaced(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class BlockingDuplex(Duplex):
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = memoryview(bytearray(MIB))

    async def send(self, data: bytes | bytearray) -> None:
        self._socket.sendall(data)

    async def receive(self, max_bytes: int) -> memoryview:
        num_bytes = self._socket.recv_into(self._buffer[: min(max_bytes, MIB)])
        return self._buffer[:num_bytes]

    async def close(self) -> None:
        self._socket.close()


class BlockingClient(StreamClient):
    context: ssl.SSLContext | None = None

    def __init__(self, address: str) -> None:
        self._port = int(address)

    async def open(self) -> Duplex:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return BlockingDuplex(self.context.wrap_socket(sock) if self.context else sock)

    async def connect(self) -> float:
        started = time.perf_counter()
        stream = await self.open()
        seconds = time.perf_counter() - started
        await stream.close()
        return seconds


class TlsClient(BlockingClient):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.context = ssl.create_default_context()
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_NONE
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3


def serve_blocking(ready: Ready, context: ssl.SSLContext | None = None) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready(str(listener.getsockname()[1]))
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(sock, context), daemon=True).start()


def _serve_one(sock: socket.socket, context: ssl.SSLContext | None) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        sock = context.wrap_socket(sock, server_side=True)
    coroutine = serve_stream(BlockingDuplex(sock))
    try:
        coroutine.send(None)  # it blocks, and never waits for a loop
    except (StopIteration, OSError, EOFError):
        sock.close()


def serve_tls(ready: Ready) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        file.write(_certificate())
        file.flush()
        context.load_cert_chain(file.name)
    serve_blocking(ready, context)


def _certificate() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem) + key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# ---------------------------------------------------------------------- ZeroMQ


class ZmqClient(Client):
    """DEALER to DEALER; a message of one byte asks for nothing, an empty one for an answer when it arrives."""

    curve = False

    def __init__(self, address: str) -> None:
        import zmq

        port, _, server_key = address.partition(" ")
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        if self.curve:
            public, secret = zmq.curve_keypair()
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_serverkey = server_key.encode()
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def throughput(self, size: int, count: int) -> float:
        data = os.urandom(size)
        started = time.perf_counter()
        for _ in range(count):
            self._socket.send_multipart([b"", data], copy=False)
        self._socket.send_multipart([b"x", b""])
        self._socket.recv_multipart()
        return time.perf_counter() - started

    async def round_trips(self, size: int, count: int) -> list[float]:
        data = os.urandom(size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._socket.send_multipart([b"x", data], copy=False)
            self._socket.recv_multipart(copy=False)
            times.append(time.perf_counter() - started)
        return times


class CurveClient(ZmqClient):
    curve = True


def serve_zmq(ready: Ready, *, curve: bool = False) -> None:
    import zmq

    sock = zmq.Context.instance().socket(zmq.DEALER)
    public = b""
    if curve:
        public, secret = zmq.curve_keypair()
        sock.curve_server, sock.curve_publickey, sock.curve_secretkey = True, public, secret
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    ready(f"{port} {public.decode()}")
    while True:
        kind, data = sock.recv_multipart(copy=False)
        if kind.bytes:
            sock.send_multipart([b"", data], copy=False)


def serve_curve(ready: Ready) -> None:
    serve_zmq(ready, curve=True)


# ---------------------------------------------------------------------- gRPC

GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class GrpcClient(Client):
    """Bytes without protobuf, so that only the transport counts; no TLS."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = self._dial()

    def _dial(self) -> Any:
        import grpc

        return grpc.insecure_channel(self._address, options=GRPC_OPTIONS)

    async def throughput(self, size: int, count: int) -> float:
        data = os.urandom(size)
        started = time.perf_counter()
        self._channel.stream_unary("/bench/sink")(data for _ in range(count))
        return time.perf_counter() - started

    async def round_trips(self, size: int, count: int) -> list[float]:
        import queue

        todo: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        answers = self._channel.stream_stream("/bench/echo")(iter(todo.get, None))
        data = os.urandom(size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            todo.put(data)
            next(answers)
            times.append(time.perf_counter() - started)
        todo.put(None)
        return times

    async def new_stream(self, size: int) -> float:
        return (await self.round_trips(size, 1))[0]

    async def connect(self) -> float:
        import grpc

        started = time.perf_counter()
        channel = self._dial()
        grpc.channel_ready_future(channel).result(30)
        seconds = time.perf_counter() - started
        channel.close()
        return seconds


def serve_grpc(ready: Ready) -> None:
    import grpc

    def sink(requests: Any, context: Any) -> bytes:
        return str(sum(len(request) for request in requests)).encode()

    def echo(requests: Any, context: Any) -> Any:
        yield from requests

    server = grpc.server(futures.ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    handlers = {
        "sink": grpc.stream_unary_rpc_method_handler(sink),
        "echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready(f"127.0.0.1:{port}")
    server.wait_for_termination()


# ---------------------------------------------------------------------- Gloo


class GlooClient(Client):
    """torch.distributed: point-to-point, in order, no encryption; a header tensor says what follows."""

    def __init__(self, address: str) -> None:
        self._dist = _gloo(address, rank=1)

    async def throughput(self, size: int, count: int) -> float:
        import torch

        data = torch.randint(0, 255, (size,), dtype=torch.uint8)
        started = time.perf_counter()
        self._dist.send(torch.tensor([0, size, count]), 0)
        for _ in range(count):
            self._dist.send(data, 0)
        self._dist.recv(torch.zeros(1), 0)
        return time.perf_counter() - started

    async def round_trips(self, size: int, count: int) -> list[float]:
        import torch

        data = torch.randint(0, 255, (size,), dtype=torch.uint8)
        self._dist.send(torch.tensor([1, size, count]), 0)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._dist.send(data, 0)
            self._dist.recv(data, 0)
            times.append(time.perf_counter() - started)
        return times


def serve_gloo(ready: Ready) -> None:
    import torch

    path = Path(tempfile.mkdtemp()) / "rendezvous"
    ready(str(path))
    dist = _gloo(str(path), rank=0)
    task = torch.zeros(3, dtype=torch.int64)
    while True:
        dist.recv(task, 1)
        is_echo, size, count = task.tolist()
        data = torch.zeros(size, dtype=torch.uint8)
        for _ in range(count):
            dist.recv(data, 1)
            if is_echo:
                dist.send(data, 1)
        if not is_echo:
            dist.send(torch.zeros(1), 1)


def _gloo(path: str, *, rank: int) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    return dist


# name: (module that must be there, serve, client)
ROWS: dict[str, tuple[str, Callable[[Ready], None], Callable[[str], Any]]] = {
    "raw trio TCP": ("trio", serve_trio, TrioClient),
    "raw trio TCP, not paced": ("trio", serve_unpaced, UnpacedClient),
    "blocking sockets": ("socket", serve_blocking, BlockingClient),
    "ssl, TLS 1.3": ("ssl", serve_tls, TlsClient),
    "ZeroMQ": ("zmq", serve_zmq, ZmqClient),
    "ZeroMQ with CURVE": ("zmq", serve_curve, CurveClient),
    "gRPC": ("grpc", serve_grpc, GrpcClient),
    "Gloo": ("torch", serve_gloo, GlooClient),
}
