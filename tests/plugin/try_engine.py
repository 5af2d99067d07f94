#!/usr/bin/env python3
"""Shows the plugin in a real vLLM with the fake node: cold, from the device, and restored after the caches were dropped.

    try_engine.py VENV MODEL [--port 18301] [--tp 1] [--rows-mib 256] [--module spark_kv_tier] [--keep DIR]

Prints one line of JSON per request with time, hash of the text, tokens by source; ends with status 1 when a restored
text differs from the cold one. `--module mutant_tier` with SPARK_KV_MUTANT set shows a broken plugin instead.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PLUGIN = HERE.parents[1] / "src/engine/plugin"
KINDS = ("prompt", "device", "staging", "drive", "peer", "computed")


def post(url, body=None, timeout=300):
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"{}")


def prompt_of(name: str, words: int) -> str:
    stock = ["the", "function", "reads", "every", "line", "of", "the", "file", "and", "returns", "a", "list", "with",
             "the", "index", "of", "each", "match"]
    seed = hashlib.sha256(name.encode()).digest()
    # Each part says something of its own: in a prompt that repeats itself a lost block may not change the answer.
    own = [hashlib.sha256(f"{name} {i}".encode()).hexdigest()[:3] if i % 8 == 0 else "" for i in range(words)]
    return f"{name}: " + " ".join(own[i] + stock[(seed[i % 32] + i * 7 + i // 13) % len(stock)] for i in range(words))


class Engine:
    def __init__(self, a, socket_path, number):
        config = {
            "kv_connector": "SparkKvConnector",
            "kv_connector_module_path": a.module,
            "kv_role": "kv_both",
            "engine_id": f"spark-try{os.getpid()}-{number}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "SparkKvSpec",
                "spec_module_path": a.module,
                "cpu_bytes_to_use": a.rows_mib << 20,
                "offload_prompt_only": not a.replies,
                "secondary_tiers": [{"type": "SparkKvTier", "module_path": a.module, "socket": socket_path}],
            },
        }
        self.url = f"http://127.0.0.1:{a.port}"
        command = [f"{a.venv}/bin/vllm", "serve", a.model, "--host", "127.0.0.1", "--port", str(a.port),
                   "--served-model-name", "tiny", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "16384",
                   "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(a.device_mib << 20), "--enable-prefix-caching",
                   "--prefix-caching-hash-algo", "sha256_cbor", "--prefix-match-unit", "128",
                   "--enable-prompt-tokens-details", "--tensor-parallel-size", str(a.tp),
                   "--kv-transfer-config", json.dumps(config)]
        environment = os.environ | {
            "PYTHONPATH": f"{PLUGIN}:{HERE}", "PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0", "VLLM_CPU_OMP_THREADS_BIND": "0-1" if a.tp == 1 else "0|1",
        }
        print(json.dumps({"command": command}), file=sys.stderr)
        self.log = open(a.log, "a")
        self.child = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, start_new_session=True)

    def wait(self, limit=300):
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.child.poll() is not None:
                raise SystemExit(f"the engine ended with {self.child.returncode}: see the log")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.5)
        raise SystemExit("the engine did not start")

    def stop(self, how=signal.SIGTERM):
        if self.child.poll() is None:
            os.killpg(self.child.pid, how)
            try:
                self.child.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
        self.log.close()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("venv")
    arguments.add_argument("model")
    arguments.add_argument("--port", type=int, default=18301)
    arguments.add_argument("--tp", type=int, default=1)
    arguments.add_argument("--rows-mib", type=int, default=256)
    arguments.add_argument("--device-mib", type=int, default=256)
    arguments.add_argument("--budget", type=int, default=1 << 20)
    arguments.add_argument("--words", type=int, default=3500)
    arguments.add_argument("--module", default="spark_kv_tier")
    arguments.add_argument("--replies", action="store_true", help="store replies too")
    arguments.add_argument("--kill", action="store_true", help="end with a node that dies and comes back")
    arguments.add_argument("--short", action="store_true", help="cold, device and restored only")
    arguments.add_argument("--keep")
    arguments.add_argument("--log", default="/tmp/spark-kv-try-engine.log")
    a = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    here = tempfile.mkdtemp(prefix="spark-kv-try-")
    socket_path = f"{here}/engine.sock"
    flags = ["--budget", str(a.budget)] + (["--keep", a.keep] if a.keep else [])
    reports, heard = {}, threading.Condition()

    def listen(child):
        for line in child.stdout:
            said = json.loads(line)
            if "hello" in said:
                print(json.dumps(said), file=sys.stderr)
            if "report" in said:
                with heard:
                    reports[said["report"].split("-", 1)[1].rsplit("-", 1)[0]] = said
                    heard.notify_all()

    def start_node():
        child = subprocess.Popen([sys.executable, str(HERE / "fake_node.py"), socket_path, *flags],
                                 stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        threading.Thread(target=listen, args=[child], daemon=True).start()
        return child

    node = start_node()
    engine = Engine(a, socket_path, 1)
    good = True
    try:
        engine.wait()
        print(json.dumps({"shm": [f for f in os.listdir("/dev/shm") if f"spark-try{os.getpid()}-" in f]}))

        def ask(label, name, words, tokens=24, **more):
            request_id = f"{label}.{name}.{time.monotonic_ns()}"
            body = {"model": "tiny", "messages": [{"role": "user", "content": prompt_of(name, words)}],
                    "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": True, **more}
            began = time.monotonic()
            request = urllib.request.Request(engine.url + "/v1/chat/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json", "X-Request-Id": request_id})
            answer = json.loads(urllib.request.urlopen(request, timeout=600).read())
            took = time.monotonic() - began
            text = answer["choices"][0]["message"]["content"]
            usage = answer["usage"]
            with heard:
                heard.wait_for(lambda: request_id in reports, 10)
            sources = reports.get(request_id, {}).get("sources")
            line = {"what": label, "prompt": name, "s": round(took, 2), "text": hashlib.sha256(text.encode()).hexdigest()[:12],
                    "prompt_tokens": usage["prompt_tokens"],
                    "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                    "sources": sources, "chain": reports.get(request_id, {}).get("chain")}
            line["adds_up"] = sources is not None and sum(sources[k] for k in KINDS[1:]) == sources["prompt"] == usage["prompt_tokens"]
            print(json.dumps(line), flush=True)
            return line

        def reset():
            said = post(engine.url + "/reset_prefix_cache?reset_external=true")
            print(json.dumps({"reset": said}), flush=True)

        def more_of_it():
            nonlocal good, node
            post(engine.url + "/reset_prefix_cache")
            rows = ask("staging", "first", a.words)
            longer = ask("longer", "first", a.words)
            for other in (rows, longer):
                good &= (other["text"] == cold["text"] or other["cached"] < device["cached"]) and other["adds_up"]
            def ask_tokens(label, ids, **more):
                body = {"model": "tiny", "prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
                answer = post(engine.url + "/v1/completions", body)
                line = {"what": label, "text": hashlib.sha256(answer["choices"][0]["text"].encode()).hexdigest()[:12],
                        "cached": (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")}
                print(json.dumps(line), flush=True)
                return line

            # The same half of a prompt, once from the device and once from the node, and the rest computed in the same
            # pieces: the texts must be equal. (Against a cold text they need not be, which sums other pieces.)
            ids = post(engine.url + "/tokenize", {"model": "tiny", "prompt": prompt_of("halves", a.words)})["tokens"]
            part = min(len(ids) // 2, a.budget * 64) // 128 * 128
            ask_tokens("first half", ids[: part + 1])
            device_half = ask_tokens("half from the device", ids)
            reset()
            node_half = ask_tokens("half from the node", ids, kv_transfer_params={"max_load_tokens": part + 1})
            good &= device_half["text"] == node_half["text"] and device_half["cached"] == node_half["cached"] == part

            def at_once(label, **more):
                lines = []
                names = ("first", "second", "third")
                threads = [threading.Thread(target=lambda n=n: lines.append(ask(label, n, a.words, **more))) for n in names]
                for t in threads:
                    t.start()
                for t in threads:
                    t.join()
                assert len(lines) == 3
                return {line["prompt"]: line for line in lines}

            for label in ("at once", "at once restored"):
                reset()
                good &= all(line["adds_up"] for line in at_once(label).values())
            # Texts of several at once may differ from those of one alone, because the engine computes in batches: what
            # they are when nothing is loaded shows how much of a difference is that.
            reset()
            at_once("at once cold", kv_transfer_params={"max_load_tokens": 0})
            reset()
            good &= ask("restored", "first", a.words)["text"] == back["text"]
            if a.kill:
                node.kill()
                node.wait()
                reset()
                gone = ask("node gone", "first", a.words)
                good &= gone["text"] == cold["text"] and gone["cached"] == 0
                node = start_node()
                again = ask("node back", "first", a.words)
                good &= again["text"] == cold["text"]

        ask("warm up", "warm", 200)
        cold = ask("cold", "first", a.words)
        device = ask("device", "first", a.words)
        reset()
        back = ask("restored", "first", a.words)
        good &= device["text"] == cold["text"] and device["adds_up"]
        # A cut hit computes the rest in other pieces, which may change the text.
        good &= (back["text"] == cold["text"] or back["cached"] < device["cached"]) and back["adds_up"]
        if not a.short:
            more_of_it()
        print(json.dumps({"good": good}))
    finally:
        engine.stop()
        print(json.dumps({"shm": [f for f in os.listdir("/dev/shm") if f"spark-try{os.getpid()}-" in f]}))
        node.kill()
        node.wait()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
