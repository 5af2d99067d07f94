"""The connection: greetings, refusals, broken protocol, and a node that dies or falls silent with jobs open."""

import json
import os
import random
import signal
import socket
import struct
import time

import fake_node
import pytest
import spark_kv_tier as plugin
from conftest import Box, keys_of, settle, until
from test_tier import give
from vllm.v1.kv_offload.base import LookupResult


def test_hello_brings_the_layout_and_the_area(make):
    box, node = make(16)
    assert node.hello["rows"] == 16 and node.hello["engine_id"] == box.spec._engine_id
    node.area[:5] = b"hello"
    assert bytes(box.manager.primary_tier.get_kv_memoryview().cast("B")[:5]) == b"hello"


def test_while_the_node_greets_a_request_waits_for_a_while_only(make):
    box, node = make(16, connect=False, tier={"greeting_wait_s": 0.05})
    node.welcoming = False
    give(node, "a", 5)
    box.describe()
    box.new_request("r", "a", 5)
    began = time.monotonic()
    assert box.ask("r", True) is None
    while (hit := box.ask("r", True)) is None:
        assert time.monotonic() - began < 5
        node.step()
    assert hit == 0 and time.monotonic() - began >= 0.05
    node.welcome()
    settle(box, node)
    box.new_request("s", "a", 5)
    assert until(lambda: (node.step(), box.ask("s", True))[1], box) == 5


def test_without_a_node_requests_do_not_wait_and_connecting_is_not_hurried(make, socket_path):
    box, _ = make(16, connect=False, node=False, tier={"reconnect_s": 30.0})
    box.describe()
    tries = []
    real = plugin.Link.__init__
    plugin.Link.__init__ = lambda self, *a: (tries.append(1), real(self, *a))[1]
    try:
        for n in range(20):
            box.new_request(f"r{n}", "a", 5)
            assert box.ask(f"r{n}", n % 2 == 0) == 0
            box.end_step()
    finally:
        plugin.Link.__init__ = real
    assert not tries


def test_an_idle_engine_finds_its_node_again_at_the_next_request(make, socket_path):
    box, _ = make(16, connect=False, node=False)
    box.describe()
    node = fake_node.Node(socket_path)
    try:
        box.tier.next_try = 0
        box.new_request("r", "a", 5)
        node.step()
        box.ask("r", True)
        assert box.tier.link.state == plugin.OPEN
    finally:
        node.close()


def test_a_refusal_is_taken_and_not_repeated_at_once(make):
    box, node = make(16, connect=False)
    node.welcoming = False
    box.describe()
    node.step()
    node.refuse("another model")
    box.tier._poll()
    assert box.tier.link is None
    assert box.tier.next_try > time.monotonic() + 1
    box.new_request("r", "a", 5)
    assert box.ask("r", True) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": 1},
        {"pid": 1},
        {"table_slots": 100},
        {"table_slots": 1 << 30},
        {"row_budget": "many"},
        {"fds": []},
        {"generation": None},
    ],
    ids=str,
)
def test_a_welcome_that_cannot_be_right_is_not_taken(make, changed):
    box, node = make(16, connect=False)
    node.welcoming = False
    box.describe()
    node.step()
    node.welcome(**changed)
    box.tier._poll()
    assert box.tier.link is None and box.tier.counts["violations"] == 1
    box.new_request("r", "a", 5)
    assert box.ask("r", True) == 0


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 1 << 31),
        fake_node.encode(99),
        fake_node.encode(fake_node.DONE, b"\0" * 5),
        fake_node.encode(fake_node.DONE, struct.pack("<QII", 12345, 1, 0)),
        fake_node.encode(fake_node.WELCOME, b"{}"),
        b"\xff" * 64,
    ],
    ids=lambda d: d[:8].hex(),
)
def test_a_broken_protocol_closes_the_connection_and_stays_a_miss(make, data):
    box, node = make(16, tier={"reconnect_s": 30.0})
    give(node, "a", 5)
    node.send(data)
    box.new_request("r", "a", 5)
    assert box.ask("r", True) == 0
    box.end_step()
    assert box.tier.link is None and box.tier.counts["violations"] == 1


def test_random_bytes_never_reach_the_scheduler(make):
    dice = random.Random(9)
    box, node = make(16, tier={"reconnect_s": 0.0})
    for n in range(60):
        settle(box, node, 3)
        if node.conn is not None:
            try:
                node.send(dice.randbytes(dice.randrange(1, 200)))
            except OSError:
                node.hang_up()
        box.new_request(f"r{n}", "a", 3)
        while box.ask(f"r{n}", True) is None:
            node.step()
        box.store(f"r{n}") if n % 3 == 0 and not box.tier.lost else None
        box.end_step()
        box.finish(f"r{n}")


