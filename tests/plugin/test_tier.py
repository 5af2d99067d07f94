"""The tier under vLLM's own tiering manager: hits, stores, holes, reports, without an engine around it."""

import os
import random
import time

import fake_node
import pytest
import spark_kv_tier as plugin
from conftest import ROW, UNIT, block_hash, content, keys_of, settle, until
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, make_offload_key

announced = pytest.mark.parametrize("announced", [True, False], ids=["announced", "by-lookups"])


def give(node, name, count, group=0, peer=False):
    """Puts a chain into the node."""
    for key in keys_of(name, count, group):
        (node.peer_rows if peer else node.rows)[key] = content(key)
        node.table.add(key, fake_node.PEER if peer else fake_node.DRIVE)


def serve(box, node, names, announced, steps=2000, hold=3):
    """Runs requests as the scheduler does until each has its hit; a load to the device takes `hold` steps.
    Returns hit blocks by request."""
    hits, loading, waiting = {}, [], list(names)
    for step in range(steps):
        for name in list(waiting):
            hit = box.ask(name, announced)
            if hit is not None:
                hits[name] = hit
                waiting.remove(name)
                loading.append((step + hold, name, box.load(name, hit)))
        box.end_step()
        node.step()
        for due, name, keys in list(loading):
            if step >= due:
                loading.remove((due, name, keys))
                box.loaded(name, keys)
                box.finish(name)
        if not waiting and not loading:
            return hits
    raise AssertionError(f"unresolved after {steps} steps: {waiting}")


# -- hits and the row area --


@announced
@pytest.mark.parametrize(("rows", "blocks"), [(50, 40), (50, 60), (50, 100), (50, 400)])
def test_a_hit_larger_than_the_area_is_cut_and_each_row_is_read_once(make, announced, rows, blocks):
    box, node = make(rows, budget=40)
    give(node, "big", blocks)
    box.new_request("r", "big", blocks)
    hits = serve(box, node, ["r"], announced)
    assert hits == {"r": min(blocks, 40)}
    assert node.read_rows == min(blocks, 40)


@announced
def test_three_at_once_beyond_the_area_are_all_served_and_each_row_is_read_once(make, announced):
    box, node = make(50, budget=40, rate=1)
    for name in "abc":
        give(node, name, 30)
        box.new_request(name, name, 30)
    assert serve(box, node, ["a", "b", "c"], announced) == {"a": 30, "b": 30, "c": 30}
    assert node.read_rows == 90
    assert box.tier.counts["waits"] > 0
    assert not box.tier.held


@announced
def test_rows_that_are_there_already_are_kept_while_the_rest_is_read(make, announced):
    """The head of the prompt is the oldest in the area: bringing the tail must not push it out."""
    box, node = make(40, budget=36)
    give(node, "a", 30)
    give(node, "fill", 25)
    box.new_request("first", "a", 10)
    serve(box, node, ["first"], announced)
    box.new_request("filler", "fill", 25)
    serve(box, node, ["filler"], announced)
    assert node.read_rows == 35
    box.new_request("whole", "a", 30)
    assert serve(box, node, ["whole"], announced) == {"whole": 30}
    assert node.read_rows == 55


@announced
def test_stores_beside_a_hit_do_not_push_its_rows_out(make, announced):
    box, node = make(40, budget=30)
    give(node, "a", 30)
    box.new_request("r", "a", 30)
    node.loading = False
    assert box.ask("r", announced) is None
    box.end_step()
    node.step()
    node.release()
    box.end_step()
    for n in range(12):
        box.new_request(f"w{n}", f"w{n}", 4)
        box.store(f"w{n}")
        node.step()
        box.end_step()
    assert box.ask("r", announced) == 30
    assert node.read_rows == 30


def test_the_budget_counts_a_row_that_two_need_once(make):
    box, node = make(50, budget=35, rate=1)
    give(node, "a", 30)
    for name in ("x", "y"):
        box.new_request(name, "a", 30)
    assert serve(box, node, ["x", "y"], True) == {"x": 30, "y": 30}
    assert node.read_rows == 30
    assert box.tier.counts["waits"] == 0


