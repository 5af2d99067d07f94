"""The tier that vLLM's scheduler sees: it hands rows of the shared area to the node and never lets vLLM feel it.

Owns the plugin's side of the engine's door (frames and lookup table as the node defines them), the plan of which
rows a request's hit needs, and the words that go to the node about each request. Promises:

* No exception of this file reaches vLLM's scheduler, no call into it blocks (drain_jobs, which vLLM wants to block,
  has a limit). Whatever goes wrong is logged once per kind and becomes a miss or a failed store.
* A job ends when the node says so, when the same process welcomes the engine again (which promises as much), or when
  the node's process is known to be gone and its last direct reads can no longer land. A closed socket alone ends
  nothing: a late write into a row that is in use again would be wrong KV.
* A hit larger than the rows that hits may hold is cut, requests that do not fit beside others wait, at most for as
  long as computing would take, and a row that is being waited for is pinned, so that each row is read once.

Works with vLLM 0.32 and 0.33. Load it with kv_connector SparkKvConnector, spec_name SparkKvSpec and a secondary tier
of type SparkKvTier, all from this module. One file, because it travels inside the program that starts the engine.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import hashlib
import importlib.metadata
import itertools
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingWorker,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

# vLLM's logging shows names below its own only.
logger = init_logger("vllm.spark_kv")

PLUGIN = "1"


@dataclass(frozen=True)
class Limits:
    """Every wait and every bound of the tier. Each can be set in the tier's entry of secondary_tiers, for tests."""

    # Between two tries to reach the node. A try costs some microseconds.
    reconnect_s: float = 0.25
    # How long a request may wait for a node that has taken the connection but not yet answered.
    greeting_wait_s: float = 0.25
    # How long the node may take to answer HELLO: it reads samples of the weights for its fingerprint.
    greeting_s: float = 10.0
    # After a refusal the same HELLO will be refused again.
    refused_s: float = 5.0
    # Four of the largest frames. A node that leaves that much unread has not read for long; more would only be older.
    out_bytes: int = 16 << 20
    # Shortest deadline of a load: about one step of the scheduler, below which giving up earlier gains nothing.
    deadline_floor_s: float = 0.05
    # Longest: what is slower than this is not coming.
    deadline_cap_s: float = 120.0
    # Part of the time of recomputing that a load may take.
    deadline_share: float = 0.9
    # What a node may take beyond a load's deadline to end reads that had begun, before it is ended itself. A drive may
    # pause for seconds, and so may a process on a box without free cores.
    grace_s: float = 10.0
    # How long stores may stay unanswered while the node says nothing at all.
    store_silence_s: float = 60.0
    # After a process is gone the kernel may still complete direct reads that it had begun.
    quarantine_s: float = 1.0
    # Longest that drain_jobs gives a living node.
    drain_s: float = 30.0
    # How long rows of a hit stay pinned for a request that vLLM does not admit.
    hold_s: float = 30.0
    # Reports kept while no node takes them.
    reports: int = 64
    # Broken connections that may still have open jobs. With more the tier stays off.
    lost_links: int = 4


# ---------------------------------------------------------------------------------------------------------------------
# Frames. The node's base/frame.rs is the definition; numbers and bounds here follow it.

PROTOCOL = 2
MAX_FRAME = 4 << 20
MAX_ITEMS = 65_536
HELLO, STORE, LOAD, REPORT = 1, 2, 3, 4
WELCOME, DONE, TIER, PACE, REFUSE = 64, 65, 66, 67, 68
FAILED, FROM_DRIVE, FROM_PEER, STORED, HELD = range(5)
KEY_BYTES = 36

_HEAD = struct.Struct("<IB")
_ITEM_TAIL = struct.Struct("<II")


class Violation(Exception):
    """The node said something that the protocol does not allow: the connection ends, the scheduler never hears."""


def _text(value: str) -> bytes:
    raw = value.encode()[:0xFFFF]
    return struct.pack("<H", len(raw)) + raw


def frame(kind: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) + 1 > MAX_FRAME:
        raise ValueError(f"frame of {len(body)} bytes")
    return _HEAD.pack(len(body) + 1, kind) + body


def _items(items) -> bytes:
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{len(items)} items in one job")
    return struct.pack("<I", len(items)) + b"".join(key + _ITEM_TAIL.pack(position, row) for key, position, row in items)


def store_frame(job: int, request: str, items) -> bytes:
    """`request` is the one that computed the rows: the node knows whose it is."""
    return frame(STORE, struct.pack("<Q", job), _text(request), _items(items))


def load_frame(job: int, deadline_us: int, request: str, items) -> bytes:
    return frame(LOAD, struct.pack("<QI", job, deadline_us), _text(request), _items(items))


