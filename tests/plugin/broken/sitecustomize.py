"""First in PYTHONPATH of an engine, this puts a broken plugin in the real one's place: see ../mutant_tier.py.

Python imports `sitecustomize` at the start of every process. The hook waits for `spark_kv_tier`, lets the real file run,
and then exchanges the one class by which vLLM reaches the worker.
"""

import importlib.machinery
import os
import sys

PLUGIN = "spark_kv_tier"


class Exchange(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        import mutant_tier

        module.SparkKvSpec = mutant_tier.SparkKvSpec


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != PLUGIN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Exchange(name, spec.origin)
        return spec


if os.environ.get("SPARK_KV_MUTANT"):
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
    sys.meta_path.insert(0, Finder)
