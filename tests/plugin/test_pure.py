"""Frames, table, layout and plans: everything of the plugin that needs no vLLM around it."""

import json
import pathlib
import random
import struct

import fake_node
import pytest
import spark_kv_tier as plugin
from conftest import UNIT, keys_of


def test_frames_read_back_at_the_other_end():
    key = keys_of("a", 1)[0]
    frame = plugin.load_frame(7, 50_000, "chatcmpl-x", [(key, 16, 3)])
    assert struct.unpack_from("<I", frame)[0] == len(frame) - 4
    said = fake_node.Said(frame[4], frame[5:])
    assert (said.kind, said.job, said.deadline_us, said.request) == (plugin.LOAD, 7, 50_000, "chatcmpl-x")
    assert said.items == [(key, 16, 3)]
    frame = plugin.store_frame(8, "chatcmpl-y", [(key, 16, 3), (key, 32, 4)])
    said = fake_node.Said(frame[4], frame[5:])
    assert (said.kind, said.job, said.request) == (plugin.STORE, 8, "chatcmpl-y")
    assert said.items == [(key, 16, 3), (key, 32, 4)]
    frame = plugin.report_frame("r", (9, 1, 2, 3, 1, 2), [(key, 16)])
    said = fake_node.Said(frame[4], frame[5:])
    assert said.sources == {"prompt": 9, "device": 1, "staging": 2, "drive": 3, "peer": 1, "computed": 2}
    assert said.chain == [(key, 16)]


def test_frames_are_bytes_as_the_protocol_says():
    key = bytes(range(32)) + b"\0\0\0\2"
    assert plugin.load_frame(1, 2, "r", [(key, 3, 4)]).hex() == (
        "40000000" "03" "0100000000000000" "02000000" "0100" "72" "01000000" + key.hex() + "03000000" "04000000"
    )
    assert plugin.store_frame(1, "r", [(key, 3, 4)]).hex() == (
        "3c000000" "02" "0100000000000000" "0100" "72" "01000000" + key.hex() + "03000000" "04000000"
    )


def test_a_report_too_long_for_a_frame_keeps_the_head_of_its_chain():
    chain = [(struct.pack(">Q", i) * 4 + b"\0\0\0\0", i) for i in range(plugin.MAX_ITEMS + 10)]
    frame = plugin.report_frame("r", (0,) * 6, chain)
    assert len(frame) <= plugin.MAX_FRAME + 4
    assert fake_node.Said(frame[4], frame[5:]).chain == chain[: plugin.MAX_ITEMS]


def test_jobs_beyond_a_frame_are_refused():
    with pytest.raises(ValueError):
        plugin.store_frame(1, "r", [(bytes(36), 0, 0)] * (plugin.MAX_ITEMS + 1))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (plugin.DONE, b""),
        (plugin.DONE, struct.pack("<QII", 1, 1, 2) + b"\1"),
        (plugin.DONE, struct.pack("<QII", 1, 1, 1) + b"\1\1"),
        (plugin.DONE, struct.pack("<QII", 1, 1, 1) + b"\5"),
        (plugin.TIER, b""),
        (plugin.TIER, b"\1\5\0ab"),
        (plugin.PACE, b"\0\0\0"),
        (plugin.REFUSE, b"\1"),
        (69, b""),
        (1, b"{}"),
    ],
)
def test_what_no_node_would_say_is_a_violation(kind, body):
    with pytest.raises(plugin.Violation):
        plugin.parse(kind, memoryview(body))


def test_no_bytes_make_the_reader_do_anything_else():
    dice = random.Random(1)
    for _ in range(3000):
        body = dice.randbytes(dice.randrange(40))
        for kind in (*range(60, 72), 0, 255):
            try:
                plugin.parse(kind, memoryview(body))
            except plugin.Violation:
                pass


def test_the_table_is_read_as_it_is_written():
    table = fake_node.Table(4096)
    reader = plugin.Table(table.fd, 4096)
    twin = {}
    keys = [k for g in range(3) for k in keys_of("t", 500, g)]
    dice = random.Random(2)
    for _ in range(6000):
        key, holder = dice.choice(keys), dice.choice((1, 2))
        if dice.random() < 0.6:
            table.add(key, holder)
            twin[key] = twin.get(key, 0) | holder
        else:
            table.remove(key, holder)
            twin[key] = twin.get(key, 0) & ~holder
    assert {k: reader.holders(k) for k in keys} == {k: twin.get(k, 0) for k in keys}
    assert any(twin.values()) and not all(twin.values())
    assert reader.holders(b"short") == 0


def test_the_place_of_a_key_is_the_nodes():
    """Values that the node's own code computed."""
    cases = json.loads((pathlib.Path(__file__).parent / "places.json").read_text())
    assert len(cases) > 20
    for case in cases:
        key = bytes.fromhex(case["key"])
        assert plugin.place(key, case["buckets"] - 1) == (int(case["tag"]), case["first"], case["second"]), case


@pytest.mark.parametrize("slots", [0, 8, 100, 1 << 33])
def test_a_table_of_no_sound_size_is_refused(slots):
    with pytest.raises(plugin.Violation):
        plugin.Table(fake_node.Table(64).fd, slots)


def test_a_table_larger_than_its_memory_is_refused():
    with pytest.raises(plugin.Violation):
        plugin.Table(fake_node.Table(64).fd, 128)