def report_frame(request: str, sources, chain) -> bytes:
    """`sources` in the order prompt, device, staging, drive, peer, computed. A chain too long for a frame is cut at
    its end: the head of a chain is what other requests share."""
    most = min(MAX_ITEMS, (MAX_FRAME - 0x10100) // (KEY_BYTES + 4))
    chain = chain[:most]
    body = b"".join(key + struct.pack("<I", position) for key, position in chain)
    return frame(REPORT, _text(request), struct.pack("<6I", *sources), struct.pack("<I", len(chain)), body)


def _take_text(body: memoryview, at: int) -> str:
    if len(body) < at + 2:
        raise Violation("text cut short")
    (length,) = struct.unpack_from("<H", body, at)
    if len(body) != at + 2 + length:
        raise Violation("text of the wrong length")
    return bytes(body[at + 2 :]).decode(errors="replace")


def parse(kind: int, body: memoryview):
    """What the node said, or Violation. WELCOME stays JSON text."""
    if kind == WELCOME:
        return bytes(body)
    if kind == DONE:
        if len(body) < 16:
            raise Violation("DONE cut short")
        job, micros, count = struct.unpack_from("<QII", body)
        outcomes = bytes(body[16:])
        if count > MAX_ITEMS or count != len(outcomes) or any(o > HELD for o in outcomes):
            raise Violation(f"DONE of {count} outcomes in {len(outcomes)} bytes")
        return job, micros, outcomes
    if kind == TIER:
        if not len(body):
            raise Violation("TIER cut short")
        return body[0] != 0, _take_text(body, 1)
    if kind == PACE:
        if len(body) != 4:
            raise Violation("PACE of the wrong length")
        return struct.unpack_from("<I", body)[0]
    if kind == REFUSE:
        return _take_text(body, 0)
    raise Violation(f"frame of kind {kind}")


# ---------------------------------------------------------------------------------------------------------------------
# The lookup table. The node's base/table.rs is the definition.

_M64 = (1 << 64) - 1
_TAG = _M64 - 3
_WORDS = struct.Struct("<QQ")
_BUCKET = struct.Struct("<8Q")


def place(key: bytes, mask: int) -> tuple[int, int, int]:
    """Tag of a key and its two buckets. The group number is big-endian in the key, as vLLM packs it."""
    head, second_word = _WORDS.unpack_from(key)
    group = key[32:]
    if group != b"\0\0\0\0":
        head ^= int.from_bytes(group, "big") * 0x9E37_79B9_7F4A_7C15 & _M64
    tag = head & _TAG or 4
    first = second_word & mask
    return tag, first, (first ^ (1 | (tag >> 32))) & mask


class Table:
    """Read-only view of the table in the node's shared memory. A probe reads two cache lines."""

    def __init__(self, fd: int, slots: int):
        if slots < 16 or slots & (slots - 1) or slots > 1 << 32:
            raise Violation(f"a table of {slots} slots")
        if os.fstat(fd).st_size < slots * 8:
            raise Violation(f"a table of {slots} slots in {os.fstat(fd).st_size} bytes")
        self._map = mmap.mmap(fd, slots * 8, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._mask = slots // 8 - 1

    def holders(self, key: bytes) -> int:
        """0, or 1 (this node's drive) and 2 (the other node) added."""
        if len(key) != KEY_BYTES:
            return 0
        tag, first, second = place(key, self._mask)
        for bucket in (first, second):
            slots = _BUCKET.unpack_from(self._map, bucket * 64)
            # Three searches of the tuple cost less than one loop over it.
            if tag | 1 in slots:
                return 1
            if tag | 2 in slots:
                return 2
            if tag | 3 in slots:
                return 3
        return 0

    def close(self) -> None:
        self._map.close()


# ---------------------------------------------------------------------------------------------------------------------
# Layout of a row: which bytes of it each cache group fills.


@dataclass
class Layout(KVConnectorHandshakeMetadata):
    """What one worker really copies, told by the worker itself: bytes of a page of each of its tensors in the order
    in which they lie in its cell of the row, and per cache group the (tensor, bytes) that are copied of each block."""

    rank: int
    pages: list[int]
    groups: list[list[tuple[int, int]]]


def layout_of(kv_caches, rank: int) -> Layout:
    return Layout(
        rank=rank,
        pages=[int(tensor.page_size_bytes) for tensor in kv_caches.tensors],
        groups=[[(int(r.tensor_idx), int(r.page_size_bytes)) for r in refs] for refs in kv_caches.group_data_refs],
    )


def covered_ranges(layouts, groups: int, cell: int, blocks_per_row: int, row_bytes: int) -> list[list[list[int]]]:
    """Byte ranges (offset, length) of a row per group: each worker's cell holds its tensors one after the other, a
    tensor holds `blocks_per_row` pages, and of a page the group's layers fill the head."""
    found: list[set[tuple[int, int]]] = [set() for _ in range(groups)]
    for layout in layouts:
        if len(layout.groups) != groups:
            raise ValueError(f"a worker has {len(layout.groups)} groups, the scheduler {groups}")
        starts, at = [], layout.rank * cell
        for page in layout.pages:
            starts.append(at)
            at += page * blocks_per_row
        if at > (layout.rank + 1) * cell:
            raise ValueError(f"tensors of rank {layout.rank} end at byte {at}, its cell at {(layout.rank + 1) * cell}")
        for group, refs in enumerate(layout.groups):
            for tensor, length in refs:
                page = layout.pages[tensor]
                found[group].update((starts[tensor] + slot * page, length) for slot in range(blocks_per_row))
    return [_merged(ranges, row_bytes) for ranges in found]


def _merged(ranges, row_bytes: int) -> list[list[int]]:
    out: list[list[int]] = []
    for start, length in sorted(r for r in ranges if r[1]):
        if out and start <= out[-1][0] + out[-1][1]:
            out[-1][1] = max(out[-1][1], start + length - out[-1][0])
        else:
            out.append([start, length])
    if out and out[-1][0] + out[-1][1] > row_bytes:
        raise ValueError(f"a group covers bytes up to {out[-1][0] + out[-1][1]} of a row of {row_bytes}")
    return out


@dataclass(frozen=True)
class Group:
    """A cache group as a hit sees it."""

    number: int
    tokens: int
    # Chunks that must be there before the end of a hit; None: all of them from the start.
    window: int | None = None
    # A hit may end at a multiple of the group's chunk only (recurrent state).
    aligned: bool = False
    # A drafter's group: vLLM asks for one chunk more than it uses.
    draft: bool = False
    # Tokens past a partial tail's boundary at which a drafter's group keeps the row that proves it.
    proof: int = 0
    kind: str = "full_attention"


def plan_hit(groups, chain, start: int, limit: int, most_rows: int, has) -> tuple[int, list[tuple[int, bytes]]]:
    """Where a hit can end, and the rows it needs, in prefix order, as (end position, key).

    `chain[number]` lists a group's keys chunk by chunk. The end is the largest boundary up to which every
    whole-prefix group has all its chunks from `start` on, at which every windowed group has its window, and which
    needs at most `most_rows` rows. (start, []) when there is none."""
    whole = [g for g in groups if g.window is None]
    windowed = [g for g in groups if g.window is not None]
    end = limit
    if windowed:
        # The last token is computed again; with a window its logits need the state before it.
        end -= 1
    reach = {}
    for g in whole:
        keys, chunk = chain[g.number], start // g.tokens
        while chunk < len(keys) and chunk * g.tokens < end + (g.tokens if g.draft else 0) and has(keys[chunk]):
            chunk += 1
        reach[g.number] = chunk
        end = min(end, (chunk - g.draft) * g.tokens)
    for g in windowed:
        end = min(end, len(chain[g.number]) * g.tokens)
    step = math.lcm(min(g.tokens for g in groups), *(g.tokens for g in groups if g.aligned))
    end -= end % step
    while end > start:
        needed = _needed(whole, windowed, chain, start, end, reach)
        if len(needed) <= most_rows and all(has(key) for g, _, key in needed if g.window is not None):
            return end, sorted(((position, key) for _, position, key in needed), key=lambda n: n[0])
        end -= step
    return start, []


def _needed(whole, windowed, chain, start, end, reach):
    out = []
    for g in whole:
        last = min(-(-end // g.tokens) + g.draft, reach[g.number])
        out += [(g, (i + 1) * g.tokens, chain[g.number][i]) for i in range(start // g.tokens, last)]
    for g in windowed:
        last = -(-end // g.tokens)
        first = max(start // g.tokens, last - g.window)
        out += [(g, (i + 1) * g.tokens, chain[g.number][i]) for i in range(first, last)]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# One connection to one process of the node.


@dataclass
class Job:
    number: int
    keys: list
    is_load: bool
    request: str
    since: float
    # When a living node that has not answered is ended.
    patience: float


GREETING, OPEN, BROKEN = range(3)


class Link:
    """Non-blocking socket, its buffers, and the jobs that were sent over it and are not done."""

    def __init__(self, path: str, limits: Limits):
        self.limits = limits
        self.jobs: dict[int, Job] = {}
        self.state = GREETING
        self.since = self.heard = time.monotonic()
        self.broken_at = self.dead_at = None
        self.killed = False
        self.table: Table | None = None
        self.welcome: dict = {}
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._out_fds: list[int] = []
        self._in = bytearray()
        self._fds: list[int] = []
        self.pidfd = -1
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.sock.connect(path)
            pid, _, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            self.pid = pid
            # Before WELCOME: what answers on this connection is then the process that this descriptor names.
            self.pidfd = os.pidfd_open(pid)
        except BaseException:
            self.sock.close()
            raise

    @property
    def unsent(self) -> int:
        return self._out_bytes

    def send(self, data: bytes, fds=()) -> bool:
        """Queues a frame, or says that there is no room for it."""
        if self.state == BROKEN or self._out_bytes + len(data) > self.limits.out_bytes:
            return False
        self._out.append(memoryview(data))
        self._out_bytes += len(data)
        self._out_fds += fds
        return True

    def pump(self) -> list[tuple[int, object]]:
        """Sends what the socket takes and returns the frames that have come. Raises OSError or Violation."""
        self._flush()
        said = []
        for _ in range(64):
            try:
                if self.state == GREETING:
                    data, fds, flags, _ = socket.recv_fds(self.sock, 65536, 4, socket.MSG_CMSG_CLOEXEC)
                    self._fds += fds
                    if flags & socket.MSG_CTRUNC or len(self._fds) > 4:
                        raise Violation("too many descriptors")
                else:
                    data = self.sock.recv(1 << 18)
            except BlockingIOError:
                break
            if not data:
                raise ConnectionResetError("the node closed the connection")
            self.heard = time.monotonic()
            self._in += data
            if self._cut(said) and self.state == GREETING:
                break
        return said

    def _flush(self) -> None:
        while self._out:
            first = self._out[0]
            try:
                if self._out_fds:
                    sent = socket.send_fds(self.sock, [first], self._out_fds)
                    self._out_fds = []
                else:
                    sent = self.sock.send(first)
            except BlockingIOError:
                return
            self._out_bytes -= sent
            if sent == len(first):
                self._out.popleft()
            else:
                self._out[0] = first[sent:]

    def _cut(self, said) -> int:
        at, count = 0, 0
        while len(self._in) - at >= 4:
            (length,) = struct.unpack_from("<I", self._in, at)
            if not 0 < length <= MAX_FRAME:
                raise Violation(f"frame of {length} bytes")
            if len(self._in) - at < 4 + length:
                break
            kind = self._in[at + 4]
            said.append((kind, parse(kind, memoryview(bytes(self._in[at + 5 : at + 4 + length])))))
            at += 4 + length
            count += 1
        del self._in[:at]
        return count

    def open(self, welcome: bytes) -> None:
        """Takes WELCOME: checks who says it, maps the table. Raises Violation."""
        try:
            w = json.loads(welcome)
            numbers = {k: int(w[k]) for k in ("protocol", "generation", "pid", "table_slots", "row_budget")}
            numbers["prefill_tokens_per_s"] = int(w.get("prefill_tokens_per_s", 0))
            numbers["tier_on"] = bool(w.get("tier_on", True))
        except (ValueError, TypeError, KeyError) as e:
            raise Violation(f"WELCOME does not read: {e!r}") from e
        if numbers["protocol"] != PROTOCOL:
            raise Violation(f"the node speaks protocol {numbers['protocol']}, the plugin {PROTOCOL}")
        if numbers["pid"] != self.pid:
            raise Violation(
                f"the node calls itself process {numbers['pid']}, the kernel says {self.pid}: "
                "it must listen itself and share the engine's pid namespace"
            )
        if len(self._fds) != 1:
            raise Violation(f"{len(self._fds)} descriptors with WELCOME")
        self.table = Table(self._fds[0], numbers["table_slots"])
        self._close_fds()
        self.welcome, self.state = numbers, OPEN

    def take(self, number: int, outcomes: bytes) -> Job:
        """The job that a DONE ends. Raises Violation and leaves the job open when the two do not fit."""
        job = self.jobs.get(number)
        if job is None:
            raise Violation(f"DONE for job {number}, which is not open")
        allowed = (FAILED, FROM_DRIVE, FROM_PEER) if job.is_load else (FAILED, STORED, HELD)
        if len(outcomes) != len(job.keys) or any(o not in allowed for o in outcomes):
            raise Violation(f"DONE of job {number} does not fit it")
        return self.jobs.pop(number)

    def gone(self) -> bool:
        """Whether the node's process has ended."""
        if self.dead_at is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if poll.poll(0):
                self.dead_at = time.monotonic()
        return self.dead_at is not None

    def kill(self) -> bool:
        """Ends the process behind this connection. The descriptor names it, so no other can be hit."""
        self.killed = True
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        if self.state != BROKEN:
            self.state, self.broken_at = BROKEN, time.monotonic()
            self._out.clear()
            self._out_bytes = 0
            self.sock.close()
            self._close_fds()
            if self.table:
                self.table.close()
                self.table = None

    def close(self) -> None:
        self.hang_up()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


# ---------------------------------------------------------------------------------------------------------------------
# What the tier knows about requests.


class Plan:
    """The rows one request's hit needs, from the first lookup until they are in the device's cache."""

    __slots__ = ("deadline", "end", "held", "held_since", "jobs", "link", "order", "pinned", "positions", "start", "todo", "want")

    def __init__(self, link, start, end, needed, want, deadline):
        self.link, self.start, self.end, self.deadline = link, start, end, deadline
        self.order = [key for _, key in needed]
        self.positions = {key: position for position, key in needed}
        self.want = want
        self.todo = deque(self.order)
        self.held, self.held_since, self.jobs = False, 0.0, 0
        self.pinned: set = set()


@dataclass
class Request:
    ctx: object
    since: float
    plan: Plan | None = None
    # Keys whose load failed once: asking again would promote them for ever.
    failed: set = field(default_factory=set)
    # Where the keys that were loaded for it came from.
    sources: dict = field(default_factory=dict)
    loaded: list = field(default_factory=list)
    tails: set = field(default_factory=set)
    numbers: tuple | None = None
    # Tokens at the first lookup that the engine has itself.
    start: int = 0
    greeting_since: float | None = None


def quiet(default):
    """Keeps every exception of a hook from vLLM: it is logged once per kind, and the hook answers `default`."""

    def wrap(hook):
        @functools.wraps(hook)
        def guarded(self, *args, **kwargs):
            try:
                return hook(self, *args, **kwargs)
            except Exception as e:
                self._once(f"{hook.__name__}: {type(e).__name__}", "%s failed: %r", hook.__name__, e, trace=True)
                return default() if callable(default) else default

        return guarded

    return wrap


class SparkKvTier(SecondaryTierManager):
    """The secondary tier. State: the link, broken links with open jobs, requests, rows held by hits, holes."""

    medium = Medium.STORAGE
    # Everything here belongs to the scheduler's thread.
    tolerates_off_thread_polling = False

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None, *, socket=None, **config):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not socket:
            raise ValueError("the SparkKvTier entry of secondary_tiers needs the node's socket: \"socket\": PATH")
        known = {k: v for k, v in config.items() if k in Limits.__dataclass_fields__}
        self.limits = Limits(**known)
        self.path = str(socket)
        self.spec = offloading_spec
        self.link: Link | None = None
        self.lost: list[Link] = []
        self.finished: list[JobResult] = []
        self.requests: dict[str, Request] = {}
        self.groups: list[Group] = []
        self.hello: dict | None = None
        self.row_fd: int | None = None
        self.partial_tail = 0
        # Rows that hits hold, each with the number of requests that need it.
        self.held: dict = {}
        self.to_pin: deque = deque()
        # Stores that failed while their row stayed: vLLM does not offer such a row again on its own.
        self.holes: dict = {}
        # What was offered or loaded, at most as many keys as rows: what a new node has to be asked about.
        self.offered: OrderedDict = OrderedDict()
        self.to_check: deque = deque()
        self.greeted = 0
        self.tier_on = True
        self.rate = 1000
        self.next_try = 0.0
        self.unlinked = False
        self.reports: deque = deque(maxlen=self.limits.reports)
        self.counts = {"dropped_reports": 0, "kills": 0, "violations": 0, "waits": 0, "gave_up": 0}
        self._logged: dict = {}
        self._nobody = ReqContext(req_id="spark-kv")
        if unknown := config.keys() - known.keys() - {"locality"}:
            logger.warning("spark-kv: unknown settings of the tier: %s", ", ".join(sorted(unknown)))

    # -- small things ---------------------------------------------------------------------------------------------

    def _once(self, kind, message, *args, trace=False):
        """Logs a kind of trouble the first time and then each time its count has doubled."""
        n = self._logged[kind] = self._logged.get(kind, 0) + 1
        if n & (n - 1) == 0 and len(self._logged) < 1000:
            logger.warning("spark-kv: " + message + (" (%d times)" if n > 1 else ""), *args, *((n,) if n > 1 else ()), exc_info=trace)

    @property
    def manager(self):
        return getattr(self.spec, "_manager", None)

    @property
    def primary(self):
        return self.manager.primary_tier

    @property
    def rows(self) -> int:
        return self._primary_kv_view.shape[0]

    def _budget(self) -> int:
        """Rows that hits may hold together. At least a tenth of the area is left for stores, whatever the node says."""
        wanted = self.link.welcome["row_budget"] if self.link and self.link.welcome else 0
        return max(0, min(wanted, self.rows - max(1, self.rows // 10)))

    def _usable(self) -> bool:
        return self.link is not None and self.link.state == OPEN and self.tier_on

    # -- what the connector tells -----------------------------------------------------------------------------------

    def describe(self, groups, hello: dict, partial_tail: int = 0) -> None:
        """Takes the layout. Until it is known the tier does not reach for the node: it could not say which bytes of a
        row are whose."""
        fd = getattr(getattr(self.spec, "_scheduler_mmap", None), "fd", None)
        if fd is not None:
            self.row_fd = os.dup(fd)
        else:
            self.row_fd = os.open(f"/dev/shm/vllm_offload_{self.spec._engine_id}.mmap", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self.row_fd).st_size < self.rows * self._block_size_bytes:
            raise ValueError("the row area is smaller than its rows")
        self.groups, self.hello, self.partial_tail = list(groups), hello, partial_tail
        self.unlink_area()
        self._poll()

    def unlink_area(self) -> None:
        """Takes the area's name away. Every worker has mapped it by now, so from here on nothing can leak, not even
        when the engine is killed."""
        if self.unlinked:
            return
        self.unlinked = True
        region = getattr(self.spec, "_scheduler_mmap", None)
        path, fd = getattr(region, "mmap_path", None), getattr(region, "fd", None)
        if not path or fd is None:
            return
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.unlink(path)
        except FileNotFoundError:
            pass
        region._creator = False

    # -- polling ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        now = time.monotonic()
        if self.link is None:
            self._connect(now)
        if self.link is not None:
            self._listen(now)
        if self.lost:
            self._bury(now)
        if self.to_check:
            self._look_for_holes(256)
        if self.reports:
            self._send_reports()

    def _connect(self, now: float) -> None:
        if self.hello is None or now < self.next_try or len(self.lost) >= self.limits.lost_links:
            return
        self.next_try = now + self.limits.reconnect_s
        try:
            link = Link(self.path, self.limits)
        except OSError as e:
            self._once(f"connect {e.errno}", "the node cannot be reached at %s: %s", self.path, e)
            return
        link.send(frame(HELLO, json.dumps(self.hello).encode()), [self.row_fd])
        self.link = link

    def _listen(self, now: float) -> None:
        link = self.link
        try:
            for kind, said in link.pump():
                self._hear(link, kind, said)
                if self.link is not link:
                    return
            if link.state == GREETING and now - link.since > self.limits.greeting_s:
                raise TimeoutError("no answer to HELLO")
        except Violation as e:
            self.counts["violations"] += 1
            self._break(link, f"the node broke the protocol: {e}")
            return
        except OSError as e:
            self._break(link, f"connection to the node lost: {e}")
            return
        self._mind_patience(link, now)

    def _mind_patience(self, link: Link, now: float) -> None:
        """Ends a node that lives and is silent: its jobs cannot be failed while it might still write into rows."""
        if not link.jobs or link.killed:
            return
        oldest = min(job.patience for job in link.jobs.values())
        silent = now - link.heard > self.limits.store_silence_s
        overdue = any(job.is_load and now > job.patience for job in link.jobs.values())
        if overdue or (silent and now > oldest):
            self.counts["kills"] += 1
            ended = link.kill()
            self._break(link, f"the node left a job unanswered beyond its limit and was ended ({ended})")

    def _break(self, link: Link, why: str) -> None:
        self._once(f"break {why[:40]}", "%s; %d jobs open", why, len(link.jobs))
        link.hang_up()
        if self.link is link:
            self.link = None
            self.next_try = max(self.next_try, time.monotonic() + self.limits.reconnect_s)
        if link.jobs:
            self.lost.append(link)
        else:
            link.close()

    def _bury(self, now: float) -> None:
        """Fails the jobs of broken connections, once their process is gone and, for loads, its reads are too."""
        for link in list(self.lost):
            if not link.gone():
                loads = [job.patience for job in link.jobs.values() if job.is_load]
                patience = max([*loads, link.broken_at + self.limits.grace_s])
                if now > patience and not link.killed:
                    self.counts["kills"] += 1
                    if link.kill():
                        self._once("kill", "ended the node (process %d): it lives, but its connection is gone", link.pid)
                    else:
                        self._once("kill failed", "the node (process %d) cannot be ended; its rows stay locked", link.pid)
                continue
            over = now - link.dead_at >= self.limits.quarantine_s
            for number in [n for n, job in link.jobs.items() if over or not job.is_load]:
                self._fail(link.jobs.pop(number))
            if not link.jobs:
                link.close()
                self.lost.remove(link)

    def _settle_with(self, link: Link) -> None:
        """Fails the jobs of earlier connections to the process that welcomes us now: it does so only when nothing of
        them can touch a row any more. While their descriptor says that it lives, the number is no other process's."""
        for lost in [each for each in self.lost if each.pid == link.pid and not each.gone()]:
            for number in list(lost.jobs):
                self._fail(lost.jobs.pop(number))
            lost.close()
            self.lost.remove(lost)

    def _hear(self, link: Link, kind: int, said) -> None:
        if kind == WELCOME:
            if link.state != GREETING:
                raise Violation("a second WELCOME")
            link.open(said)
            self._settle_with(link)
            self.tier_on = link.welcome["tier_on"]
            self.rate = link.welcome["prefill_tokens_per_s"] or self.rate
            self.greeted += 1
            if self.greeted > 1:
                self.to_check = deque(self.offered)
            logger.info("spark-kv: node %d (generation %d) keeps this engine's rows", link.pid, link.welcome["generation"])
        elif kind == REFUSE:
            self.next_try = time.monotonic() + self.limits.refused_s
            self._break(link, f"the node refuses this engine: {said}")
        elif link.state != OPEN:
            raise Violation(f"frame {kind} before WELCOME")
        elif kind == DONE:
            number, micros, outcomes = said
            self._done(link.take(number, outcomes), micros, outcomes)
        elif kind == TIER:
            self.tier_on = said[0]
            logger.warning("spark-kv: tier %s: %s", "on" if said[0] else "off", said[1])
        elif kind == PACE:
            self.rate = said or self.rate

    # -- ends of jobs -------------------------------------------------------------------------------------------------

    def _done(self, job: Job, micros: int, outcomes: bytes) -> None:
        took = max(micros, 1) / 1e6
        good = [key for key, outcome in zip(job.keys, outcomes) if outcome != FAILED]
        if not job.is_load:
            for key, outcome in zip(job.keys, outcomes):
                if outcome == FAILED:
                    self._hole(key)
                else:
                    self.holes.pop(key, None)
            self.finished.append(JobResult(job.number, len(good) == len(job.keys), transfer_time=took))
            return
        request = self.requests.get(job.request)
        if request is not None:
            for key, outcome in zip(job.keys, outcomes):
                if outcome == FAILED:
                    request.failed.add(key)
                else:
                    request.sources[key] = outcome
            self._ended_load(request, good)
        whole = len(good) == len(job.keys)
        self.finished.append(JobResult(job.number, whole, None if whole or not good else good, transfer_time=took))

    def _fail(self, job: Job) -> None:
        request = self.requests.get(job.request)
        if job.is_load:
            if request is not None:
                request.failed.update(job.keys)
                self._ended_load(request, [])
        else:
            for key in job.keys:
                self._hole(key)
        self.finished.append(JobResult(job.number, False))

    def _ended_load(self, request: Request, good) -> None:
        plan = request.plan
        if plan is not None:
            plan.jobs = max(0, plan.jobs - 1)
            self.to_pin.extend((request, key) for key in good if key in plan.positions)

    # -- holes --------------------------------------------------------------------------------------------------------

    def _hole(self, key) -> None:
        if len(self.holes) < 2 * self.rows:
            self.holes[key] = None

    def _resident(self, key) -> bool:
        return self.primary.lookup(key, self._nobody) is not LookupResult.MISS

    def _on_drive(self, key) -> bool:
        return bool(self.link.table.holders(key) & 1)

    def _look_for_holes(self, most: int) -> None:
        """After a reconnect: which resident rows does this node not hold?"""
        if not self._usable():
            return
        for _ in range(min(most, len(self.to_check))):
            key = self.to_check.popleft()
            if not self._on_drive(key) and self._resident(key):
                self._hole(key)

    def _mended(self, most: int) -> bool:
        """Drops holes that are none any more, and says whether none are left. A hole ends when the node holds the
        row, or when the row is no longer in the area: a row that comes back is offered like any new one."""
        for key in list(itertools.islice(self.holes, most)):
            del self.holes[key]
            if not self._on_drive(key) and self._resident(key):
                self.holes[key] = None
        return not self.holes and not self.to_check

    # -- plans --------------------------------------------------------------------------------------------------------

    def _deadline(self, ctx, tokens: int) -> float:
        limits = self.limits
        span = tokens / max(self.rate, 1) * limits.deadline_share
        span = min(max(span, limits.deadline_floor_s), limits.deadline_cap_s)
        ours = (getattr(ctx, "kv_transfer_params", None) or {}).get("spark_kv")
        lower = ours.get("deadline_ms") if isinstance(ours, dict) else None
        if isinstance(lower, (int, float)) and not isinstance(lower, bool) and lower > 0:
            span = min(span, lower / 1000)
        return span

    def _plan(self, request: Request, chain, start: int, limit: int, tail=None) -> Plan | None:
        """A plan, or None: ask again. An empty plan makes every lookup of the request a miss."""
        now = time.monotonic()
        if not self._usable():
            if self.link is not None and self.link.state == GREETING:
                if request.greeting_since is None:
                    request.greeting_since = now
                if now - request.greeting_since < self.limits.greeting_wait_s:
                    return None
            return Plan(None, start, start, [], set(), now)
        table, primary, ctx, failed = self.link.table, self.primary, request.ctx, request.failed

        def has(key):
            if primary.lookup(key, ctx) is not LookupResult.MISS:
                return True
            return key not in failed and table.holders(key) != 0

        end, needed = plan_hit(self.groups, chain, start, limit, self._budget(), has)
        if tail is not None:
            end, needed = self._with_tail(end, needed, tail, has)
        request.tails.update(key for position, key in needed if position % self._tokens(key))
        want = {key for _, key in needed if primary.lookup(key, ctx) is LookupResult.MISS}
        return Plan(self.link, start, end, needed, want, now + self._deadline(ctx, end - start))

    def _with_tail(self, end, needed, tail, has):
        """Adds the largest boundary inside the next block at which every group has a row (partial tails)."""
        for boundary, rows in tail(end):
            if len(needed) + len(rows) <= self._budget() and all(has(key) for _, key in rows):
                return boundary, needed + rows
        return end, needed

    def _tokens(self, key) -> int:
        number = int.from_bytes(key[-4:], "big")
        return next((g.tokens for g in self.groups if g.number == number), 1)

    def _reserve(self, request: Request, plan: Plan) -> bool:
        """Gives a plan its rows when hits may hold that many more, and pins those that are there: bringing the rest
        would push out the oldest, which are the head of a prompt."""
        if plan.held:
            return True
        fresh = sum(1 for key in plan.order if key not in self.held)
        if len(self.held) + fresh > self._budget():
            self.counts["waits"] += 1
            return False
        for key in plan.order:
            self.held[key] = self.held.get(key, 0) + 1
        plan.held, plan.held_since = True, time.monotonic()
        for key in plan.order:
            if key not in plan.want:
                self._pin(request, key)
                if key not in plan.pinned and self.primary.lookup(key, request.ctx) is LookupResult.MISS:
                    # Was there when the plan was made and has been given away while the request waited.
                    plan.want.add(key)
        return True

    def _release(self, request: Request) -> None:
        plan = request.plan
        if plan is None:
            return
        if plan.held:
            plan.held = False
            for key in plan.order:
                left = self.held.get(key, 0) - 1
                if left > 0:
                    self.held[key] = left
                else:
                    self.held.pop(key, None)
        if plan.pinned:
            pinned, plan.pinned = plan.pinned, set()
            self.primary.complete_load(list(pinned), request.ctx)

    def _pin(self, request: Request, key) -> None:
        """Keeps a ready row of a hit from being evicted until its request has it or is gone."""
        plan = request.plan
        if plan is None or not plan.held or key in plan.pinned or key not in plan.positions:
            return
        if self.primary.lookup(key, request.ctx) is LookupResult.HIT:
            self.primary.prepare_read([key], request.ctx)
            plan.pinned.add(key)

    def _pin_arrived(self) -> None:
        while self.to_pin:
            self._pin(*self.to_pin.popleft())

    def _sweep_plans(self, now: float) -> None:
        """Lets go of rows that a request has held for too long without being admitted."""
        for request in self.requests.values():
            plan = request.plan
            if plan is not None and plan.held and not plan.jobs and now - plan.held_since > self.limits.hold_s:
                self._once("hold", "a request held its rows for %s s without being admitted", self.limits.hold_s)
                self._release(request)
                request.plan = None

    def ready_for(self, request, num_computed: int) -> bool:
        """The connector's question before vLLM looks keys up: is everything there that this request's hit needs?
        Starts the loads when rows can be had. False means: ask again at the next step."""
        known = self.requests.get(request.request_id)
        if known is None or not self.groups or not known.ctx.load_tier_filter.allows(self.medium, self.locality):
            return True
        self._poll()
        plan = known.plan
        if plan is None or (plan.start != num_computed and not plan.held):
            known.start = num_computed
            fresh = self._plan(known, *self._chain_of(request, num_computed))
            if fresh is None:
                return False
            if plan is not None and plan.want:
                # The device's own hit has grown; that does not make the request's patience longer.
                fresh.deadline = min(fresh.deadline, plan.deadline)
            known.plan = plan = fresh
        return self._advance(known, plan)

    def _advance(self, request: Request, plan: Plan) -> bool:
        now = time.monotonic()
        if not plan.want:
            if plan.order:
                self._reserve(request, plan)
            return True
        if now > plan.deadline or plan.link is not self.link:
            # Whatever is here by now is used; what is still being read comes to its end by itself.
            if not plan.jobs:
                self.counts["gave_up"] += 1
                plan.want = set()
            return True
        if not self._reserve(request, plan):
            return False
        if plan.jobs:
            return False
        for _ in range(len(plan.todo)):
            key = plan.todo.popleft()
            found = self.manager.lookup(key, request.ctx)
            if found is LookupResult.HIT:
                self._pin(request, key)
            elif found is not LookupResult.MISS or (key in plan.want and key not in request.failed):
                # On its way; or there was no room, because rows of stores or of an ended request are not free yet.
                plan.todo.append(key)
        return not plan.todo

    def _chain_of(self, request, num_computed: int):
        hashes, unit = request.block_hashes, self.hello["hash_unit"]
        chain = {}
        for g in self.groups:
            per = g.tokens // unit
            chain[g.number] = [make_offload_key(h, g.number) for h in hashes[per - 1 :: per]]
        params = getattr(request, "kv_transfer_params", None) or {}
        limit = request.num_tokens
        most = params.get("max_load_tokens")
        if type(most) is int and most >= 0:
            limit = min(limit, num_computed + most)

        def tail(end):
            top = min(request.num_prompt_tokens - 1, end + self.partial_tail - 1, limit)
            for boundary in range(top - top % unit, end, -unit):
                places = [(boundary + g.proof, g.number) for g in self.groups]
                if all(at // unit <= len(hashes) for at, _ in places):
                    yield boundary, [(at, make_offload_key(hashes[at // unit - 1], n)) for at, n in places]

        return chain, num_computed, limit, tail if self.partial_tail else None

    def admitted(self, request, num_external: int) -> None:
        """The connector says that vLLM has given the request its blocks: now it is known what came from where."""
        known = self.requests.get(request.request_id)
        if known is None:
            return
        if known.numbers is None:
            self._count(known, request, int(num_external))
        if not num_external:
            # No load follows whose end would free what was held for it.
            self._release(known)
            known.plan = None

    def _count(self, known: Request, request, num_external: int) -> None:
        stats = getattr(request, "prefill_stats", None)
        prompt = int(request.num_prompt_tokens)
        local = getattr(stats, "num_local_cached_tokens", None) if stats is not None else None
        local = min(known.start if local is None else int(local), prompt)
        external = min(num_external, prompt - local)
        drive, peer = self._by_source(known, local, local + external)
        known.numbers = (prompt, local, external - drive - peer, drive, peer, prompt - local - external)
        known.loaded = []

    def _by_source(self, known: Request, low: int, high: int) -> tuple[int, int]:
        """Tokens in (low, high] by the farthest place that one of their rows came from."""
        if high <= low or not known.loaded:
            return 0, 0
        whole = {g.number for g in self.groups if g.window is None}
        keys = [k for k in known.loaded if int.from_bytes(k[-4:], "big") in whole]
        positions = known.plan.positions if known.plan else {}
        edges: dict[int, list[int]] = {}
        for key in keys or known.loaded:
            end = positions.get(key) or known.ctx.get_offload_key_position(key) or 0
            start = end - (end % self._tokens(key) or self._tokens(key)) if keys else low
            start, end = max(start, low), min(end, high)
            source = known.sources.get(key, 0)
            if end > start and source:
                edges.setdefault(start, [0, 0, 0])[source] += 1
                edges.setdefault(end, [0, 0, 0])[source] -= 1
        drive = peer = 0
        here, at = [0, 0, 0], low
        for edge in sorted(edges):
            if here[FROM_PEER]:
                peer += edge - at
            elif here[FROM_DRIVE]:
                drive += edge - at
            at = edge
            here = [a + b for a, b in zip(here, edges[edge])]
        return drive, peer

    def will_load(self, keys, ctx) -> None:
        request = self.requests.get(ctx.req_id)
        if request is not None and request.numbers is None:
            request.loaded = list(keys)

    def load_ended(self, ctx) -> None:
        """The rows are in the device's cache: they may be given away."""
        request = self.requests.get(ctx.req_id)
        if request is not None:
            self._release(request)
            request.plan = None

    def before_reset(self) -> None:
        """vLLM is about to forget every row: what is pinned must be let go first."""
        for request in self.requests.values():
            self._release(request)
            request.plan = None
        self.held.clear()
        self.to_pin.clear()
        self.holes.clear()
        self.offered.clear()
        self.to_check.clear()

    # -- vLLM's hooks ---------------------------------------------------------------------------------------------------

    @quiet(LookupResult.MISS)
    def lookup(self, key, req_context, *args, **kwargs):
        request = self.requests.get(req_context.req_id)
        if request is None:
            request = self.requests[req_context.req_id] = Request(req_context, time.monotonic())
        plan = request.plan
        if plan is None:
            plan = self._plan_by_context(request)
            if plan is None:
                return LookupResult.RETRY
            request.plan = plan
        if key not in plan.want or key in request.failed:
            return LookupResult.MISS
        if plan.link is not self.link or not self._usable() or time.monotonic() > plan.deadline:
            self.counts["gave_up"] += 1
            plan.want = set()
            return LookupResult.MISS
        if not self._reserve(request, plan):
            return LookupResult.RETRY
        # A promotion may evict: what has arrived must be pinned before the next one begins.
        self._pin_arrived()
        return LookupResult.HIT

    def _plan_by_context(self, request: Request) -> Plan | None:
        """The plan when nobody announced the request: from the key positions that vLLM keeps with it."""
        self._poll()
        positions = getattr(request.ctx, "_offload_key_positions", None)
        if not positions:
            self._once("positions", "this vLLM does not tell the positions of keys: lookups miss")
            return Plan(None, 0, 0, [], set(), 0.0)
        chain: dict = {g.number: [] for g in self.groups}
        for key, position in sorted(positions.items(), key=lambda kp: kp[1]):
            number = int.from_bytes(key[-4:], "big")
            if number in chain and position == (len(chain[number]) + 1) * self._tokens(key):
                chain[number].append(key)
        return self._plan(request, chain, request.start, max(positions.values()))

    def submit_store(self, job_metadata) -> None:
        try:
            self._submit_store(job_metadata)
        except Exception as e:
            self._give_back(job_metadata, False, e)

    def submit_load(self, job_metadata) -> None:
        try:
            self._submit_load(job_metadata)
        except Exception as e:
            self._give_back(job_metadata, True, e)

    def _give_back(self, job, is_load: bool, error: Exception) -> None:
        """A job that could not be sent is failed, unless it was sent after all."""
        self._once(f"job: {type(error).__name__}", "a job failed: %r", error, trace=True)
        if any(job.job_id in link.jobs for link in [self.link, *self.lost] if link is not None):
            return
        self._fail(Job(job.job_id, list(job.keys), is_load, job.req_context.req_id, 0.0, 0.0))

    @staticmethod
    def _rows_of(job):
        rows = getattr(job, "chunk_ids", None)
        return rows if rows is not None else job.block_ids

    def _submit_store(self, job) -> None:
        ctx = job.req_context
        items = [
            (bytes(key), ctx.get_offload_key_position(key) or 0, int(row)) for key, row in zip(job.keys, self._rows_of(job), strict=True)
        ]
        # The keys come as a set. In the order of position a store that ends early leaves a usable prefix.
        items.sort(key=lambda item: item[1])
        for key, _, _ in items:
            self._remember(key)
        request = self.requests.get(ctx.req_id)
        if request is not None:
            request.tails.update(key for key, position, _ in items if position % self._tokens(key))
        if not self._usable():
            for key, _, _ in items:
                self._hole(key)
            # With the tier off the store counts as done: it is not the engine's trouble.
            off = self.link is not None and self.link.state == OPEN
            self.finished.append(JobResult(job.job_id, off, transfer_time=1e-6 if off else None))
            return
        new = []
        for item in items:
            if self._on_drive(item[0]):
                self.holes.pop(item[0], None)
            else:
                new.append(item)
        if not new:
            self.finished.append(JobResult(job.job_id, True, transfer_time=1e-6))
            return
        now = time.monotonic()
        self._send_job(
            Job(job.job_id, [i[0] for i in new], False, ctx.req_id, now, now + self.limits.store_silence_s),
            store_frame(job.job_id, str(ctx.req_id), new),
        )

    def _submit_load(self, job) -> None:
        ctx = job.req_context
        request = self.requests.get(ctx.req_id)
        plan = request.plan if request is not None else None
        known = plan.positions if plan is not None else {}
        items = [
            (bytes(key), known.get(key) or ctx.get_offload_key_position(key) or 0, int(row))
            for key, row in zip(job.keys, self._rows_of(job), strict=True)
        ]
        items.sort(key=lambda item: item[1])
        now = time.monotonic()
        left = max((plan.deadline if plan is not None else 0.0) - now, 0.001)
        if plan is not None:
            plan.jobs += 1
        sent = Job(job.job_id, [i[0] for i in items], True, ctx.req_id, now, now + left + self.limits.grace_s)
        if not self._usable():
            self._fail(sent)
            return
        for key, _, _ in items:
            self._remember(key)
        self._send_job(sent, load_frame(job.job_id, int(left * 1e6), ctx.req_id, items))

    def _send_job(self, job: Job, data: bytes) -> None:
        link = self.link
        if not link.send(data):
            self._once("out", "the node does not read: %d bytes unsent", link.unsent)
            self._fail(job)
            return
        link.jobs[job.number] = job
        try:
            link._flush()
        except OSError as e:
            self._break(link, f"connection to the node lost: {e}")

    def _remember(self, key) -> None:
        self.offered.pop(key, None)
        self.offered[key] = None
        while len(self.offered) > self.rows:
            self.offered.popitem(last=False)

    def get_finished_jobs(self):
        self._safe_poll()
        finished, self.finished = self.finished, []
        return finished

    @quiet(None)
    def _safe_poll(self) -> None:
        self._poll()

    @quiet(False)
    def has_pending_work(self) -> bool:
        """The engine steps on while an answer to HELLO or unsent frames are outstanding, each with a limit. Open jobs
        make vLLM step by themselves."""
        link = self.link
        if link is None:
            return False
        now = time.monotonic()
        if link.state == GREETING:
            return now - link.since < self.limits.greeting_s
        return bool(link.unsent) and now - link.heard < self.limits.greeting_s

    @quiet(RequestOffloadingContext)
    def on_new_request(self, req_context):
        """Asks for whole requests while rows are known that are in the area and not at the node. That lasts until
        each of them was stored, was seen in the node's table, or has left the area; any request that passes over such
        a row mends it."""
        self.requests[req_context.req_id] = Request(req_context, time.monotonic())
        self._poll()
        if self._usable() and (self.holes or self.to_check) and not self._mended(256):
            return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    @quiet(None)
    def on_request_finished(self, req_context) -> None:
        request = self.requests.pop(req_context.req_id, None)
        if request is None:
            return
        self._release(request)
        if request.numbers is not None:
            self._report(request)
        self._poll()

    def _report(self, request: Request) -> None:
        """The request's chain and its prompt tokens by source. A request that was never admitted has neither."""
        positions = getattr(request.ctx, "_offload_key_positions", None) or {}
        # Boundaries that vLLM only asked about are in there too; they are nobody's rows.
        chain = [(bytes(k), p) for k, p in positions.items() if p % self._tokens(k) == 0 or k in request.tails]
        chain.sort(key=lambda kp: kp[1])
        if len(self.reports) == self.reports.maxlen:
            self.counts["dropped_reports"] += 1
        self.reports.append(report_frame(str(request.ctx.req_id), request.numbers, chain))
        self._send_reports()

    def _send_reports(self) -> None:
        """Reports wait for a node that is away, the latest of them."""
        while self.reports and self.link is not None and self.link.state == OPEN and self.link.send(self.reports[0]):
            self.reports.popleft()

    @quiet(None)
    def on_schedule_end(self, context) -> None:
        self.unlink_area()
        self._sweep_plans(time.monotonic())
        if self.hello is None:
            self._once("layout", "nobody told the row layout (is kv_connector SparkKvConnector?): the tier stays off")
        self._poll()

    @quiet(None)
    def drain_jobs(self) -> None:
        """Blocks until no job is open: until the node answers, or it was ended and the quarantine is over."""
        until = time.monotonic() + self.limits.drain_s
        while True:
            self._poll()
            links = [link for link in [self.link, *self.lost] if link is not None and link.jobs]
            if not links:
                return
            now = time.monotonic()
            for link in links:
                if now > until and not link.killed:
                    self.counts["kills"] += 1
                    link.kill()
                    self._break(link, "the node did not end its jobs for a reset and was ended") if link is self.link else None
            self._wait(links)

    @staticmethod
    def _wait(links) -> None:
        poll = select.poll()
        for link in links:
            if link.state == BROKEN:
                if link.dead_at is None:
                    poll.register(link.pidfd, select.POLLIN)
            else:
                poll.register(link.sock, select.POLLIN)
        poll.poll(20)

    @quiet(None)
    def shutdown(self) -> None:
        for link in [self.link, *self.lost]:
            if link is not None:
                link.close()
        self.link, self.lost = None, []
        self.hello = None
        if self.row_fd is not None:
            os.close(self.row_fd)
            self.row_fd = None

    def config_info(self) -> dict:
        return {"socket": self.path, "plugin": PLUGIN}

    @classmethod
    def config_info_keys(cls, tier_config=None):
        return ("socket", "plugin")


# ---------------------------------------------------------------------------------------------------------------------
# vLLM's manager, with the two moments of a load that a tier is not told of.


class SparkKvManager(TieringOffloadingManager):
    """vLLM's own manager; each method adds a word to the tier before or after vLLM's own."""

    def _tell(self, what: str, *args) -> None:
        for tier in self.secondary_tiers:
            if isinstance(tier, SparkKvTier):
                quiet(None)(getattr(SparkKvTier, what))(tier, *args)

    def _process_finished_jobs(self, *args, **kwargs):
        # What has arrived must be pinned before anything may evict: stores follow at once.
        super()._process_finished_jobs(*args, **kwargs)
        self._tell("_pin_arrived")

    def prepare_load(self, keys, req_context):
        spec = super().prepare_load(keys, req_context)
        self._tell("will_load", keys, req_context)
        return spec

    def complete_load(self, keys, req_context):
        super().complete_load(keys, req_context)
        self._tell("load_ended", req_context)

    def reset_cache(self, *args, **kwargs):
        self._tell("before_reset")
        return super().reset_cache(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# The worker that the CPU platform lacks.


class CpuWorker(OffloadingWorker):
    """Moves blocks between the engine's cache and the shared rows by plain copies."""

    def __init__(self, kv_caches, blocks_per_chunk: int, region):
        self.region, self.per_chunk, self.refs = region, blocks_per_chunk, kv_caches.group_data_refs
        self.done: list[TransferResult] = []
        self.device, self.rows = [], []
        for t in kv_caches.tensors:
            self.device.append(t.tensor.view(torch.int8).view(-1, t.page_size_bytes))
            self.rows.append(region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk))

    def moves(self, device_spec, row_spec):
        """(group, device block, row, slot in the row), block by block."""
        blocks, rows = device_spec.block_ids, row_spec.block_ids
        at_block = at_row = 0
        for group, (count, first) in enumerate(zip(device_spec.group_sizes, device_spec.block_indices)):
            if not count:
                continue
            skip = first % self.per_chunk
            for k in range(count):
                row, slot = divmod(k + skip, self.per_chunk)
                yield group, int(blocks[at_block + k]), int(rows[at_row + row]), slot
            at_block, at_row = at_block + count, at_row + -(-(count + skip) // self.per_chunk)
        assert at_block == len(blocks) and at_row == len(rows), "blocks and rows do not fit"

    def copy_page(self, group: int, ref, block: int, row: int, slot: int, to_rows: bool) -> int:
        device, shared, size = self.device[ref.tensor_idx], self.rows[ref.tensor_idx], ref.page_size_bytes
        at = slot * device.shape[1]
        here, there = device[block, :size], shared[row, at : at + size]
        (there if to_rows else here).copy_(here if to_rows else there)
        return size

    def copy(self, device_spec, row_spec, to_rows: bool) -> int:
        return sum(
            self.copy_page(group, ref, block, row, slot, to_rows)
            for group, block, row, slot in self.moves(device_spec, row_spec)
            for ref in self.refs[group]
        )

    def _run(self, job_id: int, device_spec, row_spec, to_rows: bool) -> bool:
        began = time.monotonic()
        moved = self.copy(device_spec, row_spec, to_rows)
        took = max(time.monotonic() - began, 1e-6)
        self.done.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=took))
        return True

    def submit_store(self, job_id, src_spec, dst_spec, **_):
        return self._run(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec, **_):
        return self._run(job_id, dst_spec, src_spec, False)

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        """Copies are over when submit returns."""

    def shutdown(self):
        self.device, self.rows = [], []
        self.region.cleanup()


# ---------------------------------------------------------------------------------------------------------------------
# The spec and the connector.


def sweep_areas(own_engine_id: str, folder: str = "/dev/shm", young_s: float = 600.0, most: int = 64) -> list[str]:
    """Removes areas of engines of ours that died before their name was taken away. Such a file is nobody's when
    nobody holds the lock that every engine of ours takes on it (the kernel drops it with the process, and it is seen
    across pid namespaces), when no process that can be looked into has it open or mapped, and when it is older than
    an engine takes to get as far as that lock."""
    removed = []
    found = sorted(glob.glob(os.path.join(folder, "vllm_offload_spark-*.mmap")))[:most]
    for path in found:
        if os.path.basename(path).startswith(f"vllm_offload_{own_engine_id}."):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid() or time.time() - max(info.st_mtime, info.st_ctime) < young_s:
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _in_use(path, info.st_uid):
                os.unlink(path)
                removed.append(path)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


def _in_use(path: str, uid: int) -> bool:
    """Whether another process of the user has the file open or mapped, as far as /proc can be read."""
    me = os.getpid()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == me:
            continue
        try:
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            with open(f"/proc/{pid}/maps") as maps:
                if any(line.rstrip().endswith(path) for line in maps):
                    return True
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == path:
                    return True
        except OSError:
            continue
    return False


def hold(region) -> None:
    """Marks an area as in use for sweep_areas, until this process ends."""
    try:
        fcntl.flock(region.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, TypeError, AttributeError):
        pass


class SparkKvSpec(TieringOffloadingSpec):
    """vLLM's tiering, with a worker for the CPU platform and with a manager that tells when loads begin and end."""

    def __init__(self, config):
        super().__init__(config)
        if getattr(config, "canonical_layout", False):
            raise ValueError("canonical_layout is not supported: take it out of kv_connector_extra_config")
        self.layout: Layout | None = None
        for path in sweep_areas(self._engine_id):
            logger.warning("spark-kv: removed %s, left behind by an engine that died", path)

    def get_manager(self):
        manager = super().get_manager()
        if type(manager) is TieringOffloadingManager:
            # vLLM's spec names the manager's class itself and its constructor differs between versions; a subclass
            # that adds no state can take the object over.
            manager.__class__ = SparkKvManager
            hold(self._scheduler_mmap)
        return manager

    @property
    def tier(self) -> SparkKvTier | None:
        tiers = getattr(self._manager, "secondary_tiers", ())
        return next((t for t in tiers if isinstance(t, SparkKvTier)), None)

    @property
    def worker_rank(self) -> int:
        return 0 if getattr(self, "replicated_layout", False) else self.config.parallel.rank

    def make_cpu_worker(self, kv_caches, region):
        return CpuWorker(kv_caches, self.blocks_per_chunk, region)

    def get_worker(self, kv_caches):
        self.layout = layout_of(kv_caches, self.worker_rank)
        if not current_platform.is_cpu():
            worker = super().get_worker(kv_caches)
            hold(getattr(worker, "_mmap_region", None))
            return worker
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.worker_rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            hold(region)
            self._worker = self.make_cpu_worker(kv_caches, region)
        return self._worker


class SparkKvConnector(OffloadingConnector):
    """vLLM's own connector. It tells the tier the row layout (from the workers, by vLLM's handshake), asks it before
    vLLM looks keys up, and says what a request was really given."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._spark_config, self._spark_groups = vllm_config, kv_cache_config
        self._spark_spec = self.connector_worker.spec if self.connector_worker is not None else None
        self._spark_tier = None
        if self.connector_scheduler is not None:
            tiers = getattr(self.connector_scheduler.manager, "secondary_tiers", ())
            self._spark_tier = next((t for t in tiers if isinstance(t, SparkKvTier)), None)

    # -- worker --

    def get_handshake_metadata(self):
        spec = self._spark_spec
        if spec is None:
            return super().get_handshake_metadata()
        worker = getattr(spec, "_worker", None)
        region = getattr(worker, "region", None) or getattr(worker, "_mmap_region", None)
        if region is not None:
            # The scheduler takes the name away now; this worker must not look for it when it ends.
            region._creator = False
        return getattr(spec, "layout", None)

    # -- scheduler --

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        tier = self._spark_tier
        if tier is None:
            return
        try:
            layouts = [m for m in metadata.values() if isinstance(m, Layout)]
            tier.describe(*description(self._spark_config, self._spark_groups, self.connector_scheduler, tier, layouts))
        except Exception as e:
            tier._once("describe", "the row layout cannot be told, the tier stays off: %r", e, trace=True)

    def set_xfer_handshake_metadata(self, metadata):
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tier = self._spark_tier
        if tier is not None and not request.skip_reading_prefix_cache:
            # From 0.33 on the manager is entered under a lock that is held for the whole step.
            getattr(self.connector_scheduler, "_acquire_step", lambda: None)()
            if not quiet(True)(SparkKvTier.ready_for)(tier, request, num_computed_tokens):
                return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._spark_tier is not None:
            quiet(None)(SparkKvTier.admitted)(self._spark_tier, request, num_external_tokens)


def _kind(spec) -> str:
    try:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        kind = get_kv_cache_spec_kind(spec)
        return str(getattr(kind, "value", kind))
    except ImportError:
        return type(spec).__name__


def description(vllm_config, kv_cache_config, scheduler, tier: SparkKvTier, layouts):
    """Arguments of SparkKvTier.describe: groups as hits see them, HELLO, tokens of a block where tails may be partial."""
    spec, scheduler_config = tier.spec, scheduler.config
    proofs = getattr(scheduler, "_eagle_proof_margins", {})
    config, parallel = spec.config, spec.config.parallel
    per_row = spec.blocks_per_chunk
    if not layouts:
        raise ValueError("no worker told its layout")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ValueError(f"prefix-caching-hash-algo is {algorithm}: keys need the 32 bytes of sha256 or sha256_cbor")
    covered = covered_ranges(layouts, len(config.groups), spec.cpu_page_size_per_worker, per_row, spec.kv_bytes_per_chunk)
    groups, told = [], []
    for g, own, ranges in zip(config.groups, scheduler_config.kv_group_configs, covered):
        cache_spec = kv_cache_config.kv_cache_groups[g.group_id].kv_cache_spec
        tokens, kind = g.tokens_per_block * per_row, _kind(cache_spec)
        groups.append(
            Group(
                number=g.group_id,
                tokens=tokens,
                window=own.sliding_window_size_in_chunks,
                aligned=kind == "mamba",
                draft=bool(own.is_eagle_group),
                proof=int(proofs.get(g.group_id, 0)),
                kind=kind,
            )
        )
        # A key carries vLLM's number of the group. Groups that are not offloaded leave gaps.
        while len(told) < g.group_id:
            told.append({"kind": "not_cached", "tokens_per_row": 1, "covered": []})
        told.append({"kind": kind, "tokens_per_row": tokens, "covered": ranges})
    block = scheduler_config.kv_group_configs[0].tokens_per_block if scheduler_config.supports_partial_tail else 0
    cells = [[layout.rank, layout.pages, layout.groups] for layout in sorted(layouts, key=lambda each: each.rank)]
    cache = vllm_config.cache_config
    hello = {
        "protocol": PROTOCOL,
        "plugin": PLUGIN,
        "vllm": _vllm_version(),
        "pid": os.getpid(),
        "engine_id": spec._engine_id,
        "model": str(vllm_config.model_config.model),
        "rank": 0,
        "ranks": 1,
        "rows": int(spec.num_chunks),
        "row_bytes": int(spec.kv_bytes_per_chunk),
        "hash_unit": int(config.cache.tokens_per_hash),
        "hash_algorithm": algorithm,
        "hash_seed": os.environ.get("PYTHONHASHSEED") or "vllm-none-hash",
        "groups": told,
        "interchange": {
            "cache_dtype": str(config.model.dtype),
            "model_dtype": str(vllm_config.model_config.dtype),
            "cache_layout": str(config.kv_cache_layout),
            "quantization": str(vllm_config.model_config.quantization),
            "mamba_cache_dtype": str(getattr(cache, "mamba_cache_dtype", None)),
            "mamba_ssm_cache_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", None)),
            "attention_backend": str(getattr(vllm_config.attention_config, "backend", None)),
            "tensor_parallel": str(parallel.tp_size),
            "pipeline_parallel": str(parallel.pp_size),
            "context_parallel": f"{parallel.pcp_size}/{parallel.dcp_size}",
            "replicated_layout": str(bool(getattr(spec, "replicated_layout", False))),
            "blocks_per_row": str(per_row),
            "platform": "cpu" if current_platform.is_cpu() else str(current_platform.device_name),
            "rows_hold": hashlib.sha256(json.dumps(cells).encode()).hexdigest(),
        },
    }
    return groups, hello, block


def _vllm_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        import vllm

        return str(getattr(vllm, "__version__", "unknown"))
