"""What the plugin's tests share: a row area under vLLM's own tiering manager, and a node that the test steps.

Run with the python of an environment that has vLLM for the CPU: `python -m pytest tests/plugin`.
"""

import hashlib
import itertools
import os
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src/engine/plugin")]

import fake_node  # noqa: E402
import spark_kv_tier as plugin  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

UNIT = 16
ROW = 4096
_numbers = itertools.count()


def block_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def keys_of(name: str, count: int, group: int = 0):
    return [make_offload_key(block_hash(f"{name}/{i}"), group) for i in range(count)]


def offloading_config(rows: int, socket: str, groups=(UNIT,), **extra) -> OffloadingConfig:
    tier = {"type": "SparkKvTier", "module_path": "spark_kv_tier", "socket": socket, **extra.pop("tier", {})}
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(t, (f"layer{i}",), i) for i, t in enumerate(groups)),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": rows * ROW, "secondary_tiers": [tier], **extra},
        engine_id=f"spark-test-{os.getpid()}-{next(_numbers)}",
        model=OffloadingModelConfig("/models/tiny", "bfloat16"),
        cache=OffloadingCacheConfig(UNIT, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


class Box:
    """The engine's side: manager, tier, and steps as vLLM's scheduler makes them."""

    def __init__(self, rows, socket, groups=None, **extra):
        self.groups = groups or [plugin.Group(0, UNIT)]
        config = offloading_config(rows, socket, tuple(g.tokens for g in self.groups), **extra)
        self.spec = plugin.SparkKvSpec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.spec.tier
        self.path = self.spec._scheduler_mmap.mmap_path
        self.requests = {}
        self.open_stores = []

    def describe(self):
        hello = {
            "protocol": 2, "plugin": "1", "vllm": "0", "pid": os.getpid(), "engine_id": self.spec._engine_id,
            "model": "/models/tiny", "rank": 0, "ranks": 1, "rows": self.spec.num_chunks, "row_bytes": ROW,
            "hash_unit": UNIT, "hash_algorithm": "sha256_cbor", "hash_seed": "0", "interchange": {},
            "groups": [{"kind": g.kind, "tokens_per_row": g.tokens, "covered": [[0, ROW]]} for g in self.groups],
        }
        self.tier.describe(self.groups, hello)

    def new_request(self, name, chain, count, prompt=None, start=0, **params):
        """A request whose prompt has `count` blocks of the chain called `chain`."""
        ctx = ReqContext(req_id=name, kv_transfer_params=params or None)
        policy = self.manager.on_new_request(ctx)
        hashes = [block_hash(f"{chain}/{i}") for i in range(count)]
        for group in self.groups:
            per = group.tokens // UNIT
            for i, h in enumerate(hashes[per - 1 :: per]):
                ctx.set_offload_key_position(make_offload_key(h, group.number), (i + 1) * group.tokens)
        request = SimpleNamespace(
            request_id=name, block_hashes=hashes, num_tokens=prompt or count * UNIT + 1,
            num_prompt_tokens=prompt or count * UNIT + 1, kv_transfer_params=params or None,
            skip_reading_prefix_cache=False, prefill_stats=None,
        )
        self.requests[name] = SimpleNamespace(ctx=ctx, request=request, policy=policy.policy, start=start)
        return self.requests[name]

    def keys(self, name, group=0):
        number = self.groups[group]
        per = number.tokens // UNIT
        return [make_offload_key(h, number.number) for h in self.requests[name].request.block_hashes[per - 1 :: per]]

    def ask(self, name, announced):
        """One round of vLLM's lookups for an attention model: hit blocks, or None for "ask again"."""
        r = self.requests[name]
        if announced and not self.tier.ready_for(r.request, r.start):
            return None
        hit, defer = 0, False
        for key in self.keys(name)[r.start // self.groups[0].tokens :]:
            found = self.manager.lookup(key, r.ctx)
            if found in (LookupResult.HIT, LookupResult.HIT_PENDING):
                hit += 1
                defer |= found is LookupResult.HIT_PENDING
            elif found is LookupResult.RETRY:
                defer = True
            else:
                break
        return None if defer else hit

    def end_step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def load(self, name, hit):
        """vLLM takes a hit: rows to the device, admission, end of the load."""
        r = self.requests[name]
        first = r.start // self.groups[0].tokens
        keys = self.keys(name)[first : first + hit]
        if keys:
            self.manager.prepare_load(keys, r.ctx)
        self.tier.admitted(r.request, hit * self.groups[0].tokens)
        return keys

    def loaded(self, name, keys):
        if keys:
            self.manager.complete_load(keys, self.requests[name].ctx)

    def store(self, name, keys=None):
        """vLLM stores blocks that it computed: device to rows, then to the tier."""
        r = self.requests[name]
        out = self.manager.prepare_store(keys or self.keys(name), r.ctx)
        if out is not None and out.keys_to_store:
            self.fill(out)
            self.manager.complete_store(set(out.keys_to_store), r.ctx)
        return out

    def fill(self, out):
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        for key, row in zip(out.keys_to_store, out.store_spec.block_ids):
            view[int(row) * ROW : (int(row) + 1) * ROW] = content(key)

    def row_of(self, key):
        chunk = self.manager.primary_tier._policy.get(key)
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        return bytes(view[chunk.chunk_id * ROW : (chunk.chunk_id + 1) * ROW])

    def finish(self, name):
        self.manager.on_request_finished(self.requests[name].ctx)

    def close(self):
        self.manager.shutdown()
        if os.path.exists(self.path):
            os.unlink(self.path)


def content(key: bytes) -> bytes:
    return (hashlib.sha256(key).digest() * (ROW // 32))[:ROW]


@pytest.fixture
def socket_path(tmp_path):
    return str(tmp_path / "engine.sock")


@pytest.fixture
def make(socket_path):
    """make(rows, node=..., **extra) -> (box, node), connected unless connect=False."""
    opened = []

    def build(rows=64, budget=1 << 20, connect=True, rate=1000, groups=None, node=True, **extra):
        other = fake_node.Node(socket_path, budget=budget, rate=rate) if node else None
        box = Box(rows, socket_path, groups, **extra)
        opened.extend(x for x in (box, other) if x is not None)
        if connect:
            box.describe()
            settle(box, other)
            assert box.tier.link is not None and box.tier.link.state == plugin.OPEN
        return box, other

    yield build
    for thing in opened:
        thing.close()


def settle(box, node, rounds=6):
    for _ in range(rounds):
        node.step()
        box.tier._poll()


@pytest.fixture
def node_process(socket_path):
    """node_process(*flags) -> a fake node in its own process, so that it can die."""
    started = []

    def start(*flags):
        child = subprocess.Popen(
            [sys.executable, str(HERE / "fake_node.py"), socket_path, *flags], stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert "ready" in child.stdout.readline()
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()


def until(what, box, limit=10.0):
    """Steps the engine until something is so; the limit only ends a test that has failed."""
    end = time.monotonic() + limit
    while not (got := what()):
        assert time.monotonic() < end, "it never came"
        box.end_step()
        time.sleep(0.001)
    return got