@announced
def test_waiting_for_rows_ends_with_a_miss_at_the_deadline(make, announced):
    box, node = make(50, budget=30, tier={"deadline_floor_s": 0.05}, rate=1_000_000)
    give(node, "a", 30)
    give(node, "b", 30)
    box.new_request("a", "a", 30)
    box.new_request("b", "b", 30)
    hit = until(lambda: (node.step(), box.ask("a", announced))[1], box)
    box.load("a", hit)
    assert box.ask("b", announced) is None
    began = time.monotonic()
    while (hit := box.ask("b", announced)) is None:
        box.end_step()
        assert time.monotonic() - began < 5
    assert hit == 0
    assert time.monotonic() - began >= 0.03
    assert box.tier.counts["gave_up"] > 0


@announced
def test_a_request_can_shorten_the_deadline_and_not_lengthen_it(make, announced):
    box, node = make(50, rate=1)
    give(node, "a", 30)
    box.new_request("short", "a", 30, spark_kv={"deadline_ms": 200})
    box.ask("short", announced)
    box.end_step()
    node.step()
    assert node.loads()[-1].deadline_us <= 200_000
    box.finish("short")
    box.tier.requests.clear()
    give(node, "b", 30)
    box.new_request("long", "b", 30, spark_kv={"deadline_ms": 10**9})
    box.ask("long", announced)
    box.end_step()
    node.step()
    assert 100_000_000 < node.loads()[-1].deadline_us <= 120_000_000


@announced
def test_the_deadline_follows_the_pace(make, announced):
    box, node = make(50)
    give(node, "a", 30)
    node.pace(4800)
    settle(box, node)
    box.new_request("r", "a", 30)
    box.ask("r", announced)
    box.end_step()
    node.step()
    assert box.tier._deadline(box.requests["r"].ctx, 480) == pytest.approx(480 / 4800 * 0.9)
    assert 0 < node.loads()[0].deadline_us <= 90_000


@announced
def test_a_key_that_failed_is_not_asked_for_again(make, announced):
    box, node = make(50)
    give(node, "a", 30)
    lost = keys_of("a", 30)[12]
    del node.rows[lost]
    box.new_request("r", "a", 30)
    assert serve(box, node, ["r"], announced) == {"r": 12}
    assert sum(1 for load in node.loads() for item in load.items if item[0] == lost) == 1
    box.new_request("later", "a", 30)
    serve(box, node, ["later"], announced)
    assert sum(1 for load in node.loads() for item in load.items if item[0] == lost) == 2


@announced
def test_loads_go_in_prefix_order_and_bring_the_right_bytes(make, announced):
    box, node = make(50)
    give(node, "a", 20)
    box.new_request("r", "a", 20)
    node.loading = False
    box.ask("r", announced)
    box.end_step()
    node.step()
    (load,) = node.loads()
    assert load.request == "r"
    assert [item[0] for item in load.items] == keys_of("a", 20)
    assert [item[1] for item in load.items] == [(i + 1) * UNIT for i in range(20)]
    node.release()
    assert until(lambda: box.ask("r", announced), box) == 20
    assert all(box.row_of(key) == content(key) for key in keys_of("a", 20))


@announced
def test_a_load_in_part_keeps_what_came(make, announced):
    box, node = make(50)
    give(node, "a", 10)
    node.loading = False
    box.new_request("r", "a", 10)
    box.ask("r", announced)
    box.end_step()
    node.step()
    (load,) = node.loads()
    for _, _, row in load.items:
        node.area[row * ROW : (row + 1) * ROW] = content(load.items[0][0])
    node.done(load.job, [fake_node.FROM_DRIVE] * 6 + [fake_node.FAILED] * 4)
    assert until(lambda: box.ask("r", announced), box) == 6


