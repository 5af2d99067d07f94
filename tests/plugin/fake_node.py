"""A node in a few lines of Python: the other end of the plugin's socket, for tests and for trying a real engine.

As a module: `Node` is stepped by the test, without threads, and what it answers can be replaced call by call.
As a program: `fake_node.py SOCKET [--keep DIR] [--budget ROWS] [--rate N] [--hold load|store] [--deaf]` serves one engine
until it is killed; rows are kept in memory, with --keep also in DIR, and each report is printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import select
import socket
import struct
import sys

HELLO, STORE, LOAD, REPORT = 1, 2, 3, 4
WELCOME, DONE, TIER, PACE, REFUSE = 64, 65, 66, 67, 68
FAILED, FROM_DRIVE, FROM_PEER, STORED, HELD = range(5)
DRIVE, PEER = 1, 2
GOLDEN = 0x9E37_79B9_7F4A_7C15
SOURCES = ("prompt", "device", "staging", "drive", "peer", "computed")


class Table:
    """The writer's side of the lookup table."""

    def __init__(self, slots: int = 4096):
        self.slots, self.buckets = slots, slots // 8
        self.fd = os.memfd_create("fake-node-table", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, slots * 8)
        self.map = mmap.mmap(self.fd, slots * 8)
        self.words = memoryview(self.map).cast("Q")

    def _place(self, key: bytes):
        head, second = struct.unpack_from("<QQ", key)
        (group,) = struct.unpack_from(">I", key, 32)
        tag = (head ^ (group * GOLDEN) % 2**64) // 4 * 4 or 4
        first = second % self.buckets
        return tag, first, (first ^ (1 | tag >> 32)) % self.buckets

    def _find(self, key: bytes):
        tag, *buckets = self._place(key)
        for bucket in buckets:
            for slot in range(bucket * 8, bucket * 8 + 8):
                if self.words[slot] // 4 * 4 == tag:
                    return tag, slot
        return tag, None

    def add(self, key: bytes, holder: int) -> None:
        tag, slot = self._find(key)
        if slot is None:
            for bucket in self._place(key)[1:]:
                free = [s for s in range(bucket * 8, bucket * 8 + 8) if not self.words[s]]
                if free:
                    slot = free[0]
                    break
        assert slot is not None, "table full"
        self.words[slot] = self.words[slot] & 3 | tag | holder

    def remove(self, key: bytes, holder: int) -> None:
        tag, slot = self._find(key)
        if slot is not None:
            left = self.words[slot] & 3 & ~holder
            self.words[slot] = tag | left if left else 0


def encode(kind: int, body: bytes = b"") -> bytes:
    return struct.pack("<IB", len(body) + 1, kind) + body


def text(value: str) -> bytes:
    return struct.pack("<H", len(value.encode())) + value.encode()


class Said:
    """One frame of the engine."""

    def __init__(self, kind: int, body: bytes):
        self.kind, self.body = kind, body
        if kind in (STORE, LOAD):
            (self.job,) = struct.unpack_from("<Q", body)
            at = 8
            if kind == LOAD:
                (self.deadline_us,) = struct.unpack_from("<I", body, at)
                at += 4
            (length,) = struct.unpack_from("<H", body, at)
            self.request = body[at + 2 : at + 2 + length].decode()
            at += 2 + length
            (count,) = struct.unpack_from("<I", body, at)
            assert len(body) == at + 4 + count * 44, "items do not fit"
            self.items = [
                (body[o : o + 36], *struct.unpack_from("<II", body, o + 36))
                for o in range(at + 4, len(body), 44)
            ]
        elif kind == REPORT:
            (length,) = struct.unpack_from("<H", body)
            self.request = body[2 : 2 + length].decode()
            self.sources = dict(zip(SOURCES, struct.unpack_from("<6I", body, 2 + length)))
            (count,) = struct.unpack_from("<I", body, 26 + length)
            assert len(body) == 30 + length + count * 40, "chain does not fit"
            self.chain = [
                (body[o : o + 36], *struct.unpack_from("<I", body, o + 36))
                for o in range(30 + length, len(body), 40)
            ]


