"""Witnessed runs once more, written from `protocol_spec/training/witnessed.md` alone, to compare with.

Nothing of NeuroGrid is imported. A state is what its JSON is: a dict. More than 600 lines, as one reads the book.
"""

from __future__ import annotations

import hashlib
import json
import struct
from fractions import Fraction
from typing import Any

State = dict[str, Any]


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


# Selection, assignment


def order(seed: bytes, salt: str, seats: list[int]) -> list[int]:
    keys = {sha(b"neurogrid order 1\0", salt.encode(), b"\0", seed, u32(s)): s for s in seats}
    return [keys[key] for key in sorted(keys)]


def quorum(n: int) -> int:
    return {0: 0, 1: 1, 2: 2, 3: 2}.get(n, n * 2 // 3)


def parts(
    seed: bytes,
    seats: list[int],
    auditors: int,
    witnesses: int,
    first: int,
    num: int,
    trials: list[int],
) -> dict[str, Any]:
    ordered = order(seed, "committee", seats)
    audit: list[int] = []
    while len(audit) < auditors and len(ordered) > 1:
        audit.insert(0, ordered.pop())
    watch = order(seed, "witnesses", seats)
    if 0 < witnesses < len(watch):
        watch = watch[:witnesses]
    works, last = {}, first + num
    for place, seat in enumerate(ordered):
        number = num // len(ordered) + (1 if place < num % len(ordered) else 0)
        if number:
            works[seat] = [first, number]
            first += number
    for place, seat in enumerate(trials):
        works[seat] = [last + place, 1]
    return {
        "trainers": ordered,
        "auditors": audit,
        "witnesses": watch,
        "works": works,
        "quorum": quorum(len(watch)),
    }


# Filters, the tree


def bits_of(salt: bytes, item: bytes) -> set[int]:
    numbers = struct.unpack("<8H", sha(b"neurogrid filter 1\0", salt, b"\0", item)[:16])
    return {number % 1024 for number in numbers}


def filter_of(salt: bytes, items: list[bytes]) -> bytes:
    data = bytearray(128)
    for item in items:
        for bit in bits_of(salt, item):
            data[bit // 8] |= 1 << (bit % 8)
    return bytes(data)


def bits_set(data: bytes) -> set[int]:
    return {bit for bit in range(1024) if data[bit // 8] >> (bit % 8) & 1}


def has(data: bytes, salt: bytes, item: bytes) -> bool:
    return bits_of(salt, item) <= bits_set(data)


def levels(digests: list[bytes]) -> list[list[bytes]]:
    found = [[sha(b"neurogrid leaf 1\0", each) for each in sorted(set(digests))]]
    while len(found[-1]) > 1:
        below, above = list(found[-1]), []
        while len(below) >= 2:
            above.append(sha(b"neurogrid node 1\0", below.pop(0), below.pop(0)))
        found.append(above + below)
    return found


def root(digests: list[bytes]) -> bytes:
    return levels(digests)[-1][0] if digests else sha(b"neurogrid tree 1\0")


def path(digests: list[bytes], digest: bytes) -> list[bytes]:
    at = sorted(set(digests)).index(digest)
    beside = []
    for level in levels(digests):
        other = at - 1 if at % 2 else at + 1
        if other < len(level):
            beside.append(level[other])
        at //= 2
    return beside


# Commitments, proofs


def commitment_digest(c: State) -> bytes:
    numbers = u32(c["seat"], c["epoch"], c["round"])
    batches = c["first_batch"].to_bytes(8, "little") + u32(c["num_batches"])
    return sha(b"neurogrid commitment 1\0", numbers, batches, bytes.fromhex(c["result"]))


def proof_digest(p: State) -> bytes:
    said = [bytes.fromhex(p[key]) for key in ("participants", "results", "root")]
    return sha(b"neurogrid witness 1\0", u32(p["seat"], p["epoch"], p["round"]), *said)


def signed(run: bytes, digest: bytes) -> bytes:
    return b"neurogrid signed 1\0" + run + digest


def proof_of(seat: int, seed: bytes, epoch: int, number: int, had: list[State]) -> State:
    salt = seed + u32(seat)
    digests = [commitment_digest(c) for c in had if c["num_batches"]]
    seats = sorted({seat} | {c["seat"] for c in had})
    return {
        "seat": seat,
        "epoch": epoch,
        "round": number,
        "participants": filter_of(salt, [u32(s) for s in seats]).hex(),
        "results": filter_of(salt, digests).hex(),
        "root": root(digests).hex(),
    }


# Results


def result(
    tensors: list[list[int]], top_k: int, one_bit: bool, offsets: list[list[int]], values: Any
) -> bytes:
    """A result; offsets: of each chunk of each tensor in turn."""
    taken, found, num_values, empty = list(offsets), b"", 0, ""
    for chunks, size in tensors:
        bits = ""
        for chunk in [taken.pop(0) for _ in range(chunks)]:
            if top_k < size:
                width = len(f"{size - 1:b}") if size > 1 else 0
                bits += "".join(f"{offset:0{width}b}"[::-1] for offset in chunk)
        found += bytes_of(bits)
    if one_bit:
        found += bytes_of("".join("1" if value < 0 else "0" for value in values))
        for chunk in offsets:
            own = values[num_values : num_values + len(chunk)]
            num_values += len(chunk)
            empty += "0" if any(own) else "1"
        found += bytes_of(empty)
    else:
        found += struct.pack(f"<{len(values)}f", *values)
    return bytes([2, int(one_bit), 0, 0]) + u32(len(values)) + found


def bytes_of(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


# The machine


def time_text(seconds: float) -> str:
    return struct.pack(">d", seconds).hex()


def seconds_of(text: str) -> float:
    (found,) = struct.unpack(">d", bytes.fromhex(text))
    return float(found)


def beginning(began: float = 0.0) -> State:
    integers = "epoch round round_of_epoch first_batch num_batches next_batch next_seat"
    arrays = (
        "members pending ready commitments proofs agreed seats checkpointed complaints barred "
        "trials trial_seats tried leaving taken_back"
    )
    return {
        **dict.fromkeys(integers.split(), 0),
        **{key: [] for key in arrays.split()},
        **dict.fromkeys(("paused", "reason", "ended"), ""),
        "phase": "waiting_for_members",
        "began": time_text(began),
        "elapsed": time_text(0.0),
        "seed": bytes(32).hex(),
    }


def json_of(state: State) -> State:
    optional = "trials", "trial_seats", "tried", "leaving", "taken_back"
    return {key: value for key, value in state.items() if value or key not in optional}


def state_digest(state: State) -> bytes:
    text = json.dumps(json_of(state), sort_keys=True, separators=(",", ":"))
    return sha(b"neurogrid epoch state 1\0", text.encode("ascii"))


class Book:
    """One run: `state` after each `tick`."""

    def __init__(self, rules: dict[str, Any], state: State | None = None) -> None:
        self.rules = rules
        self.state = (
            beginning() if state is None else {**beginning(), **json.loads(json.dumps(state))}
        )

    def tick(self, now: float, events: list[State], draw: bytes) -> None:
        before = self.state["phase"]
        for event in events:
            if self.state["phase"] != "finished":
                getattr(self, "on_" + event["kind"])(now, event)
        if self.state["phase"] == before:
            self.arrow(now, draw)

    # Looking

    @property
    def phase(self) -> str:
        return self.state["paused"] or self.state["phase"]

    @property
    def in_round(self) -> bool:
        return self.phase in ("round_train", "round_witness")

    @property
    def rounds_made(self) -> int:
        return self.state["round"] - 1 if self.in_round else self.state["round"]

    def healthy(self) -> list[int]:
        return [m[0] for m in self.state["members"] if m[3] == "healthy"]

    def counted(self) -> list[int]:
        s = self.state
        return [m[0] for m in s["members"] if m[3] == "healthy" and m[1] not in s["trials"]]

    def parts(self) -> dict[str, Any]:
        s = self.state
        return parts(
            bytes.fromhex(s["seed"]),
            s["seats"],
            self.rules["auditors"],
            self.rules["witnesses"],
            s["first_batch"],
            s["num_batches"],
            s["trial_seats"],
        )

    # Changing

    def make(self, seats: list[int], health: str) -> None:
        for member in self.state["members"]:
            if member[0] in seats and member[3] == "healthy":
                member[3] = health

    def clear(self) -> None:
        s = self.state
        s["members"] = [m for m in s["members"] if m[3] == "healthy"]
        there = self.healthy()
        s["ready"] = [seat for seat in s["ready"] if seat in there]
        s["complaints"] = [c for c in s["complaints"] if c[0] in there and c[1] in there]

    def take(self) -> None:
        s = self.state
        while s["pending"] and len(self.healthy()) < self.rules["max_members"]:
            self.clear()
            invited = [each for each in s["pending"] if each[0] not in s["trials"]]
            first = (invited or s["pending"])[0]
            s["pending"].remove(first)
            s["members"].append([s["next_seat"], *first, "healthy"])
            s["next_seat"] += 1

    def eject(self, seat: int, peer: str, since: int = 0) -> None:
        s = self.state
        for member in s["members"]:
            if member[0] == seat:
                if peer not in ("", member[1]):
                    return
                peer = member[1]
        if not peer or peer in s["barred"]:
            return
        gone = []
        for member in s["members"]:
            if member[1] == peer:
                member[3] = "ejected"
                gone.append(member[0])
        if since and seat in gone and self.phase != "waiting_for_members":
            s["leaving"] = (s["leaving"] + [[seat, since]])[-128:]
        s["proofs"] = [each for each in s["proofs"] if each["seat"] not in gone]
        s["pending"] = [each for each in s["pending"] if each[0] != peer]
        s["trials"] = [each for each in s["trials"] if each != peer]
        s["barred"] = (s["barred"] + [peer])[-1024:]

    # Events

    def on_joined(self, now: float, event: State) -> None:
        s, who = self.state, [event["peer"], event["incarnation"]]
        if who[0] in s["barred"] or s["reason"]:
            return
        for member in s["members"]:
            if member[1] == who[0] and member[3] == "healthy":
                if member[2] == who[1]:
                    return
                member[3] = "dropped"
        others = [each for each in s["pending"] if each[0] != who[0]]
        if who in s["pending"] or len(others) >= 1024:
            return
        s["pending"] = [*others, who]

    def on_gone(self, now: float, event: State) -> None:
        s, who = self.state, [event["peer"], event["incarnation"]]
        if who in s["pending"]:
            s["pending"].remove(who)
        else:
            self.make([m[0] for m in s["members"] if m[1:3] == who], "dropped")

    def on_left(self, now: float, event: State) -> None:
        self.make([event["seat"]], event["why"])

    def on_warm(self, now: float, event: State) -> None:
        self.note("ready", "warmup", event)

    def on_checkpointed(self, now: float, event: State) -> None:
        self.note("checkpointed", "cooldown", event)

    def note(self, key: str, phase: str, event: State) -> None:
        is_due = self.phase == phase and event["epoch"] == self.state["epoch"]
        if is_due and event["seat"] in self.healthy():
            self.state[key] = sorted({*self.state[key], event["seat"]})

    def is_of_round(self, said: State) -> bool:
        s = self.state
        return (
            self.in_round
            and [said["epoch"], said["round"]] == [s["epoch"], s["round"]]
            and said["seat"] in self.healthy()
        )

    def on_committed(self, now: float, event: State) -> None:
        said, s = event["commitment"], self.state
        if not self.is_of_round(said):
            return
        if [said["first_batch"], said["num_batches"]] != self.parts()["works"].get(
            said["seat"], [0, 0]
        ):
            return
        before = [c for c in s["commitments"] if c["seat"] == said["seat"]]
        if not before:
            s["commitments"] = sorted([*s["commitments"], said], key=lambda c: c["seat"])
        elif before != [said]:
            self.eject(said["seat"], "")

    def on_witnessed(self, now: float, event: State) -> None:
        said, s = event["proof"], self.state
        if not self.is_of_round(said) or said["seat"] not in self.parts()["witnesses"]:
            return
        if any(p["seat"] == said["seat"] for p in s["proofs"]):
            return
        salt = bytes.fromhex(s["seed"]) + u32(said["seat"])
        data = bytes.fromhex(said["participants"])
        there = sorted(s["seats"] + s["trial_seats"])
        items = [u32(seat) for seat in there if has(data, salt, u32(seat))]
        if u32(said["seat"]) not in items or filter_of(salt, items) != data:
            return
        if len(bits_set(bytes.fromhex(said["results"]))) > 8 * len(self.parts()["works"]):
            return
        s["proofs"] = sorted([*s["proofs"], said], key=lambda p: p["seat"])

    def on_unhealthy(self, now: float, event: State) -> None:
        s, by, there, count = self.state, event["by_seat"], self.healthy(), self.counted()
        if [event["epoch"], event["round"]] != [s["epoch"], s["round"]]:
            return
        if self.phase == "waiting_for_members" or by not in count:
            return
        about = [seat for seat in there if seat in event["seats"] and seat != by]
        new = [[by, seat] for seat in about if [by, seat] not in s["complaints"]]
        if new:
            s["complaints"] = sorted(s["complaints"] + new)
            for seat in about:
                num = sum(c[1] == seat and c[0] in count for c in s["complaints"])
                if Fraction(num) > Fraction(len(count), 2):
                    self.make([seat], "dropped")

    def on_pause(self, now: float, event: State) -> None:
        s = self.state
        if not s["paused"] and not s["reason"]:
            s["elapsed"] = time_text(max(0.0, now - seconds_of(s["began"])))
            s["paused"], s["phase"], s["began"] = s["phase"], "paused", time_text(now)

    def on_resume(self, now: float, event: State) -> None:
        s = self.state
        if s["paused"]:
            s["phase"], s["paused"] = s["paused"], ""
            s["began"] = time_text(now - seconds_of(s["elapsed"]))
            s["elapsed"] = time_text(0.0)

    def on_eject(self, now: float, event: State) -> None:
        self.eject(event["seat"], event["peer"], event.get("since", 0))

    def on_trial(self, now: float, event: State) -> None:
        s, peer = self.state, event["peer"]
        members = [m[1] for m in s["members"] if m[3] == "healthy"]
        if peer in [*members, *s["trials"], *s["barred"]] or s["reason"]:
            return
        if len(s["trials"]) < 128:
            s["trials"].append(peer)

    def on_admitted(self, now: float, event: State) -> None:
        if event["peer"] in self.state["trials"]:
            self.state["trials"].remove(event["peer"])

    def on_refused(self, now: float, event: State) -> None:
        s, peer = self.state, event["peer"]
        if peer in s["trials"]:
            s["trials"].remove(peer)
            s["pending"] = [each for each in s["pending"] if each[0] != peer]
            self.make([m[0] for m in s["members"] if m[1] == peer], "dropped")

    def on_stop(self, now: float, event: State) -> None:
        if not self.state["reason"]:
            self.on_resume(now, event)
            self.state["reason"] = event["reason"]

    # Phases

    def enter(self, phase: str, now: float) -> None:
        self.state["phase"], self.state["began"] = phase, time_text(now)

    def arrow(self, now: float, draw: bytes) -> None:
        s, rules = self.state, self.rules
        limits = {"round_train": "train", "round_witness": "witness"}
        seconds = rules.get(limits.get(s["phase"], s["phase"]))
        passed = seconds is not None and now - seconds_of(s["began"]) >= seconds
        match s["phase"]:
            case "waiting_for_members":
                self.count_rounds()
                if s["reason"]:
                    self.enter("finished", now)
                elif len(self.counted()) + self.waiting() >= rules["min_members"]:
                    self.take()
                    self.enter("warmup", now)
            case "warmup":
                self.arrow_of_warmup(now, draw, passed)
            case "round_train":
                watch = self.parts()
                if passed or sum(map(self.is_complete, s["proofs"])) >= watch["quorum"]:
                    self.enter("round_witness", now)
            case "round_witness":
                sent = [p["seat"] for p in s["proofs"]]
                waits = [w for w in self.parts()["witnesses"] if w in self.healthy()]
                if passed or all(w in sent for w in waits):
                    self.end_of_round(now, draw)
            case "cooldown":
                there = self.counted()
                kept = [seat for seat in there if seat in s["checkpointed"]]
                if passed or len(kept) > len(there) - len(kept):
                    self.end_of_epoch(now)

    def waiting(self) -> int:
        room = max(0, self.rules["max_members"] - len(self.healthy()))
        invited = [each for each in self.state["pending"] if each[0] not in self.state["trials"]]
        return min(room, len(invited))

    def arrow_of_warmup(self, now: float, draw: bytes, passed: bool) -> None:
        s, least = self.state, self.rules["min_members"]
        if not passed:
            self.take()
        cold = [seat for seat in self.healthy() if seat not in s["ready"]]
        if s["reason"]:
            self.enter("finished", now)
        elif len(self.counted()) < least:
            self.clear()
            self.enter("waiting_for_members", now)
        elif passed or not cold:
            self.make(cold, "dropped")
            self.clear()
            if len(self.counted()) < least:
                self.enter("waiting_for_members", now)
            else:
                self.begin_round(now, draw)

    def begin_round(self, now: float, draw: bytes) -> None:
        s = self.state
        s["round"] = self.rounds_made + 1
        self.enter("round_train", now)
        s["round_of_epoch"] += 1
        s["seed"], s["seats"] = draw.hex(), self.counted()
        s["trial_seats"] = [seat for seat in self.healthy() if seat not in s["seats"]]
        s["first_batch"], s["num_batches"] = s["next_batch"], self.rules["batches"]
        if not s["num_batches"]:
            s["num_batches"] = len(self.parts()["trainers"])
        s["commitments"], s["proofs"], s["complaints"] = [], [], []

    def results_of(self, proof: State) -> list[State]:
        salt = bytes.fromhex(self.state["seed"]) + u32(proof["seat"])
        data = bytes.fromhex(proof["results"])
        said = [c for c in self.state["commitments"] if c["num_batches"]]
        return [c for c in said if has(data, salt, commitment_digest(c))]

    def is_complete(self, proof: State) -> bool:
        had = self.results_of(proof)
        seats = [c["seat"] for c in had]
        waits = [seat for seat in self.parts()["works"] if seat in self.healthy()]
        is_whole = all(seat in seats for seat in waits)
        return is_whole and proof["root"] == root([commitment_digest(c) for c in had]).hex()

    def end_of_round(self, now: float, draw: bytes) -> None:
        s, roles = self.state, self.parts()
        enough = len(s["proofs"]) >= roles["quorum"]
        said = [[c["seat"] for c in self.results_of(proof)] for proof in s["proofs"]]
        liars = [m[0] for m in s["members"] if m[3] == "ejected"]
        s["agreed"] = [
            c
            for c in sorted(s["commitments"], key=lambda c: c["first_batch"])
            if enough and c["num_batches"] and c["seat"] not in liars
            if sum(c["seat"] in each for each in said) >= roles["quorum"]
        ]
        s["tried"] = [c for c in s["agreed"] if c["seat"] in s["trial_seats"]]
        s["agreed"] = [c for c in s["agreed"] if c["seat"] not in s["trial_seats"]]
        shown = [each["seat"] for each in s["commitments"] + s["proofs"]]
        self.make(
            [x for x in self.healthy() if not self.took_part(x, enough, roles, shown)], "dropped"
        )
        made = self.rounds_made + (1 if s["agreed"] else 0)
        s["taken_back"] = []
        if s["agreed"]:
            s["next_batch"] += s["num_batches"]
            s["taken_back"], s["leaving"] = s["leaving"], []
        self.enter("cooldown", now)
        s["round"] = made
        self.count_rounds()
        if not enough:
            s["ended"] = "quorum"
        elif not s["agreed"]:
            s["ended"] = "nothing_agreed"
        elif s["reason"]:
            s["ended"] = "stopped"
        elif len(self.counted()) < self.rules["min_members"]:
            s["ended"] = "members"
        elif s["round_of_epoch"] >= self.rules["rounds"]:
            s["ended"] = "rounds"
        else:
            self.begin_round(now, draw)

    def took_part(self, seat: int, enough: bool, roles: State, shown: list[int]) -> bool:
        if not enough:
            return seat in shown
        if seat not in roles["works"] and seat in shown:
            return True
        seed = bytes.fromhex(self.state["seed"])
        heard = [
            has(bytes.fromhex(p["participants"]), seed + u32(p["seat"]), u32(seat))
            for p in self.state["proofs"]
        ]
        done = [c["seat"] for c in self.state["agreed"] + self.state["tried"]]
        if seat in roles["works"] and seat not in done:
            return False
        return sum(heard) >= roles["quorum"]

    def count_rounds(self) -> None:
        most = self.rules["max_rounds"]
        if most is not None and self.rounds_made >= most and not self.state["reason"]:
            self.state["reason"] = f"{self.rounds_made} rounds were made"

    def end_of_epoch(self, now: float) -> None:
        s = self.state
        if s["reason"]:
            self.enter("finished", now)
            return
        self.clear()
        self.enter("waiting_for_members", now)
        s["epoch"] += 1
        s["round_of_epoch"] = s["num_batches"] = 0
        for key in ("ready", "seats", "commitments", "proofs", "complaints", "agreed"):
            s[key] = []
        for key in ("trial_seats", "tried", "leaving", "taken_back"):
            s[key] = []
        s["checkpointed"], s["ended"] = [], ""
