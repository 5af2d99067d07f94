#!/usr/bin/env python3
"""The demo's second half: starts two nodes, plays three conversations, restarts an engine, prints one table.

Needs nothing but Python's own library. Called by demo.sh.
"""
import argparse
import http.client
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

WORDS = ("river stone lantern copper window garden signal harbour meadow thunder paper silver orchard compass "
         "ember valley mirror anchor saddle canyon whistle marble prairie beacon").split()
SOURCES = ["device", "staging", "drive", "peer", "computed"]


def say(text):
    print(f"== {int(time.monotonic() - BEGIN) // 60}:{int(time.monotonic() - BEGIN) % 60:02d} {text}", flush=True)


class Node:
    """`spark-kv up` in a folder of its own."""

    def __init__(self, binary, model, folder, name, port, join=None):
        self.name, self.port, self.root = name, port, folder / name
        self.root.mkdir(parents=True)
        self.log = open(self.root / "up.log", "wb")
        env = dict(os.environ, **({"SPARK_KV_JOIN": join} if join else {}))
        self.process = subprocess.Popen(
            [binary, "up", "--profile", "cpu-tiny", "--root", self.root, "--name", name, "--port-base", str(port),
             "--set", f"engine.model={model}", "--set", f"engine.served_name={MODEL}"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=env, start_new_session=True)

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ready(self):
        """Serves by its own engine, and the cache of that engine has been judged."""
        try:
            code, health = self.get("/healthz")
            own = code == 200 and health["checks"]["engine"]["ok"]
            return own and self.get("/api/v1/state")[1]["node"]["cache"]["on"] is not None
        except (OSError, ValueError):
            return False

    def engine(self):
        try:
            return json.loads((self.root / "run/engine.json").read_text())
        except (OSError, ValueError):
            return {}

    def wait(self, what, look, limit=420):
        begin = last = time.monotonic()
        while True:
            found = look()
            if found:
                return found
            now = time.monotonic()
            if self.process.poll() is not None:
                fail(f"{self.name} ended with code {self.process.returncode} while waiting for {what}", self)
            if now - begin > limit:
                fail(f"{self.name}: no {what} after {limit} s", self)
            if now - last > 20:
                say(f"  {self.name}: waiting for {what} ({int(now - begin)} s)")
                last = now
            time.sleep(0.2)

    def invitation(self):
        try:
            return (self.root / "run/invite").read_text().strip()
        except OSError:
            return ""

    def ask(self, prompt, tokens=16):
        """One streamed completion on this node. Seconds to the first token, text, prompt tokens, tokens by source."""
        global asked
        asked += 1
        # Both engines share this machine's cores, and an engine's threads spin a while after their work is done. Two
        # boxes do not share cores: each answer is measured with the other engine at rest.
        time.sleep(REST)
        request = f"demo{os.getpid()}x{asked}"
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
                           "ignore_eos": True, "stream_options": {"include_usage": True}})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        begin, first, text, usage = time.monotonic(), None, "", {}
        connection.request("POST", "/v1/completions", body, {
            "content-type": "application/json", "x-request-id": request, "x-spark-box": self.name})
        answer = connection.getresponse()
        if answer.status != 200:
            fail(f"{self.name} answered {answer.status}: {answer.read()[:400]!r}", self)
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                fail(f"{self.name}: {event['error']}", self)
            if event.get("choices"):
                first = first or time.monotonic()
                text += event["choices"][0]["text"]
            usage = event.get("usage") or usage
        connection.close()
        entry = self.wait(f"the ledger's entry of {request}", lambda: self.sources(request), 30)
        return {"ttft": first - begin, "text": text, "prompt": usage["prompt_tokens"], "sources": entry}

    def sources(self, request):
        status, entry = self.get(f"/api/v1/requests/{request}")
        return entry.get("sources") if status == 200 else None

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                return False
        return True


def fail(text, node=None):
    print(f"demo: {text}", file=sys.stderr)
    if node:
        for name in ("up.log", "log/engine.log"):
            try:
                lines = (node.root / name).read_text(errors="replace").splitlines()[-30:]
            except OSError:
                continue
            print(f"---- {node.root / name}", *lines, sep="\n", file=sys.stderr)
    raise SystemExit(1)