class Node:
    def __init__(self, path, budget=1 << 20, rate=1000, keep=None, tier_on=True, generation=1):
        self.path, self.budget, self.rate, self.tier_on, self.generation = str(path), budget, rate, tier_on, generation
        self.keep = pathlib.Path(keep) if keep else None
        self.pid = os.getpid()
        self.rows: dict[bytes, bytes] = {}
        self.peer_rows: dict[bytes, bytes] = {}
        self.table = Table()
        self.said: list[Said] = []
        self.reports: list[Said] = []
        self.hello = self.area = self.conn = None
        self.read_rows = 0
        self.inbox = b""
        # What a test replaces.
        self.welcoming, self.storing, self.loading = True, True, True
        self.held: list[Said] = []
        if os.path.exists(self.path):
            os.unlink(self.path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(4)
        self.listener.setblocking(False)
        if self.keep:
            self.keep.mkdir(parents=True, exist_ok=True)
            for file in self.keep.iterdir():
                self.rows[bytes.fromhex(file.name)] = file.read_bytes()
        for key in self.rows:
            self.table.add(key, DRIVE)

    # -- connection --

    def step(self) -> None:
        """Everything that can be done without waiting."""
        if self.conn is None:
            try:
                self.conn, _ = self.listener.accept()
            except BlockingIOError:
                return
            self.conn.setblocking(False)
            self.inbox, self.hello = b"", None
        while self.conn is not None:
            try:
                if self.hello is None:
                    data, fds, _, _ = socket.recv_fds(self.conn, 1 << 20, 4)
                    if fds:
                        self.area = mmap.mmap(fds[0], 0)
                        for fd in fds:
                            os.close(fd)
                else:
                    data = self.conn.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.hang_up()
                return
            self.inbox += data
            while len(self.inbox) >= 4 and len(self.inbox) >= 4 + (n := struct.unpack_from("<I", self.inbox)[0]):
                said = Said(self.inbox[4], self.inbox[5 : 4 + n])
                self.inbox = self.inbox[4 + n :]
                self.take(said)
                if self.conn is None:
                    return

    def hang_up(self) -> None:
        if self.conn is not None:
            self.conn.close()
            self.conn = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()
        if os.path.exists(self.path):
            os.unlink(self.path)

    def send(self, data: bytes) -> None:
        self.conn.setblocking(True)
        self.conn.sendall(data)
        self.conn.setblocking(False)

    def welcome(self, **changed) -> None:
        body = {
            "protocol": 2,
            "generation": self.generation,
            "pid": self.pid,
            "namespace": "00" * 32,
            "table_slots": self.table.slots,
            "row_budget": self.budget,
            "prefill_tokens_per_s": self.rate,
            "tier_on": self.tier_on,
        }
        fds = changed.pop("fds", [self.table.fd])
        socket.send_fds(self.conn, [encode(WELCOME, json.dumps(body | changed).encode())], fds)

    def refuse(self, why: str) -> None:
        self.send(encode(REFUSE, text(why)))

    def tier(self, on: bool, why: str = "said so") -> None:
        self.send(encode(TIER, bytes([on]) + text(why)))

    def pace(self, rate: int) -> None:
        self.send(encode(PACE, struct.pack("<I", rate)))

    def done(self, job: int, outcomes, micros: int = 100) -> None:
        self.send(encode(DONE, struct.pack("<QII", job, micros, len(outcomes)) + bytes(outcomes)))

    # -- work --

    def take(self, said: Said) -> None:
        self.said.append(said)
        if said.kind == HELLO:
            self.hello = json.loads(said.body)
            if self.welcoming:
                self.welcome()
        elif said.kind == STORE:
            self.store(said) if self.storing else self.held.append(said)
        elif said.kind == LOAD:
            self.load(said) if self.loading else self.held.append(said)
        elif said.kind == REPORT:
            self.reports.append(said)

    def _row(self, row: int) -> slice:
        size = self.hello["row_bytes"]
        return slice(row * size, (row + 1) * size)

    def _covered(self, key: bytes, row: bytes) -> bytes:
        """What the group fills of a row; the rest is blanked, as the real node does."""
        group = self.hello["groups"][struct.unpack_from(">I", key, 32)[0]]
        out = bytearray(len(row))
        for offset, length in group["covered"]:
            out[offset : offset + length] = row[offset : offset + length]
        return bytes(out)

    def store(self, said: Said) -> None:
        outcomes = []
        for key, _, row in said.items:
            if key in self.rows:
                outcomes.append(HELD)
                continue
            self.rows[key] = self._covered(key, self.area[self._row(row)])
            if self.keep:
                (self.keep / key.hex()).write_bytes(self.rows[key])
            self.table.add(key, DRIVE)
            outcomes.append(STORED)
        self.done(said.job, outcomes)

    def load(self, said: Said) -> None:
        outcomes = []
        for key, _, row in said.items:
            found = self.rows.get(key) or self.peer_rows.get(key)
            if found is None:
                outcomes.append(FAILED)
                continue
            self.area[self._row(row)] = found
            self.read_rows += 1
            outcomes.append(FROM_DRIVE if key in self.rows else FROM_PEER)
        self.done(said.job, outcomes)

    def release(self) -> None:
        """Does what was held back."""
        held, self.held = self.held, []
        for said in held:
            self.store(said) if said.kind == STORE else self.load(said)

    def loads(self) -> list[Said]:
        return [s for s in self.said if s.kind == LOAD]

    def stores(self) -> list[Said]:
        return [s for s in self.said if s.kind == STORE]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("socket")
    arguments.add_argument("--keep")
    arguments.add_argument("--budget", type=int, default=1 << 20)
    arguments.add_argument("--rate", type=int, default=1000)
    arguments.add_argument("--hold", choices=["load", "store"])
    arguments.add_argument("--has", action="append", default=[], help="hex of a key that the table shall show")
    arguments.add_argument("--drop-on-job", action="store_true", help="close the connection when a job comes, and live on")
    a = arguments.parse_args()
    node = Node(a.socket, a.budget, a.rate, a.keep)
    node.loading, node.storing = a.hold != "load", a.hold != "store"
    for key in a.has:
        node.table.add(bytes.fromhex(key), DRIVE)
    print(json.dumps({"ready": node.pid}), flush=True)
    shown = told = 0
    while True:
        select.select([node.conn or node.listener], [], [], 1.0)
        node.step()
        for said in node.said[told:]:
            told += 1
            if said.kind in (STORE, LOAD):
                print(json.dumps({"load" if said.kind == LOAD else "store": len(said.items), "job": said.job}), flush=True)
                if a.drop_on_job:
                    node.hang_up()
            elif said.kind == HELLO:
                print(json.dumps({"hello": node.hello}), flush=True)
        for said in node.reports[shown:]:
            shown += 1
            print(json.dumps({"report": said.request, "sources": said.sources, "chain": len(said.chain)}), flush=True)
        if os.getppid() == 1:
            sys.exit("the parent is gone")


if __name__ == "__main__":
    main()