@announced
def test_nothing_that_is_nowhere_is_asked_for(make, announced):
    box, node = make(50)
    box.new_request("r", "unknown", 30)
    assert box.ask("r", announced) == 0
    box.end_step()
    node.step()
    assert not node.loads()


@announced
def test_rows_are_let_go_when_a_request_ends_before_its_load(make, announced):
    box, node = make(50, budget=30, rate=1)
    give(node, "a", 30)
    give(node, "b", 30)
    box.new_request("a", "a", 30)
    box.ask("a", announced)
    box.finish("a")
    assert not box.tier.held
    box.new_request("b", "b", 30)
    assert serve(box, node, ["b"], announced)["b"] == 30


def test_rows_are_let_go_when_vllm_does_not_admit_a_request(make):
    box, node = make(50, budget=30, tier={"hold_s": 0.0})
    give(node, "a", 30)
    box.new_request("a", "a", 30)
    assert until(lambda: (node.step(), box.ask("a", True))[1], box) == 30
    box.end_step()
    time.sleep(0.002)
    box.end_step()
    assert not box.tier.held
    assert not box.manager.primary_tier._policy.chunks or all(
        c.ref_cnt <= 0 for c in box.manager.primary_tier._policy.chunks.values()
    )


def test_many_requests_in_any_order_all_end_and_nothing_stays_held(make):
    dice = random.Random(5)
    box, node = make(60, budget=40, rate=1)
    for name in "abcdefgh":
        give(node, name, 50)
    names = []
    for n in range(24):
        name = f"r{n}"
        box.new_request(name, dice.choice("abcdefgh"), dice.randrange(1, 50))
        names.append(name)
    for start in range(0, 24, 6):
        serve(box, node, names[start : start + 6], dice.random() < 0.5)
    assert not box.tier.held and not box.tier.requests
    assert all(c.ref_cnt == 0 for c in box.manager.primary_tier._policy.chunks.values())


def test_a_hybrid_hit_brings_one_state_only(make):
    groups = [plugin.Group(0, UNIT), plugin.Group(1, UNIT, window=1, aligned=True, kind="mamba")]
    box, node = make(60, groups=groups)
    give(node, "a", 20)
    for i in (3, 9, 14):
        key = keys_of("a", 20, 1)[i]
        node.rows[key] = content(key)
        node.table.add(key, fake_node.DRIVE)
    box.new_request("r", "a", 20)
    ready = until(lambda: (node.step(), box.tier.ready_for(box.requests["r"].request, 0))[1], box)
    assert ready
    brought = [item[0] for load in node.loads() for item in load.items]
    assert sorted(brought) == sorted(keys_of("a", 20)[:15] + [keys_of("a", 20, 1)[14]])


def test_a_partial_tail_is_brought_with_the_rest(make):
    groups = [plugin.Group(0, 4 * UNIT), plugin.Group(1, 4 * UNIT, window=1, aligned=True, kind="mamba")]
    box, node = make(60, groups=groups)
    box.tier.partial_tail = 4 * UNIT
    hashes = [block_hash(f"a/{i}") for i in range(11)]
    stored = [make_offload_key(hashes[i], g) for g in (0, 1) for i in (3, 7, 8, 9)]
    for key in stored:
        node.rows[key] = content(key)
        node.table.add(key, fake_node.DRIVE)
    box.new_request("r", "a", 11)
    until(lambda: (node.step(), box.tier.ready_for(box.requests["r"].request, 0))[1], box)
    brought = {item[0]: item[1] for load in node.loads() for item in load.items}
    tail = [make_offload_key(hashes[9], g) for g in (0, 1)]
    assert [brought.get(key) for key in tail] == [160, 160]
    assert make_offload_key(hashes[8], 0) not in brought


# -- stores --


def test_stores_go_in_the_order_of_position_as_one_frame(make):
    box, node = make(64)
    box.new_request("r", "a", 40)
    box.store("r")
    node.step()
    (store,) = node.stores()
    assert [item[0] for item in store.items] == keys_of("a", 40)
    assert [item[1] for item in store.items] == [(i + 1) * UNIT for i in range(40)]
    assert node.rows[keys_of("a", 40)[7]] == content(keys_of("a", 40)[7])


