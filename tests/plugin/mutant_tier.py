"""The plugin with one step broken, in place of `spark_kv_tier`, so that end-to-end tests can show that they would see it.

SPARK_KV_MUTANT names the step; without it, or with an unknown name, loading fails. Every mutant is in the moving of
bytes, where no protocol and no checksum sees anything wrong: only the canary and the text of an answer can.

| name | what is broken | where it shows |
| --- | --- | --- |
| CaptureEarly | a store says that it is done before it has copied; it copies some steps later | any model |
| PageDropped | the last page of each block is not copied into its row | any model |
| ShiftByOne | every second block goes into its neighbour's row | any model, stores of two blocks and more |
| WrongGroup | a block is copied with another group's layers | models of two groups |
| StaleRow | every second row keeps what was in it | any model |
| WrongRank | a load reads the neighbour rank's cell of the row | two workers and more |
"""

import os

import spark_kv_tier
from spark_kv_tier import *  # noqa: F403
from spark_kv_tier import CpuWorker, SparkKvConnector, SparkKvSpec, SparkKvTier  # noqa: F401


class CaptureEarly(CpuWorker):
    LATE = 8

    def __init__(self, *args):
        super().__init__(*args)
        self.late = []

    def submit_store(self, job_id, src_spec, dst_spec, **_):
        self.late.append([self.LATE, src_spec, dst_spec])
        self.done.append(spark_kv_tier.TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self):
        for entry in self.late:
            entry[0] -= 1
        for _, source, target in [e for e in self.late if e[0] <= 0]:
            self.copy(source, target, True)
        self.late = [e for e in self.late if e[0] > 0]
        return super().get_finished()


class PageDropped(CpuWorker):
    def copy_page(self, group, ref, block, row, slot, to_rows):
        if to_rows and ref is self.refs[group][-1]:
            return 0
        return super().copy_page(group, ref, block, row, slot, to_rows)


class ShiftByOne(CpuWorker):
    """Every second block of a store lands on its neighbour, whose own is lost, and its row keeps what was in it.
    (Blocks that only change places among themselves do no harm: attention sums over all of them, and each carries its
    own positions.)"""

    def moves(self, device_spec, row_spec):
        moves = list(super().moves(device_spec, row_spec))
        for at, (group, block, row, slot) in enumerate(moves):
            if at % 2 == 0 and at + 1 < len(moves):
                yield group, block, moves[at + 1][2], slot
            elif at == len(moves) - 1 and at % 2 == 0:
                yield group, block, row, slot

    def copy(self, device_spec, row_spec, to_rows):
        if to_rows:
            return super().copy(device_spec, row_spec, to_rows)
        self.moves = super().moves
        try:
            return super().copy(device_spec, row_spec, to_rows)
        finally:
            del self.moves


class WrongGroup(CpuWorker):
    def copy(self, device_spec, row_spec, to_rows):
        refs = self.refs
        if to_rows:
            self.refs = refs[1:] + refs[:1]
        try:
            return super().copy(device_spec, row_spec, to_rows)
        finally:
            self.refs = refs


class StaleRow(CpuWorker):
    stale = False

    def copy_page(self, group, ref, block, row, slot, to_rows):
        if to_rows and ref is self.refs[group][0]:
            self.stale = not self.stale
        if to_rows and self.stale:
            return 0
        return super().copy_page(group, ref, block, row, slot, to_rows)


class WrongRank(CpuWorker):
    """Every rank stores into its own cell and loads from the next one's."""

    def __init__(self, kv_caches, blocks_per_chunk, region, cell=0, ranks=1):
        super().__init__(kv_caches, blocks_per_chunk, region)
        self.own = self.rows
        base = region.base_tensor
        self.other = []
        for view in self.rows:
            offset = (view.storage_offset() + cell) % (cell * ranks) if cell else view.storage_offset()
            self.other.append(base.as_strided(view.size(), view.stride(), offset))

    def copy(self, device_spec, row_spec, to_rows):
        self.rows = self.own if to_rows else self.other
        try:
            return super().copy(device_spec, row_spec, to_rows)
        finally:
            self.rows = self.own

    def shutdown(self):
        self.own, self.other = [], []
        super().shutdown()


MUTANTS = {m.__name__: m for m in (CaptureEarly, PageDropped, ShiftByOne, WrongGroup, StaleRow, WrongRank)}
MUTANT = os.environ.get("SPARK_KV_MUTANT", "")
if MUTANT not in MUTANTS:
    raise ImportError(f"SPARK_KV_MUTANT is {MUTANT!r}: it must be one of {', '.join(MUTANTS)}")


class SparkKvSpec(spark_kv_tier.SparkKvSpec):  # noqa: F811
    def make_cpu_worker(self, kv_caches, region):
        if MUTANT == "WrongRank":
            return WrongRank(kv_caches, self.blocks_per_chunk, region, self.cpu_page_size_per_worker, self.config.parallel.world_size)
        return MUTANTS[MUTANT](kv_caches, self.blocks_per_chunk, region)
