"""Can mutated frames make the codec raise anything but RemoteProtocolError, or take memory? How fast is it?

Every frame is a valid one (the test vectors, and one of each type), cut, spliced, overwritten and lied about
in its lengths. It goes through the decoders of both versions, in two pieces, and its Data through the decoder
of its type's payload. Ends at once, with the frame in hex, when another exception comes out.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from report import table, write_report

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire import MessageType

VECTORS = Path(__file__).parents[1] / "protocol_spec" / "vectors"
SEED = 20_261_121
# Longer vectors are there for their length alone, which mutation would spoil.
MAX_FRAME_BYTES = 1024
REPORT_EVERY = 1_000_000

Decode = Callable[[bytes], object]
PAYLOADS: dict[MessageType, Decode] = {
    MessageType.ACTIVATION: wire.decode_envelope,
    MessageType.RESPONSE: wire.decode_envelope,
    MessageType.TRACED_ACTIVATION: wire.decode_envelope,
    MessageType.TRACED_RESPONSE: wire.decode_envelope,
    MessageType.WEIGHTS: wire.WeightsChunk.decode,
    MessageType.LAYER_STATUS: wire.LayerIds.decode,
    MessageType.LAYER_REQUEST: wire.LayerIds.decode,
    MessageType.MODEL_CONFIG: wire.deserialize_config,
    MessageType.GPU_INFO: wire.GPUInfo.decode,
    MessageType.HELLO: wire.Hello.decode,
    MessageType.ERROR: wire.ErrorPayload.decode,
    MessageType.CONFIG_ACK: wire.ConfigAck.decode,
    MessageType.ASSIGN: wire.Assign.decode,
    MessageType.ASSIGN_ACK: wire.AssignAck.decode,
    MessageType.TRANSFER_OFFER: wire.TransferOffer.decode,
    MessageType.TRANSFER_ACCEPT: wire.TransferAccept.decode,
    MessageType.READY: wire.Ready.decode,
    MessageType.SESSION_OPEN: wire.SessionOpen.decode,
    MessageType.SESSION_CLOSE: wire.SessionClose.decode,
    MessageType.SESSION_ACK: wire.SessionAck.decode,
    MessageType.SESSION_QUERY: wire.SessionQuery.decode,
    MessageType.CREDIT: wire.Credit.decode,
    MessageType.TRANSFER_REQUEST: wire.TransferRequest.decode,
    MessageType.DEVICE_INFO_REQUEST: wire.DeviceInfoRequest.decode,
    MessageType.DEVICE_INFO: wire.DeviceInfo.decode,
}
# Which messages carry the payload of a file of vectors.
CARRIERS = {
    "TensorEnvelope": (
        MessageType.ACTIVATION,
        MessageType.RESPONSE,
        MessageType.TRACED_ACTIVATION,
        MessageType.TRACED_RESPONSE,
    ),
    "WeightsChunk": (MessageType.WEIGHTS,),
    "LayerIds": (MessageType.LAYER_STATUS, MessageType.LAYER_REQUEST),
    "ModelConfig": (MessageType.MODEL_CONFIG,),
    "GPUInfo": (MessageType.GPU_INFO,),
    "ErrorPayload": (MessageType.ERROR,),
}
# Bytes that mean something: msgpack's containers and scalars, ends of ranges, lengths at a limit.
INTERESTING = [
    *(
        bytes([value])
        for value in b"\x00\x01\x7f\x80\xff\xc0\xc1\xc4\xc6\xd9\xdb\xdc\xdd\xde\xdf\xe0\x9f\x8f"
    ),
    b"\xff\xff",
    b"\x00\x01",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x10\x00\x00\x00",
    b"\x00\x10\x00\x08",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
]


@dataclass(frozen=True)
class Frame:
    """A message to begin with, or bytes of a stream (no type: their Data is not decoded)."""

    data: bytes
    msg_type: MessageType | None = None


@dataclass
class Outcomes:
    """Counts of what came out, by decoder and by payload."""

    decoders: dict[str, Counter[str]] = field(
        default_factory=lambda: {"1.0.0": Counter(), "1.1.0": Counter()}
    )
    payloads: dict[str, Counter[str]] = field(default_factory=dict)


def corpus() -> list[Frame]:
    """Every vector that is short enough, as a frame of each type that can carry it."""
    frames = []
    for path in sorted(VECTORS.glob("*.json")):
        subject = json.loads(path.read_text(encoding="utf-8"))
        for case in subject["cases"]:
            if "hex" not in case or len(case["hex"]) > 2 * MAX_FRAME_BYTES:
                continue
            data = bytes.fromhex(case["hex"])
            if "protocol" in subject:
                frames.append(Frame(data))
            elif "payload" in subject:
                for msg_type in _carriers(subject["payload"]):
                    message = wire.TensorMessage(msg_type, data=data)
                    if len(data) <= wire.DEFAULT_LIMITS.for_type(msg_type):
                        frames.append(Frame(wire.encode_message(message), msg_type))
    missing = set(PAYLOADS) - {frame.msg_type for frame in frames}
    if missing:
        raise SystemExit(f"no vector for {missing}")
    return frames


def _carriers(payload: str) -> tuple[MessageType, ...]:
    if payload in CARRIERS:
        return CARRIERS[payload]
    name = "".join("_" + c if c.isupper() else c for c in payload).lstrip("_").upper()
    return (MessageType[name],)


def mutations(frames: list[Frame], seed: int) -> Iterator[Frame]:
    """Endlessly: a frame of the corpus, changed in one to four places, mostly in one."""
    rng = random.Random(seed).random
    num_frames = len(frames)
    while True:
        frame = frames[int(rng() * num_frames)]
        data = bytearray(frame.data)
        for _ in range(1 + int(rng() * rng() * 4)):
            size = len(data)
            at = int(rng() * (size + 1))
            kind = int(rng() * 7)
            if kind == 0:
                del data[at:]
            elif kind == 1:
                del data[at : at + 1 + int(rng() * 8)]
            elif kind == 2:
                other = frames[int(rng() * num_frames)].data
                data[at:at] = other[int(rng() * len(other)) :][:64]
            elif kind == 3:
                value = INTERESTING[int(rng() * len(INTERESTING))]
                data[at : at + len(value)] = value
            elif kind == 4 and size >= wire.EXTENDED_HEADER_BYTES:
                data[21:25] = int(rng() * 2 ** (8 + 8 * int(rng() * 4))).to_bytes(4, "big")
            elif at < size:
                data[at] = int(rng() * 256)
        yield Frame(bytes(data), frame.msg_type)


def run_decoder(decoder: wire.MessageDecoder | wire.StreamDecoder, data: bytes, cut: int) -> str:
    """Feed a stream in two pieces; what came of it."""
    try:
        decoder.receive_data(data[:cut])
        decoder.receive_data(data[cut:])
        if decoder.error is not None:
            raise decoder.error
    except RemoteProtocolError as error:
        return wire.ErrorCode(error.code).name
    try:
        decoder.receive_eof()
    except RemoteProtocolError:
        return "cut"
    return "whole"


def run_payload(decode: Decode, data: bytes) -> str:
    try:
        decode(data)
    except RemoteProtocolError as error:
        return wire.ErrorCode(error.code).name
    return "valid"


def fuzz(num_frames: int, seed: int) -> tuple[Outcomes, float]:
    """Run the frames; the outcomes and the seconds that it took."""
    outcomes = Outcomes(payloads={t.name: Counter() for t in PAYLOADS})
    v10, v11 = outcomes.decoders["1.0.0"], outcomes.decoders["1.1.0"]
    started = time.perf_counter()
    stream = mutations(corpus(), seed)
    for number in range(num_frames):
        frame = next(stream)
        data = frame.data
        cut = number % (len(data) + 1)
        try:
            v10[run_decoder(wire.MessageDecoder(), data, cut)] += 1
            v11[run_decoder(wire.StreamDecoder(), data, cut)] += 1
            if frame.msg_type is not None:
                payload = data[wire.header_bytes(frame.msg_type) :]
                outcome = run_payload(PAYLOADS[frame.msg_type], payload)
                outcomes.payloads[frame.msg_type.name][outcome] += 1
        # Whatever is not the remote protocol error ends the run, and is told with the frame that caused it.
        except Exception as error:
            raise SystemExit(
                f"frame {number} of seed {seed}, {frame.msg_type!r}: {data.hex()}\n{error!r}"
            ) from error
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            rate = (number + 1) / (time.perf_counter() - started)
            print(f"{number + 1:,} frames, {rate:,.0f} a second", file=sys.stderr, flush=True)
    return outcomes, time.perf_counter() - started


def outcome_table(rows: dict[str, Counter[str]], first: str) -> str:
    columns = sorted({name for counts in rows.values() for name in counts})
    columns.sort(key=lambda name: name.isupper())  # what is no error first
    return table(
        [first, *columns, "all"],
        [
            [name, *(f"{counts[c]:,}" for c in columns), f"{counts.total():,}"]
            for name, counts in rows.items()
        ],
    )


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    fuzz(min(options.frames, 10_000), options.seed + 1)  # imports and caches are paid here
    before = peak_kib()
    outcomes, seconds = fuzz(options.frames, options.seed)
    growth = peak_kib() - before
    figures = table(
        [
            "frames",
            "seconds",
            "frames/s",
            "peak memory, MiB",
            "of which the run, MiB",
            "other exceptions",
        ],
        [
            [
                f"{options.frames:,}",
                f"{seconds:.0f}",
                f"{options.frames / seconds:,.0f}",
                f"{(before + growth) / 1024:.1f}",
                f"{growth / 1024:.1f}",
                "0",
            ]
        ],
    )
    write_report(
        "fuzz_decoder",
        f"Mutated frames (seed {options.seed}, one core) through the decoders of both versions, in two pieces "
        "each, and through the decoder of their type's payload. Anything but RemoteProtocolError would have "
        "ended the run.",
        f"{figures}\n\nStreams, by decoder: `whole` ended between messages, `cut` within one.\n\n"
        f"{outcome_table(outcomes.decoders, 'decoder')}\n\nPayloads, by type:\n\n"
        f"{outcome_table(outcomes.payloads, 'payload of')}",
    )


if __name__ == "__main__":
    main()