def test_stored_rows_stay_pinned_until_the_node_answers(make):
    box, node = make(16)
    node.storing = False
    box.new_request("r", "a", 10)
    box.store("r")
    box.new_request("s", "b", 10)
    assert box.store("s") is None
    settle(box, node)
    node.release()
    box.end_step()
    assert box.store("s") is not None


def test_what_the_table_shows_on_the_drive_is_not_sent_again(make):
    box, node = make(64)
    give(node, "a", 5)
    box.new_request("r", "a", 8)
    box.store("r")
    node.step()
    assert [item[0] for item in node.stores()[0].items] == keys_of("a", 8)[5:]
    box.new_request("s", "b", 3)
    give(node, "b", 3)
    box.store("s")
    box.end_step()
    box.end_step()
    assert len(node.stores()) == 1 and not box.manager.has_pending_work()


def test_with_the_tier_off_stores_are_done_and_lookups_miss(make):
    box, node = make(64)
    give(node, "a", 5)
    node.tier(False, "the canary differs")
    settle(box, node)
    box.new_request("r", "a", 5)
    assert box.ask("r", True) == 0
    box.new_request("s", "b", 5)
    box.store("s")
    (result,) = box.tier.get_finished_jobs()
    assert result.success
    box.tier.finished.append(result)
    box.end_step()
    node.step()
    assert not node.stores() and not node.loads()
    node.tier(True)
    settle(box, node)
    assert box.new_request("t", "b", 5).policy is OffloadPolicy.REQUEST_LEVEL


def test_replies_are_stored_and_reported_when_vllm_offers_them(make):
    box, node = make(64, offload_prompt_only=False)
    assert box.spec.offload_prompt_only is False
    box.new_request("r", "a", 12, prompt=4 * UNIT + 3)
    box.load("r", 0)
    box.store("r")
    box.finish("r")
    settle(box, node)
    assert [item[1] for item in node.stores()[0].items][-1] == 12 * UNIT
    (report,) = node.reports
    assert [p for _, p in report.chain] == [(i + 1) * UNIT for i in range(12)]
    assert report.sources["prompt"] == 4 * UNIT + 3


# -- holes --


def test_after_a_reconnect_whole_requests_are_asked_for_until_the_holes_are_mended(make, socket_path):
    box, node = make(64)
    assert box.new_request("a", "a", 10).policy is OffloadPolicy.CHUNK_LEVEL
    box.store("a")
    settle(box, node)
    box.end_step()
    box.finish("a")
    # Another node, with nothing on its drive.
    node.close()
    box.tier._poll()
    fresh = fake_node.Node(socket_path, generation=2)
    try:
        box.tier.next_try = 0
        settle(box, fresh)
        assert box.tier.link.state == plugin.OPEN
        again = box.new_request("b", "a", 10)
        assert again.policy is OffloadPolicy.REQUEST_LEVEL
        # vLLM offers every chunk of such a request, though its rows are there.
        box.manager.prepare_store(box.keys("b"), again.ctx)
        settle(box, fresh)
        assert set(fresh.rows) == set(keys_of("a", 10))
        box.end_step()
        assert box.new_request("c", "a", 10).policy is OffloadPolicy.CHUNK_LEVEL
        box.finish("b")
        box.finish("c")
    finally:
        fresh.close()


def test_a_store_without_a_node_is_a_hole_until_it_is_mended(make):
    box, node = make(64, connect=False)
    box.new_request("a", "a", 10)
    box.store("a")
    (result,) = box.tier.get_finished_jobs()
    assert not result.success
    box.tier.finished.append(result)
    box.end_step()
    box.describe()
    settle(box, node)
    again = box.new_request("b", "a", 10)
    assert again.policy is OffloadPolicy.REQUEST_LEVEL
    box.manager.prepare_store(box.keys("b"), again.ctx)
    settle(box, node)
    assert set(node.rows) == set(keys_of("a", 10))