@pytest.mark.parametrize("outcomes", [[], [1] * 4, [1] * 6, [3] * 5, [9] * 5], ids=str)
def test_a_done_that_does_not_fit_its_load_ends_nothing(make, outcomes):
    box, node = make(16)
    give(node, "a", 5)
    node.loading = False
    box.new_request("r", "a", 5)
    box.ask("r", True)
    box.end_step()
    node.step()
    node.done(node.loads()[0].job, outcomes)
    box.end_step()
    assert box.tier.link is None
    assert [len(link.jobs) for link in box.tier.lost] == [1]
    assert not box.tier.finished
    # The rows are still the node's: vLLM must not be told otherwise while that process lives.
    assert box.manager.primary_tier.lookup(keys_of("a", 1)[0], None) is LookupResult.HIT_PENDING


def test_a_second_done_never_reaches_vllm(make):
    box, node = make(16)
    give(node, "a", 5)
    box.new_request("r", "a", 5)
    box.ask("r", True)
    box.end_step()
    node.step()
    node.done(node.loads()[0].job, [fake_node.FROM_DRIVE] * 5)
    box.end_step()
    box.end_step()
    assert box.tier.counts["violations"] == 1
    box.finish("r")


def test_frames_in_pieces_are_put_together(make):
    box, node = make(16)
    give(node, "a", 5)
    node.loading = False
    box.new_request("r", "a", 5)
    box.ask("r", True)
    box.end_step()
    node.step()
    data = fake_node.encode(fake_node.DONE, struct.pack("<QII", node.loads()[0].job, 1, 5) + b"\1" * 5)
    for i in range(len(data)):
        node.send(data[i : i + 1])
        box.end_step()
        assert bool(box.tier.link.jobs) == (i < len(data) - 1)


def test_a_node_that_does_not_read_costs_stores_and_reports_only(make):
    box, node = make(16, tier={"out_bytes": 4000})
    box.tier.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for n in range(400):
        box.new_request(f"r{n}", f"c{n}", 4)
        box.load(f"r{n}", 0)
        box.finish(f"r{n}")
    box.new_request("w", "w", 4)
    box.store("w")
    assert [r.success for r in box.tier.finished] == [False]
    assert set(box.tier.holes) == set(keys_of("w", 4))
    assert box.tier.counts["dropped_reports"] > 0
    assert box.tier.link.unsent <= 4000


def test_every_hook_keeps_its_own_trouble(make, monkeypatch):
    box, node = make(16)
    give(node, "a", 5)

    def broken(*_, **__):
        raise RuntimeError("planted")

    for name in ("_poll", "_plan", "_usable", "_reserve", "_remember", "_report", "_pin_arrived", "_mended"):
        monkeypatch.setattr(box.tier, name, broken)
    box.new_request("r", "a", 5)
    assert box.ask("r", False) == 0
    assert plugin.quiet(True)(plugin.SparkKvTier.ready_for)(box.tier, box.requests["r"].request, 0) is True
    box.store("r")
    assert [r.success for r in box.tier.get_finished_jobs()] == [False]
    box.tier.finished.append(plugin.JobResult(0, False))
    box.end_step()
    box.load("r", 0)
    box.finish("r")
    box.tier.has_pending_work()
    box.tier.drain_jobs()
    monkeypatch.undo()


# -- a node that dies --


def open_load(make_box, process, blocks=5):
    """A load that the process holds."""
    box = make_box
    until(lambda: box.tier.link is not None and box.tier.link.state == plugin.OPEN, box)
    box.new_request("r", "a", blocks)
    assert box.ask("r", True) is None
    box.end_step()
    while "load" not in json.loads(process.stdout.readline()):
        pass
    return box


@pytest.fixture
def apart(socket_path, node_process):
    """apart(*flags, **tier) -> (box, process): the node is a process that can die."""
    boxes = []

    def build(*flags, **tier):
        process = node_process(*flags, *[f"--has={key.hex()}" for key in keys_of("a", 5)])
        box = Box(16, socket_path, tier=tier)
        boxes.append(box)
        box.describe()
        return box, process

    yield build
    for box in boxes:
        box.close()


