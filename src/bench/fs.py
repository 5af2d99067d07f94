"""Drives the files tier that vLLM brings, for `spark-kv bench store`: its own code, its own threads, its own defaults.

One JSON command a line on stdin, one JSON answer a line on stdout. `begin` makes a row area like the one that vLLM
shares with its tiers, filled with bytes that no drive can shrink; `store` and `load` move every row of it once;
`clear` removes their files, `end` all of it. Rows are handed over in as many jobs as the tier has threads of one kind, so that all of them
have work; a tier job is one thread's work.
"""

import json
import mmap
import os
import shutil
import sys
import time
from types import SimpleNamespace

# What the tier logs must not stand between the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: E402

JOBS = 32


class Bed:
    def __init__(self, folder, row_bytes, rows):
        self.folder = folder
        self.rows = rows
        self.row_bytes = row_bytes
        self.area = mmap.mmap(-1, rows * row_bytes)
        words = np.frombuffer(self.area, dtype=np.uint64).reshape(rows, -1)
        random = np.random.default_rng(1)
        for row in range(rows):
            words[row] = random.integers(0, 1 << 63, words.shape[1], dtype=np.uint64)
        self.first = words[:, 0].copy()
        self.words = words
        view = memoryview(self.area).cast("B", (rows, row_bytes))
        group = SimpleNamespace(tokens_per_block=16, layer_names=("layer",), group_id=0)
        config = SimpleNamespace(
            groups=(group,),
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=SimpleNamespace(
                rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
            ),
            replicated_layout=False,
            canonical_layout=False,
            kv_cache_layout=None,
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self.tier = FileSystemTierManager(spec, view, "fs", root_dir=folder)
        digest = np.random.default_rng(2).bytes
        self.keys = [make_offload_key(digest(32), 0) for _ in range(rows)]

    def move(self, submit, promotion):
        context = ReqContext(req_id="bench")
        jobs = min(JOBS, self.rows)
        shares = np.array_split(np.arange(self.rows, dtype=np.int32), jobs)
        before, begin = os.times(), time.perf_counter()
        for number, share in enumerate(shares):
            keys = [self.keys[row] for row in share]
            submit(TransferJob(number, keys, share, promotion, context))
        self.tier.drain_jobs()
        seconds, after = time.perf_counter() - begin, os.times()
        results = list(self.tier.get_finished_jobs())
        if len(results) != jobs or not all(result.success for result in results):
            raise RuntimeError("a job of the tier failed")
        cpu = (after.user - before.user) + (after.system - before.system)
        return {"seconds": seconds, "cpu": cpu, "bytes": self.rows * self.row_bytes}

    def store(self):
        return self.move(self.tier.submit_store, False)

    def load(self):
        self.words[:, 0] = 0
        cost = self.move(self.tier.submit_load, True)
        if not (self.words[:, 0] == self.first).all():
            raise RuntimeError("the tier gave wrong bytes")
        return cost

    def clear(self):
        """Removes the rows' files: the tier does not write a row that it finds."""
        for key in self.keys:
            os.remove(self.tier.file_mapper.get_file_name(key))
        return {}

    def end(self):
        self.tier.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        return {}


def main():
    bed = None
    answer = {"ready": True}
    print(json.dumps(answer), file=ANSWERS, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "begin":
                bed = Bed(order["folder"], order["row_bytes"], order["rows"])
                answer = {}
            else:
                answer = getattr(bed, order["do"])()
        except Exception as error:  # Whatever it is, the other side decides what to make of it.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=ANSWERS, flush=True)


main()
