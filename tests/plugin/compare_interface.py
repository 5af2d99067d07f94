#!/usr/bin/env python3
"""Says whether an unpacked vLLM still has what the plugin relies on.

    compare_interface.py VLLM_PACKAGE [OTHER_VLLM_PACKAGE]

A package is the folder `vllm` of an installation or of an unpacked wheel; nothing of it is run. With one package, its
own names are checked. With two, differences of the signatures between them are listed as well. Status 1 when a name is
missing or when an argument that the plugin passes is.
"""

import argparse
import ast
import pathlib
import sys

OFFLOAD = "v1/kv_offload"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1"

# file, class, method or None, arguments that the plugin passes or overrides with.
USED = [
    (f"{OFFLOAD}/tiering/base.py", "SecondaryTierManager", "__init__", ["offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"]),
    *[
        (f"{OFFLOAD}/tiering/base.py", "SecondaryTierManager", name, arguments)
        for name, arguments in {
            "lookup": ["key", "req_context"],
            "submit_store": ["job_metadata"],
            "submit_load": ["job_metadata"],
            "get_finished_jobs": [],
            "has_pending_work": [],
            "on_new_request": ["req_context"],
            "on_request_finished": ["req_context"],
            "on_schedule_end": ["context"],
            "drain_jobs": [],
            "shutdown": [],
        }.items()
    ],
    (f"{OFFLOAD}/tiering/base.py", "JobResult", None, ["job_id", "success", "successful_keys", "transfer_time"]),
    (f"{OFFLOAD}/tiering/base.py", "TransferJob", None, ["job_id", "keys", "chunk_ids", "req_context"]),
    (f"{OFFLOAD}/base.py", "ReqContext", None, ["req_id", "kv_transfer_params", "_offload_key_positions"]),
    (f"{OFFLOAD}/base.py", "ReqContext", "get_offload_key_position", ["key"]),
    (f"{OFFLOAD}/base.py", "RequestOffloadingContext", None, ["policy"]),
    (f"{OFFLOAD}/base.py", "OffloadPolicy", None, ["CHUNK_LEVEL", "REQUEST_LEVEL"]),
    (f"{OFFLOAD}/base.py", "LookupResult", None, ["MISS", "HIT", "HIT_PENDING", "RETRY"]),
    (f"{OFFLOAD}/base.py", "TransferResult", None, ["job_id", "success", "transfer_size", "transfer_time"]),
    (f"{OFFLOAD}/base.py", None, "make_offload_key", ["block_hash", "group_idx"]),
    (f"{OFFLOAD}/base.py", "OffloadingWorker", "submit_store", ["job_id", "src_spec", "dst_spec"]),
    (f"{OFFLOAD}/base.py", "OffloadingWorker", "submit_load", ["job_id", "src_spec", "dst_spec"]),
    (f"{OFFLOAD}/base.py", "OffloadingWorker", "get_finished", []),
    (f"{OFFLOAD}/base.py", "OffloadingWorker", "wait", ["job_ids"]),
    (f"{OFFLOAD}/base.py", "CanonicalKVCacheTensor", None, ["tensor", "page_size_bytes"]),
    (f"{OFFLOAD}/base.py", "CanonicalKVCacheRef", None, ["tensor_idx", "page_size_bytes"]),
    (f"{OFFLOAD}/base.py", "CanonicalKVCaches", None, ["tensors", "group_data_refs"]),
    (f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager", "lookup", ["key", "req_context"]),
    (f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager", "prepare_load", ["keys", "req_context"]),
    (f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager", "complete_load", ["keys", "req_context"]),
    (f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager", "reset_cache", []),
    (f"{OFFLOAD}/tiering/manager.py", "TieringOffloadingManager", "_process_finished_jobs", []),
    (f"{OFFLOAD}/tiering/manager.py", "CPUPrimaryTierOffloadingManager", "prepare_read", ["keys", "req_context"]),
    (f"{OFFLOAD}/cpu/manager.py", "CPUOffloadingManager", "lookup", ["key", "req_context"]),
    (f"{OFFLOAD}/cpu/manager.py", "CPUOffloadingManager", "complete_load", ["keys", "req_context"]),
    (f"{OFFLOAD}/cpu/shared_offload_region.py", "SharedOffloadRegion", "__init__", ["engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"]),
    (f"{OFFLOAD}/cpu/shared_offload_region.py", "SharedOffloadRegion", "create_next_worker_view", ["tensor_page_size"]),
    (f"{OFFLOAD}/tiering/spec.py", "TieringOffloadingSpec", "__init__", ["config"]),
    (f"{OFFLOAD}/tiering/spec.py", "TieringOffloadingSpec", "get_manager", []),
    (f"{OFFLOAD}/cpu/spec.py", "CPUOffloadingSpec", "get_worker", ["kv_caches"]),
    (f"{OFFLOAD}/config.py", "OffloadingConfig", None, ["groups", "engine_id", "model", "cache", "parallel", "kv_cache_layout"]),
    (f"{OFFLOAD}/config.py", "OffloadingGroupConfig", None, ["tokens_per_block", "group_id"]),
    (f"{OFFLOAD}/config.py", "OffloadingCacheConfig", None, ["tokens_per_hash"]),
    (f"{OFFLOAD}/config.py", "OffloadingParallelConfig", None, ["rank", "tp_size", "pp_size", "pcp_size", "dcp_size"]),
    (f"{CONNECTOR}/offloading/scheduler.py", "GroupOffloadConfig", None, ["sliding_window_size_in_chunks", "is_eagle_group", "tokens_per_block"]),
    (f"{CONNECTOR}/offloading/scheduler.py", "SchedulerOffloadConfig", None, ["kv_group_configs", "supports_partial_tail"]),
    (f"{CONNECTOR}/offloading_connector.py", "OffloadingConnector", "__init__", ["vllm_config", "role", "kv_cache_config"]),
    (f"{CONNECTOR}/offloading_connector.py", "OffloadingConnector", "get_num_new_matched_tokens", ["request", "num_computed_tokens"]),
    (f"{CONNECTOR}/offloading_connector.py", "OffloadingConnector", "update_state_after_alloc", ["request", "blocks", "num_external_tokens"]),
    (f"{CONNECTOR}/base.py", "KVConnectorBase_V1", "get_handshake_metadata", []),
    (f"{CONNECTOR}/base.py", "KVConnectorBase_V1", "set_xfer_handshake_metadata_pp_aware", ["metadata"]),
    ("v1/kv_cache_interface.py", None, "get_kv_cache_spec_kind", ["kv_cache_spec"]),
    ("v1/metrics/stats.py", "PrefillStats", None, ["num_local_cached_tokens"]),
]

# Attributes that no signature shows: (file, text that must occur).
TEXTS = [
    (f"{OFFLOAD}/tiering/spec.py", "self._scheduler_mmap"),
    (f"{OFFLOAD}/tiering/spec.py", "self._engine_id"),
    (f"{OFFLOAD}/tiering/manager.py", "self.primary_tier"),
    (f"{OFFLOAD}/tiering/manager.py", "self.secondary_tiers"),
    (f"{OFFLOAD}/tiering/manager.py", "complete_read"),
    (f"{OFFLOAD}/cpu/gpu_worker.py", "self._mmap_region"),
    (f"{OFFLOAD}/cpu/shared_offload_region.py", "self._creator"),
    (f"{OFFLOAD}/cpu/spec.py", "self.cpu_page_size_per_worker"),
    (f"{OFFLOAD}/cpu/spec.py", "self.kv_bytes_per_chunk"),
    ("v1/request.py", "self.prefill_stats"),
    ("v1/request.py", "self.block_hashes"),
    ("v1/request.py", "skip_reading_prefix_cache"),
]


def find(package: pathlib.Path, file: str, cls: str | None, name: str | None):
    """The arguments of a function, or the fields of a class; None when there is no such thing."""
    path = package / file
    if not path.exists():
        return None
    body = ast.parse(path.read_text()).body
    if cls is not None:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == cls), None)
        if body is None:
            return None
        if name is None:
            return [
                t.id
                for n in body
                for t in (n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else [])
                if isinstance(t, ast.Name)
            ]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            a = node.args
            names = [x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs] if x.arg != "self"]
            return names + (["*"] if a.vararg else []) + (["**"] if a.kwarg else [])
    return None


def check(package: pathlib.Path) -> list[str]:
    wrong = []
    for file, cls, name, needed in USED:
        label = f"{file}: {'.'.join(filter(None, (cls, name)))}"
        found = find(package, file, cls, name)
        if found is None:
            wrong.append(f"{label} is not there")
        elif missing := [n for n in needed if n not in found and "**" not in found]:
            wrong.append(f"{label} has no {', '.join(missing)} (it has {', '.join(found)})")
    for file, text in TEXTS:
        path = package / file
        if not path.exists() or text not in path.read_text():
            wrong.append(f"{file}: nothing reads {text!r}")
    return wrong


def abstract(package: pathlib.Path) -> dict[str, set[str]]:
    """Abstract methods of the classes that the plugin derives from."""
    out = {}
    for file, cls in ((f"{OFFLOAD}/tiering/base.py", "SecondaryTierManager"), (f"{OFFLOAD}/base.py", "OffloadingWorker")):
        tree = ast.parse((package / file).read_text()).body
        body = next((n.body for n in tree if isinstance(n, ast.ClassDef) and n.name == cls), [])
        out[cls] = {
            n.name for n in body if isinstance(n, ast.FunctionDef) and any("abstractmethod" in ast.dump(d) for d in n.decorator_list)
        }
    return out


KNOWN_ABSTRACT = {
    "SecondaryTierManager": {"lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs"},
    "OffloadingWorker": {"submit_store", "submit_load", "get_finished", "wait"},
}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("package", type=pathlib.Path)
    arguments.add_argument("other", type=pathlib.Path, nargs="?")
    a = arguments.parse_args()
    bad = False
    for package in filter(None, (a.package, a.other)):
        wrong = check(package)
        for cls, names in abstract(package).items():
            wrong += [f"{cls}.{n} is abstract now" for n in sorted(names - KNOWN_ABSTRACT[cls])]
        bad |= bool(wrong)
        print(f"{package}: {'all there' if not wrong else ''}")
        for line in wrong:
            print("  " + line)
    if a.other:
        print("differences of signatures:")
        for file, cls, name, _ in USED:
            old, new = find(a.package, file, cls, name), find(a.other, file, cls, name)
            if old != new:
                print(f"  {file}: {'.'.join(filter(None, (cls, name)))}: {old} -> {new}")
    sys.exit(bad)


if __name__ == "__main__":
    main()