def paragraph(seed, words):
    out, dice = [f"Note {seed}:"], seed * 2654435761 | 1
    for _ in range(words):
        dice = (dice * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(WORDS[(dice >> 33) % len(WORDS)])
    return " ".join(out) + ".\n"


def expect(node, answer, source, minimum):
    """The prompt's tokens must have come from `source`, at least this share of them."""
    share = answer["sources"][source] / answer["prompt"]
    if share < minimum:
        fail(f"{node.name}: only {share:.0%} of {answer['prompt']} prompt tokens came from {source}: {answer['sources']}", node)
    total = sum(answer["sources"][name] for name in SOURCES)
    if total != answer["prompt"]:
        fail(f"{node.name}: sources add up to {total}, the prompt has {answer['prompt']} tokens: {answer['sources']}", node)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--binary", required=True, type=lambda p: pathlib.Path(p).resolve())
    arguments.add_argument("--model", required=True, type=lambda p: pathlib.Path(p).resolve())
    arguments.add_argument("--folder", required=True, type=pathlib.Path)
    arguments.add_argument("--port", type=int, default=8100)
    arguments.add_argument("--words", type=int, default=2100, help="words of a conversation's first turn")
    arguments.add_argument("--keep", action="store_true")
    a = arguments.parse_args()

    nodes = []
    try:
        say("starting node a (vLLM takes a minute on two cores)")
        first = Node(a.binary, a.model, a.folder, "a", a.port)
        nodes.append(first)
        first.wait("ready", first.ready)
        token = first.wait("an invitation", first.invitation)
        say("starting node b, which joins a")
        second = Node(a.binary, a.model, a.folder, "b", a.port + 10, token)
        nodes.append(second)
        second.wait("ready", second.ready)
        second.wait("its peer", lambda: any(p["connected"] for p in second.get("/api/v1/state")[1]["peers"]))
        play(a, first, second)
    except BaseException:
        a.keep = False
        raise
    finally:
        if a.keep and nodes:
            say(f"both nodes run: http://127.0.0.1:{a.port}/ and http://127.0.0.1:{a.port + 10}/")
            say(f"stop them with: kill {' '.join(str(n.process.pid) for n in nodes)}; then remove {a.folder}")
        else:
            say("stopping both nodes")
            clean = [n.stop() for n in reversed(nodes)]
            if not all(clean):
                fail("a node did not stop within a minute")
            left = [p for p in pathlib.Path("/dev/shm").glob("vllm_offload_spark-[ab]-*")]
            if left:
                fail(f"left behind in shared memory: {left}")


def play(a, first, second):
    # A fresh vLLM's first requests of a size cost seconds of their own, and so does its first load.
    for seed, node in ((98, first), (99, second), (98, second)):
        node.ask(paragraph(seed, a.words))
    rows = {name: [] for name in ("cold", "device", "drive", "peer")}

    say("three conversations of three growing turns on node a")
    conversations = []
    for seed in (1, 2, 3):
        prompt = paragraph(seed, a.words)
        answer = first.ask(prompt)
        expect(first, answer, "computed", 0.95)
        rows["cold"].append(answer)
        for turn in (1, 2):
            prompt += answer["text"] + paragraph(seed * 100 + turn, 40)
            answer = first.ask(prompt)
            if answer["sources"]["computed"] > 0.1 * answer["prompt"]:
                fail(f"turn {turn + 1} of conversation {seed} was computed again: {answer['sources']}", first)
        conversations.append((prompt, answer["text"]))
        say(f"  conversation {seed}: {answer['prompt']} tokens after three turns")

    again = {}  # answers out of the same engine's device, right after those that came from elsewhere

    def returning(node, source):
        again[source] = []
        for prompt, text in conversations:
            answer = node.ask(prompt)
            same(node, answer, text)
            expect(node, answer, source, 0.9)
            rows[source].append(answer)
            answer = node.ask(prompt)
            same(node, answer, text)
            expect(node, answer, "device", 0.9)
            rows["device"].append(answer)
            again[source].append(answer)

    say("each conversation comes back on node b: from node a's drive, then from b's device")
    returning(second, "peer")

    say("restarting node a's engine (SIGKILL to vLLM; the keeper starts a new one)")
    before = first.engine()
    os.kill(before["pid"], signal.SIGKILL)
    first.wait("a new engine", lambda: first.engine().get("engine_id") != before["engine_id"] and first.ready())
    for seed in (97, 98):
        first.ask(paragraph(seed, a.words))

    say("each conversation comes back on node a: from its own drive, then from its device")
    returning(first, "drive")

    def median(answers, of=lambda r: r["ttft"]):
        return statistics.median(of(r) for r in answers)

    cold = median(rows["cold"])
    names = {"cold": "cold: computed", "device": "device: vLLM's own cache", "drive": "own drive, after an engine restart",
             "peer": "other node, over TCP"}
    table = ["| prompt comes back from | prompt tokens | of them from there | time to first token | against cold |",
             "| --- | ---: | ---: | ---: | ---: |"]
    for name, answers in rows.items():
        source = "computed" if name == "cold" else name
        ttft = median(answers)
        prompt, there = median(answers, lambda r: r["prompt"]), median(answers, lambda r: r["sources"][source])
        table.append(f"| {names[name]} | {prompt:.0f} | {there:.0f} | {ttft:.2f} s | {cold / ttft:.1f}x |")
    print("", *table, "", sep="\n", flush=True)
    for name in ("drive", "peer"):
        ttft = median(rows[name])
        if cold / ttft < 5:
            fail(f"{name}: {cold / ttft:.1f} times sooner than cold, at least 5 are expected")
        # The same prompt, right after, out of the same engine's device: the tail that is computed is the same.
        pairs = [(load["ttft"], hit["ttft"]) for load, hit in zip(rows[name], again[name])]
        say(f"{name} beside device: " + ", ".join(f"{load:.2f} / {hit:.2f} s" for load, hit in pairs))
        if statistics.median(load / hit for load, hit in pairs) > 1.5:
            fail(f"{name}: more than 1.5 times as long to the first token as a device hit")


def same(node, answer, text):
    if answer["text"] != text:
        fail(f"{node.name}: the text differs:\n  {text!r}\n  {answer['text']!r}", node)


BEGIN, MODEL, REST, asked = time.monotonic(), "demo", 1.0, 0
if __name__ == "__main__":
    main()