def test_a_store_that_the_node_failed_is_a_hole(make):
    box, node = make(64)
    node.storing = False
    box.new_request("a", "a", 4)
    box.store("a")
    node.step()
    assert node.stores()[0].request == "a", "the node is told whose rows they are"
    node.done(node.stores()[0].job, [fake_node.STORED, fake_node.FAILED, fake_node.STORED, fake_node.STORED])
    for key in keys_of("a", 4)[:1] + keys_of("a", 4)[2:]:
        node.table.add(key, fake_node.DRIVE)
    box.end_step()
    assert list(box.tier.holes) == [keys_of("a", 4)[1]]
    node.storing = True
    again = box.new_request("b", "a", 4)
    assert again.policy is OffloadPolicy.REQUEST_LEVEL
    box.manager.prepare_store(box.keys("b"), again.ctx)
    node.step()
    assert [item[0] for item in node.stores()[-1].items] == [keys_of("a", 4)[1]]


def test_a_hole_whose_row_has_left_the_area_is_forgotten(make):
    box, node = make(16)
    node.storing = False
    box.new_request("a", "a", 4)
    box.store("a")
    node.step()
    node.done(node.stores()[0].job, [fake_node.FAILED] * 4)
    box.end_step()
    node.storing = True
    for n in range(3):
        box.new_request(f"b{n}", f"b{n}", 8)
        box.store(f"b{n}")
        settle(box, node)
        box.end_step()
    assert box.new_request("c", "c", 1).policy is OffloadPolicy.CHUNK_LEVEL
    assert not box.tier.holes


# -- reports --


def total(sources):
    return sum(v for k, v in sources.items() if k != "prompt")


def test_a_report_adds_up_and_tells_where_the_tokens_came_from(make):
    box, node = make(64)
    give(node, "a", 10)
    give(node, "b", 0)
    for key in keys_of("a", 20)[10:14]:
        node.peer_rows[key] = content(key)
        node.table.add(key, fake_node.PEER)
    # Two blocks are in the device, three in the rows already, five on the drive, four with the peer, the rest nowhere.
    box.new_request("before", "a", 5)
    serve(box, node, ["before"], True)
    settle(box, node)
    node.reports.clear()
    box.new_request("r", "a", 20, prompt=20 * UNIT + 7, start=2 * UNIT)
    hits = serve(box, node, ["r"], True)
    assert hits == {"r": 12}
    settle(box, node)
    (report,) = node.reports
    assert report.request == "r"
    assert report.sources == {
        "prompt": 327, "device": 32, "staging": 48, "drive": 80, "peer": 64, "computed": 103,
    }
    assert total(report.sources) == report.sources["prompt"]
    assert report.chain == [(k, (i + 1) * UNIT) for i, k in enumerate(keys_of("a", 20))]


def test_every_admitted_request_is_reported_once(make):
    box, node = make(64)
    give(node, "a", 20)
    for n in range(6):
        box.new_request(f"r{n}", "a", 5 + n)
        serve(box, node, [f"r{n}"], n % 2 == 0)
    box.new_request("never", "a", 5)
    box.finish("never")
    settle(box, node)
    assert [r.request for r in node.reports] == [f"r{n}" for n in range(6)]
    assert all(total(r.sources) == r.sources["prompt"] for r in node.reports)


def test_reports_wait_for_a_node_that_is_away_and_the_latest_are_kept(make):
    box, node = make(16, connect=False, tier={"reports": 3})
    for n in range(5):
        box.new_request(f"r{n}", "a", 2)
        box.load(f"r{n}", 0)
        box.finish(f"r{n}")
    box.describe()
    settle(box, node)
    assert [r.request for r in node.reports] == ["r2", "r3", "r4"]
    assert box.tier.counts["dropped_reports"] == 2


