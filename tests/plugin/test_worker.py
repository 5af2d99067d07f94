"""The CPU platform's worker against vLLM's rules for which block goes where, and each mutant against the sound one."""

import importlib
import itertools
import os

import pytest
import spark_kv_tier as plugin
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

PAGE, BLOCKS, ROWS = 64, 12, 8
_numbers = itertools.count()


def caches(fill=True):
    """Two tensors; group 0 fills both whole, group 1 the first half of each page of the first."""
    tensors = []
    for t in range(2):
        data = torch.zeros((BLOCKS, PAGE), dtype=torch.int8)
        if fill:
            data += (torch.arange(BLOCKS * PAGE).view(BLOCKS, PAGE) % 97 + 1 + 7 * t).to(torch.int8)
        tensors.append(CanonicalKVCacheTensor(data, PAGE))
    refs = [[CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE)], [CanonicalKVCacheRef(0, PAGE // 2)]]
    return CanonicalKVCaches(tensors, refs)


@pytest.fixture
def region():
    opened = []

    def build(per_row=1, rank=0, ranks=1, name=None):
        name = name or f"worker-test-{os.getpid()}-{next(_numbers)}"
        opened.append(SharedOffloadRegion(name, ROWS, rank, 4096, 2 * PAGE * per_row))
        return opened[-1], name

    yield build
    for r in opened:
        r.cleanup()


def moved(worker, spec, row_spec, to_rows, job=1):
    (worker.submit_store if to_rows else worker.submit_load)(job, *((spec, row_spec) if to_rows else (row_spec, spec)))
    for _ in range(20):
        for result in worker.get_finished():
            assert result.success and result.job_id == job


def there_and_back(make, blocks=(3, 5, 9, 2), rows=(1, 4, 6, 2), sizes=(3, 1), first=(0, 0)):
    """Stores blocks, wipes the device, loads them back; what differs, as (tensor, block)."""
    kept, device = caches(), caches()
    worker = make(device)
    gpu, cpu = GPULoadStoreSpec(list(blocks), sizes, first), CPULoadStoreSpec(list(rows))
    moved(worker, gpu, cpu, True)
    for t in device.tensors:
        t.tensor.zero_()
    moved(worker, gpu, cpu, False, 2)
    at, wrong = 0, []
    for group, size in enumerate(sizes):
        for block in blocks[at : at + size]:
            for ref in kept.group_data_refs[group]:
                n = ref.page_size_bytes
                same = torch.equal(
                    kept.tensors[ref.tensor_idx].tensor[block, :n], device.tensors[ref.tensor_idx].tensor[block, :n]
                )
                if not same:
                    wrong.append((ref.tensor_idx, block))
        at += size
    worker.rows = worker.device = []
    return wrong


def test_blocks_come_back_as_they_were(region):
    assert there_and_back(lambda kv: plugin.CpuWorker(kv, 1, region()[0])) == []


def test_blocks_that_share_a_row_and_start_in_its_middle_come_back(region):
    wrong = there_and_back(
        lambda kv: plugin.CpuWorker(kv, 2, region(per_row=2)[0]), (3, 5, 9, 2), (1, 4, 6), sizes=(3, 1), first=(1, 0)
    )
    assert wrong == []


def test_a_store_writes_what_the_layout_says_and_nothing_else(region):
    area, _ = region(per_row=2)
    kv = caches()
    layout = plugin.layout_of(kv, 0)
    whole, part = plugin.covered_ranges([layout], 2, 2 * PAGE * 2, 2, 4096)
    worker = plugin.CpuWorker(kv, 2, area)
    area.base_tensor.zero_()
    moved(worker, GPULoadStoreSpec([3, 5, 9, 2], (2, 2), (0, 0)), CPULoadStoreSpec([1, 4]), True)

    def written(row):
        return {int(i) for i in torch.nonzero(area.base_tensor.view(ROWS, 4096)[row])}

    def spread(ranges):
        return {i for at, n in ranges for i in range(at, at + n)}

    assert written(1) == spread(whole)
    assert written(4) == spread(part)
    assert not written(0) and not written(2)
    worker.rows = worker.device = []


def test_ranks_write_into_their_own_cells(region):
    area, name = region(rank=0, ranks=2)
    other, _ = region(rank=1, ranks=2, name=name)
    area.base_tensor.zero_()
    workers = [plugin.CpuWorker(caches(), 1, r) for r in (area, other)]
    moved(workers[1], GPULoadStoreSpec([3], (1, 0), (0, 0)), CPULoadStoreSpec([0]), True)
    row = area.base_tensor.view(ROWS, 4096)[0]
    assert not row[: 2 * PAGE].any() and row[2 * PAGE : 4 * PAGE].all()
    for w in workers:
        w.rows = w.device = []
    del row


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.setenv("SPARK_KV_MUTANT", "StaleRow")
    return importlib.import_module("mutant_tier").MUTANTS


@pytest.mark.parametrize("name", ["PageDropped", "ShiftByOne", "WrongGroup", "StaleRow"])
def test_a_mutant_moves_bytes_wrongly(region, mutants, name):
    assert there_and_back(lambda kv: mutants[name](kv, 1, region()[0])) != []


def test_the_early_capture_takes_what_came_after(region, mutants):
    kv = caches()
    worker = mutants["CaptureEarly"](kv, 1, region()[0])
    gpu, cpu = GPULoadStoreSpec([3], (1, 0), (0, 0)), CPULoadStoreSpec([1])
    worker.submit_store(1, gpu, cpu)
    assert [r.job_id for r in worker.get_finished()] == [1]
    assert not worker.rows[0][1].any()
    kv.tensors[0].tensor.fill_(5)
    for _ in range(20):
        worker.get_finished()
    assert (worker.rows[0][1] == 5).all()
    worker.rows = worker.device = []


def test_the_wrong_rank_is_the_neighbours(region, mutants):
    area, name = region(rank=0, ranks=2)
    other, _ = region(rank=1, ranks=2, name=name)
    area.base_tensor.zero_()
    worker = mutants["WrongRank"](caches(), 1, area, 2 * PAGE, 2)
    gpu, cpu = GPULoadStoreSpec([3], (1, 0), (0, 0)), CPULoadStoreSpec([1])
    moved(worker, gpu, cpu, True)
    moved(worker, gpu, cpu, False, 2)
    assert not worker.device[0][3].any()
    worker.rows = worker.device = worker.own = worker.other = []


def test_an_unknown_mutant_is_refused(monkeypatch, mutants):
    monkeypatch.setenv("SPARK_KV_MUTANT", "None")
    with pytest.raises(ImportError):
        importlib.reload(importlib.import_module("mutant_tier"))