def test_ranges_follow_cells_tensors_pages_and_slots():
    # Two workers, two tensors each; group 0 fills both tensors, group 1 the head of the second tensor's pages.
    layouts = [plugin.Layout(rank, [100, 200], [[(0, 100), (1, 200)], [(1, 50)]]) for rank in (0, 1)]
    whole, part = plugin.covered_ranges(layouts, 2, cell=600, blocks_per_row=2, row_bytes=4096)
    assert whole == [[0, 1200]]
    assert part == [[200, 50], [400, 50], [800, 50], [1000, 50]]


def test_a_layout_that_leaves_its_cell_is_refused():
    with pytest.raises(ValueError):
        plugin.covered_ranges([plugin.Layout(0, [100, 200], [[(0, 100)]])], 1, 250, 1, 4096)
    with pytest.raises(ValueError):
        plugin.covered_ranges([plugin.Layout(0, [100], [[(0, 100)], []])], 1, 100, 1, 4096)


# -- plans --


def plan(groups, have, blocks=20, start=0, limit=None, most=1000):
    chain = {g.number: keys_of("p", blocks * UNIT // g.tokens, g.number) for g in groups}
    held = {chain[n][i] for n, indices in have.items() for i in indices if i < len(chain[n])}
    limit = blocks * UNIT if limit is None else limit
    end, needed = plugin.plan_hit(groups, chain, start, limit, most, held.__contains__)
    index = {key: (n, i) for n in chain for i, key in enumerate(chain[n])}
    return end, sorted(index[key] for _, key in needed)


ATTENTION = plugin.Group(0, UNIT)
STATE = plugin.Group(1, UNIT, window=1, aligned=True, kind="mamba")


def test_an_attention_hit_is_the_longest_whole_prefix():
    assert plan([ATTENTION], {0: range(5)}) == (80, [(0, i) for i in range(5)])
    assert plan([ATTENTION], {0: [0, 1, 3, 4]}) == (32, [(0, 0), (0, 1)])
    assert plan([ATTENTION], {0: [1, 2]}) == (0, [])


def test_a_hit_begins_where_the_device_ends():
    assert plan([ATTENTION], {0: [3, 4]}, start=48) == (80, [(0, 3), (0, 4)])


def test_a_hit_is_cut_to_the_rows_it_may_use():
    assert plan([ATTENTION], {0: range(20)}, most=7) == (112, [(0, i) for i in range(7)])
    assert plan([ATTENTION], {0: range(20)}, most=0) == (0, [])


def test_a_hybrid_hit_ends_where_there_is_a_state_and_needs_no_other():
    have = {0: range(10), 1: [2, 6, 15]}
    assert plan([ATTENTION, STATE], have) == (112, [(0, i) for i in range(7)] + [(1, 6)])


def test_a_hybrid_hit_that_must_be_cut_falls_to_an_earlier_state():
    have = {0: range(10), 1: [2, 6]}
    assert plan([ATTENTION, STATE], have, most=5) == (48, [(0, 0), (0, 1), (0, 2), (1, 2)])
    assert plan([ATTENTION, STATE], have, most=3) == (0, [])


def test_with_a_window_the_last_token_is_computed_again():
    assert plan([ATTENTION, STATE], {0: range(20), 1: range(20)}, blocks=20, limit=320)[0] == 304


def test_a_sliding_window_needs_its_window_only():
    sliding = plugin.Group(1, UNIT, window=2)
    end, rows = plan([ATTENTION, sliding], {0: range(10), 1: [4, 5, 8]})
    assert end == 96
    assert [r for r in rows if r[0] == 1] == [(1, 4), (1, 5)]


def test_groups_of_different_block_sizes_meet_at_a_common_boundary():
    coarse = plugin.Group(1, 4 * UNIT, window=1, aligned=True)
    end, rows = plan([ATTENTION, coarse], {0: range(19), 1: [2, 3]})
    assert end == 256
    assert [r for r in rows if r[0] == 1] == [(1, 3)]


def test_a_drafters_group_gets_the_chunk_that_vllm_drops():
    draft = plugin.Group(1, UNIT, draft=True)
    end, rows = plan([ATTENTION, draft], {0: range(8), 1: range(8)})
    assert end == 112
    assert [r for r in rows if r[0] == 1] == [(1, i) for i in range(8)]


def test_plans_agree_with_a_search_of_all_boundaries():
    dice = random.Random(3)
    for _ in range(400):
        groups = [ATTENTION, plugin.Group(1, UNIT * dice.choice((1, 2)), window=dice.choice((1, 2)), aligned=True)]
        have = {g.number: {i for i in range(20) if dice.random() < 0.8} for g in groups}
        start, most = dice.choice((0, 32)), dice.choice((3, 6, 1000))
        end, rows = plan(groups, have, start=start, most=most)
        best = start
        for boundary in range(start + UNIT, 320, UNIT):
            if boundary % groups[1].tokens:
                continue
            need = {(0, i) for i in range(start // UNIT, boundary // UNIT)}
            last = boundary // groups[1].tokens
            need |= {(1, i) for i in range(max(start // groups[1].tokens, last - groups[1].window), last)}
            if len(need) <= most and all(i in have[n] for n, i in need):
                best, wanted = boundary, sorted(need)
        assert end == best
        assert rows == (wanted if best > start else [])