def test_the_engines_own_count_of_local_tokens_is_believed(make):
    box, node = make(64)
    r = box.new_request("r", "a", 5, prompt=100)
    r.request.prefill_stats = type("S", (), {"num_local_cached_tokens": 37})()
    box.tier.admitted(r.request, 0)
    box.tier.admitted(r.request, 60)
    box.finish("r")
    settle(box, node)
    assert node.reports[0].sources == {"prompt": 100, "device": 37, "staging": 0, "drive": 0, "peer": 0, "computed": 63}


def test_boundaries_that_vllm_only_asked_about_are_not_in_the_chain(make):
    box, node = make(64, groups=[plugin.Group(0, 4 * UNIT)])
    r = box.new_request("r", "a", 8)
    r.ctx.set_offload_key_position(make_offload_key(block_hash("a/4"), 0), 5 * UNIT)
    box.load("r", 0)
    box.finish("r")
    settle(box, node)
    assert [p for _, p in node.reports[0].chain] == [64, 128]


# -- the area's name --


def test_the_areas_name_is_gone_as_soon_as_the_layout_is_known(make):
    box, _ = make(16, connect=False)
    assert os.path.exists(box.path)
    box.describe()
    assert not os.path.exists(box.path)


def test_the_areas_name_is_gone_after_the_first_step_in_any_case(make):
    box, _ = make(16, connect=False)
    box.end_step()
    assert not os.path.exists(box.path)


def test_another_file_of_that_name_is_left_alone(make):
    box, _ = make(16, connect=False)
    os.unlink(box.path)
    with open(box.path, "w"):
        pass
    box.end_step()
    assert os.path.exists(box.path)


@pytest.fixture
def area(tmp_path):
    def build(name, age=1000):
        path = tmp_path / f"vllm_offload_{name}.mmap"
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - age,) * 2)
        return path

    return build


def sweep(tmp_path, young=0.0):
    return {os.path.basename(p) for p in plugin.sweep_areas("spark-me-1", str(tmp_path), young_s=young)}


def test_only_areas_of_our_own_that_are_nobodys_are_swept(area, tmp_path):
    area("spark-dead-1"), area("spark-me-1"), area("other-1")
    assert sweep(tmp_path) == {"vllm_offload_spark-dead-1.mmap"}
    assert {p.name for p in tmp_path.iterdir()} == {"vllm_offload_spark-me-1.mmap", "vllm_offload_other-1.mmap"}


def test_a_young_area_is_not_swept(area, tmp_path):
    area("spark-dead-1")
    assert sweep(tmp_path, young=120.0) == set()


def test_an_area_that_another_process_has_mapped_or_locked_is_not_swept(area, tmp_path):
    import fcntl
    import subprocess
    import sys

    path = area("spark-alive-1")
    hold = "import mmap,os,sys; f=os.open(sys.argv[1],os.O_RDWR); m=mmap.mmap(f,0); os.close(f); print('x',flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert sweep(tmp_path) == set()
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert sweep(tmp_path) == set()
    os.close(lock)
    assert sweep(tmp_path) == {path.name}


# -- reset --


@announced
def test_a_reset_drops_the_rows_and_not_the_tier(make, announced):
    box, node = make(64)
    give(node, "a", 20)
    box.new_request("r", "a", 20)
    serve(box, node, ["r"], announced)
    box.new_request("open", "a", 20)
    box.ask("open", announced)
    box.new_request("w", "w", 10)
    box.store("w")
    node.step()
    box.manager.reset_cache()
    # From 0.33 on vLLM brings nothing until its workers have reported what was under way.
    getattr(box.manager, "on_reset_flushed", lambda: None)()
    assert box.manager.primary_tier.lookup(keys_of("a", 1)[0], None) is LookupResult.MISS
    assert not box.tier.held
    box.finish("open")
    before = node.read_rows
    box.new_request("s", "a", 20)
    assert serve(box, node, ["s"], announced) == {"s": 20}
    assert node.read_rows == before + 20