def test_a_load_fails_only_after_the_dead_nodes_reads_can_no_longer_land(apart):
    box, process = apart("--hold", "load", quarantine_s=0.3, reconnect_s=30.0)
    open_load(box, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    died = time.monotonic()
    box.end_step()
    assert box.ask("r", True) is None
    assert box.manager.primary_tier.lookup(keys_of("a", 1)[0], None) is LookupResult.HIT_PENDING
    assert until(lambda: box.ask("r", True) is not None, box)
    assert time.monotonic() - died >= 0.3
    assert box.ask("r", True) == 0
    box.load("r", 0)
    assert not box.tier.lost and not box.tier.held
    assert box.tier.counts["kills"] == 0


def test_a_store_fails_when_its_node_is_dead_and_leaves_a_hole(apart):
    box, process = apart("--hold", "store", reconnect_s=30.0)
    until(lambda: box.tier.link is not None and box.tier.link.state == plugin.OPEN, box)
    box.new_request("w", "w", 4)
    box.store("w")
    while "store" not in json.loads(process.stdout.readline()):
        pass
    process.kill()
    process.wait()
    until(lambda: not box.manager._jobs, box)
    assert set(box.tier.holes) == set(keys_of("w", 4))


def test_a_closed_connection_alone_ends_nothing_and_the_living_node_is_ended(apart):
    box, process = apart("--hold", "load", "--drop-on-job", grace_s=0.4, quarantine_s=0.1, reconnect_s=30.0)
    open_load(box, process)
    until(lambda: box.tier.link is None, box)
    assert process.poll() is None and len(box.tier.lost) == 1
    box.tier.lost[0].jobs[next(iter(box.tier.lost[0].jobs))].patience = time.monotonic() + 0.4
    assert not box.tier.finished and box.manager._jobs
    until(lambda: not box.manager._jobs, box)
    assert process.wait(5) == -signal.SIGKILL
    assert box.tier.counts["kills"] == 1


def test_a_node_that_welcomes_the_engine_again_has_let_go_of_its_rows_and_lives(apart):
    box, process = apart("--hold", "load", "--drop-on-job", grace_s=60.0)
    open_load(box, process)
    until(lambda: box.tier.link is None, box)
    assert len(box.tier.lost) == 1 and box.manager._jobs
    until(lambda: not box.manager._jobs, box)
    assert box.tier.link.state == plugin.OPEN and not box.tier.lost
    assert process.poll() is None and box.tier.counts["kills"] == 0


def test_a_node_that_is_silent_past_the_deadline_is_ended_first(apart):
    box, process = apart(
        "--hold", "load", "--rate", "1000000", grace_s=0.2, quarantine_s=0.1, reconnect_s=30.0, deadline_floor_s=0.1
    )
    open_load(box, process)
    process.send_signal(signal.SIGSTOP)
    until(lambda: not box.manager._jobs, box)
    assert process.wait(5) == -signal.SIGKILL
    assert box.ask("r", True) == 0


def test_stores_that_a_silent_node_never_answers_end_with_it(apart):
    box, process = apart("--hold", "store", store_silence_s=0.2, reconnect_s=30.0)
    until(lambda: box.tier.link is not None and box.tier.link.state == plugin.OPEN, box)
    box.new_request("w", "w", 4)
    box.store("w")
    until(lambda: not box.manager._jobs, box)
    assert process.wait(5) == -signal.SIGKILL


def test_draining_waits_for_the_node_and_has_a_limit(apart):
    box, process = apart("--hold", "load", drain_s=0.2, quarantine_s=0.1, reconnect_s=30.0)
    open_load(box, process)
    began = time.monotonic()
    box.manager.reset_cache()
    assert 0.2 <= time.monotonic() - began < 8
    assert not box.manager._jobs and process.wait(5) == -signal.SIGKILL


def test_the_next_node_serves_while_the_dead_ones_load_is_in_quarantine(apart, node_process):
    box, process = apart("--hold", "load", quarantine_s=0.5)
    open_load(box, process)
    process.kill()
    process.wait()
    until(lambda: box.tier.link is None, box)
    node_process(*[f"--has={key.hex()}" for key in keys_of("b", 3)])
    until(lambda: box.tier.link is not None and box.tier.link.state == plugin.OPEN, box)
    assert len(box.tier.lost) == 1
    until(lambda: not box.tier.lost, box)
    assert box.tier.link.state == plugin.OPEN


def test_no_descriptor_is_left_behind(make, socket_path):
    def count():
        return len(os.listdir("/proc/self/fd"))

    box, node = make(16, tier={"reconnect_s": 0.0})
    settle(box, node)
    before = count()
    for _ in range(10):
        node.hang_up()
        box.tier._poll()
        settle(box, node)
    assert box.tier.link.state == plugin.OPEN
    assert count() == before
