"""Records a real engine's cache events beside the requests that caused them, for the tests that replay them.

    record.py one_by_one|concurrent MODEL_DIR OUT.jsonl.gz --log FILE [--port N] [--adapter DIR --adapter DIR]

Starts vLLM itself, with a KV cache that holds little, plays the recording's sections, and stops it. Runs in the
engine's own venv, which has pyzmq. tests/data/vllm/events/README.md says what the lines mean; they stand in the order
in which this process sent requests and received batches. It computes no hash and predicts nothing.
"""

import argparse
import base64
import datetime
import gzip
import http.client
import importlib.metadata
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import mix
import zmq

BLOCK = 32
# 1 KiB a token, see tiny_model.py.
BLOCK_BYTES = BLOCK << 10
TOPIC = "kv-events"
START_TIMEOUT_S = 1200
REQUEST_TIMEOUT_S = 120
# Batches come over another socket than answers do. Nothing is sent while one may still be on its way.
SETTLE_S = 0.15

# Blocks of KV cache, batches that the engine keeps for replay, and flags beyond those that both have.
ENGINES = {
    "one_by_one": (192, 24, ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]),
    "concurrent": (256, 10_000, ["--max-num-batched-tokens", "1024"]),
}


class Engine:
    """One vLLM process after another, with the same flags."""

    def __init__(self, arguments):
        self.blocks, self.buffer, more = ENGINES[arguments.sections]
        self.port = arguments.port
        self.folder = arguments.model.resolve().parent
        self.log = arguments.log
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # Binds, on the loopback alone: without "::" or "*" the engine would connect.
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{self.port + 1}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.port + 2}",
            "topic": TOPIC,
            "buffer_steps": self.buffer,
        }
        adapters = [f"lora-{number}={path.name}" for number, path in enumerate(arguments.adapter, 1)]
        # Folders by their names, so that no path of this machine gets into the recording.
        self.flags = ["--model", arguments.model.name, "--served-model-name", "tiny", "--dtype", "float32"]
        self.flags += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
        self.flags += ["--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(self.blocks * BLOCK_BYTES)]
        self.flags += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *more]
        self.flags += ["--lora-modules", *adapters] if adapters else []
        self.events_flag = ["--kv-events-config", json.dumps(events)]
        self.process = None

    def start(self):
        environment = os.environ | {
            # One thread, unpinned: left alone, every engine would pin itself to the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # Has /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *self.flags, *self.events_flag]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                sys.exit(f"the engine did not start; see {self.log}")
            time.sleep(1)

    def kill(self):
        """Outright, with the processes that it started."""
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)

    def ask(self, method, path):
        connection = self.connect()
        try:
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if text else None
        finally:
            connection.close()


class Recorder:
    """The lines, in order, and whoever adds to them."""

    def __init__(self, engine, marks):
        self.engine = engine
        # Whether requests name themselves to the engine.
        self.marks = marks
        self.lock = threading.Lock()
        self.lines = []
        self.sent = 0
        # Batches still to be lost on purpose.
        self.to_lose = 0
        self.lost = []
        self.heard = time.monotonic()
        self.context = zmq.Context.instance()

    def add(self, line):
        with self.lock:
            self.lines.append(line)
        return line

    def listen(self):
        """Subscribes; a subscription takes a moment, in which nothing may be published."""
        socket = self.context.socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{self.engine.port + 1}")
        socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        threading.Thread(target=self.receive, args=[socket], daemon=True).start()
        time.sleep(1)

    def receive(self, socket):
        while True:
            frames = socket.recv_multipart()
            seq = int.from_bytes(frames[1], "big")
            with self.lock:
                self.heard = time.monotonic()
                if self.to_lose:
                    self.to_lose -= 1
                    self.lost.append(seq)
                    continue
                if self.lost:
                    # A consumer finds the gap when the next batch comes, and asks for what it missed.
                    self.lines.append({"lost": self.lost})
                    self.lines.append({"replay": self.lost[0], "frames": self.replayed(self.lost[0])})
                    self.lost = []
                self.lines.append({"batch": written(frames)})

    def replayed(self, seq):
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.engine.port + 2}")
        try:
            socket.send_multipart([b"", seq.to_bytes(8, "big")])
            found = []
            while True:
                frames = socket.recv_multipart()[1:]
                if frames[1] == b"\xff" * 8:
                    return found
                found.append(written(frames))
        finally:
            socket.close()

    def settle(self):
        while time.monotonic() - self.heard < SETTLE_S:
            time.sleep(0.01)
        time.sleep(SETTLE_S)

    def section(self, name):
        self.settle()
        self.add({"section": name})
        print(f"{name}: from line {len(self.lines)}", flush=True)

    def call(self, path):
        status, answer = self.engine.ask("POST", path)
        self.add({"call": path, "status": status, "answer": answer})
        return answer

    def play(self, step, leave_after=None):
        """One request, streamed, to its end, or until so many chunks have come. Returns its answer's text and ids."""
        body = dict(step.body, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        with self.lock:
            self.sent += 1
            number = self.sent
            line = {"sent": number, "model": body["model"], "salt": body.get("cache_salt"), "prompt": []}
            self.lines.append(line)
        headers = {"content-type": "application/json"}
        if self.marks:
            # Comes back in the events, which so say whose they are.
            headers["x-session-id"] = f"request-{number}"
        connection = self.engine.connect()
        try:
            connection.request("POST", step.path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                sys.exit(f"HTTP {response.status}: {response.read()[:300]}")
            return self.follow(response, line, leave_after)
        finally:
            connection.close()

    def follow(self, response, line, leave_after):
        text, ids, chunks, usage = "", [], 0, None
        for raw in response:
            if not raw.startswith(b"data:") or b"[DONE]" in raw:
                continue
            document = json.loads(raw[5:])
            if prompt := prompt_ids(document):
                line["prompt"] = prompt
            for choice in document["choices"]:
                text += (choice.get("delta") or choice).get("content") or choice.get("text") or ""
                if choice.get("token_ids"):
                    if not ids:
                        self.add({"first": line["sent"]})
                    ids += choice["token_ids"]
            usage = document.get("usage") or usage
            chunks += 1
            if leave_after and chunks >= leave_after:
                self.add({"left": line["sent"]})
                return text, ids
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        assert usage["prompt_tokens"] == len(line["prompt"])
        self.add({"answered": line["sent"], "cached_tokens": cached, "answer": ids})
        return text, ids


def written(frames):
    topic, seq, payload = frames
    return [topic.decode(), int.from_bytes(seq, "big"), base64.b64encode(payload).decode()]


def prompt_ids(document):
    first = [document, *document["choices"]]
    return next((part["prompt_token_ids"] for part in first if part.get("prompt_token_ids")), None)


class Conversation:
    """A chat that grows by what is answered."""

    def __init__(self, seed, sentences, system=None):
        self.chance = random.Random(seed)
        self.seed, self.sentences = seed, sentences
        self.messages = [mix.system(system)] if system else []
        self.turns = 0

    def next(self, recorder, max_tokens, **more):
        self.turns += 1
        question = mix.prose(f"{self.seed}, part {self.turns}", self.chance.randint(1, self.sentences))
        self.messages.append(mix.user(question))
        step = mix.chat("turn", list(self.messages), max_tokens=max_tokens, **more)
        recorder.settle()
        self.messages.append(mix.assistant(recorder.play(step)[0]))


def ids_of(seed, count):
    """A prompt of exactly so many tokens, of ordinary words' ids."""
    chance = random.Random(seed)
    return [chance.randint(1000, 30_000) for _ in range(count)]


def complete(recorder, prompt, max_tokens=2, **more):
    recorder.settle()
    return recorder.play(mix.complete("ids", prompt, max_tokens=max_tokens, **more))


SHARED = "You answer in short. " + " ".join(mix.SENTENCES[:6])


def plain(recorder):
    conversations = [Conversation(f"plain {number}", 8, SHARED) for number in range(3)]
    for _ in range(4):
        for conversation in conversations:
            conversation.next(recorder, 24)


def duplicates(recorder):
    for blocks in (1, 2, 4):
        for _ in range(3):
            complete(recorder, ids_of(f"k{blocks}", blocks * BLOCK))
        for more in (1, 0, BLOCK, BLOCK + 1):
            complete(recorder, ids_of(f"k{blocks}", blocks * BLOCK) + ids_of("more", more))
    # The same prompt decodes the same answer: its blocks are stored once more each time.
    for _ in range(3):
        complete(recorder, ids_of("decode", 40), max_tokens=70)
    answer = complete(recorder, ids_of("decode", 40), max_tokens=70)[1]
    complete(recorder, ids_of("decode", 40) + answer)


def salts(recorder):
    for _ in range(2):
        for salt in ("tenant-a", "tenant-b", None):
            more = {"cache_salt": salt} if salt else {}
            complete(recorder, ids_of("salted", 150), max_tokens=20, **more)
    conversation = Conversation("salted", 6)
    for _ in range(3):
        conversation.next(recorder, 24, cache_salt="tenant-a")


def adapters(recorder):
    for _ in range(2):
        for model in ("tiny", "lora-1", "lora-2"):
            complete(recorder, ids_of("adapted", 150), max_tokens=20, model=model)
        complete(recorder, ids_of("adapted", 150), max_tokens=20, model="lora-1", cache_salt="tenant-a")


def eviction(recorder, requests=90):
    """More conversations than there is room for, in any order."""
    chance = random.Random("eviction")
    conversations = []
    for number in range(requests):
        if len(conversations) < 8 or chance.random() < 0.15:
            conversations.append(Conversation(f"eviction {number}", 12, SHARED if number % 2 else None))
            conversations = conversations[-8:]
        chance.choice(conversations).next(recorder, 16)
    # Among them prompts of whole blocks, of which each time the last is stored once more.
    for number in range(12):
        complete(recorder, ids_of("copies", 4 * BLOCK))
        complete(recorder, ids_of(f"filler {number}", 20 * BLOCK + 7))


def reset(recorder):
    for _ in range(2):
        complete(recorder, ids_of("before the reset", 200))
    recorder.settle()
    recorder.call("/reset_prefix_cache")
    # The engine says that it was reset with the events of its next step, so this one is sent before anybody knows.
    complete(recorder, ids_of("before the reset", 200))
    complete(recorder, ids_of("before the reset", 200))
    complete(recorder, ids_of("after the reset", 200))
    complete(recorder, ids_of("after the reset", 200))


def gap(recorder, lost=5):
    for number in range(3):
        complete(recorder, ids_of(f"gap {number}", 100 + 40 * number))
    with recorder.lock:
        recorder.to_lose = lost
    while recorder.to_lose:
        complete(recorder, ids_of(f"gap {recorder.to_lose} of {lost}", 100 + 40 * (recorder.to_lose % 4)))
    # With the next batch the loss is noticed.
    complete(recorder, ids_of("gap, noticed", 70))
    for number in range(3):
        complete(recorder, ids_of(f"gap {number}", 100 + 40 * number))
    for left in range(1, min(lost, 8) + 1):
        complete(recorder, ids_of(f"gap {left} of {lost}", 100 + 40 * (left % 4)))


def gap_beyond_replay(recorder):
    gap(recorder, lost=recorder.engine.buffer + 8)
    # Once everything has been evicted that was stored unseen, nothing is unknown any more.
    for number in range(12):
        complete(recorder, ids_of(f"turnover {number}", 20 * BLOCK + 7))
    for number in range(12):
        complete(recorder, ids_of(f"turnover {11 - number}", 20 * BLOCK + 7))


def restart(recorder):
    for _ in range(2):
        complete(recorder, ids_of("before the restart", 200))
    recorder.settle()
    recorder.engine.kill()
    recorder.add({"engine": "killed"})
    recorder.engine.start()
    # A subscription of its own socket comes back by itself.
    time.sleep(2)
    recorder.add({"engine": "started"})
    complete(recorder, ids_of("after the restart", 200))
    for _ in range(2):
        complete(recorder, ids_of("before the restart", 200))
    complete(recorder, ids_of("after the restart", 200))


def at_once(recorder, threads, play):
    """Runs play(number) on so many threads."""
    workers = [threading.Thread(target=play, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Busy(Conversation):
    """The same without waiting for anything."""

    def next(self, recorder, max_tokens, **more):
        self.turns += 1
        question = mix.prose(f"{self.seed}, part {self.turns}", self.chance.randint(1, self.sentences))
        self.messages.append(mix.user(question))
        step = mix.chat("turn", list(self.messages), max_tokens=max_tokens, **more)
        self.messages.append(mix.assistant(recorder.play(step)[0]))


def crowd(recorder, threads=6, requests=28):
    """Conversations side by side, of which the cache holds about half."""

    def play(number):
        chance = random.Random(f"crowd {number}")
        mine = []
        for request in range(requests):
            if len(mine) < 3 or chance.random() < 0.2:
                mine = mine[-2:] + [Busy(f"crowd {number}, {request}", 10, SHARED)]
            chance.choice(mine).next(recorder, chance.choice([4, 16, 40]))

    at_once(recorder, threads, play)


def one_prefix(recorder):
    prefix = ids_of("prefix", 1500)
    at_once(recorder, 4, lambda number: recorder.play(mix.complete("ids", prefix + ids_of(f"end {number}", 50))))
    same = ids_of("same", 10 * BLOCK)
    at_once(recorder, 4, lambda number: recorder.play(mix.complete("ids", same, max_tokens=40)))


def left(recorder):
    """Clients that leave while they are answered."""
    prompt = lambda number: ids_of(f"left {number}", 300 + 10 * number)
    at_once(
        recorder, 4, lambda number: recorder.play(mix.complete("ids", prompt(number), max_tokens=200), leave_after=5)
    )
    time.sleep(1)
    for number in range(4):
        recorder.play(mix.complete("ids", prompt(number) + ids_of("more", 9), max_tokens=2))


def reset_while_running(recorder):
    def play(number):
        if number == 0:
            time.sleep(1)
            recorder.call("/reset_prefix_cache")
            recorder.call("/reset_prefix_cache?reset_running_requests=true")
        else:
            conversation = Busy(f"reset {number}", 10)
            for _ in range(5):
                # Not the same for all, or for a moment none would run.
                conversation.next(recorder, 50 + 23 * number)

    at_once(recorder, 5, play)


def copies(recorder):
    """Two copies of a block, of which one is evicted while the other is used."""
    prompt = ids_of("copies", 4 * BLOCK)
    for _ in range(2):
        complete(recorder, prompt)
    for number in range(16):
        complete(recorder, ids_of(f"filler {number}", 20 * BLOCK + 7))
        complete(recorder, [*prompt, 1000])


SECTIONS = {
    "one_by_one": [plain, duplicates, salts, adapters, eviction, reset, gap, gap_beyond_replay, restart],
    "concurrent": [crowd, one_prefix, left, reset_while_running, copies],
}


def header(engine, name):
    _, models = engine.ask("GET", "/v1/models")
    served = [{key: model[key] for key in ("id", "root", "parent")} for model in models["data"]]
    return {
        "recording": name,
        "engine": f"vllm-cpu {importlib.metadata.version('vllm-cpu')}",
        "date": datetime.date.today().isoformat(),
        "flags": " ".join(engine.flags),
        "block_tokens": BLOCK,
        "capacity_blocks": engine.blocks,
        "replay_batches": engine.buffer,
        "models": served,
    }


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("sections", choices=SECTIONS)
    arguments.add_argument("model", type=pathlib.Path)
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--port", type=int, default=28200, help="of HTTP; events and replay are on the next two")
    arguments.add_argument("--log", type=pathlib.Path, required=True, help="where the engine's log goes")
    arguments.add_argument("--adapter", type=pathlib.Path, action="append", default=[])
    arguments = arguments.parse_args()
    # The engine must not outlive this, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    engine = Engine(arguments)
    recorder = Recorder(engine, marks=arguments.sections == "concurrent")
    try:
        engine.start()
        recorder.lines.append(header(engine, arguments.sections))
        recorder.listen()
        for section in SECTIONS[arguments.sections]:
            recorder.section(section.__name__)
            section(recorder)
        recorder.settle()
    finally:
        engine.kill()
    with gzip.GzipFile(arguments.out, "wb", compresslevel=9, mtime=0) as out:
        for line in recorder.lines:
            out.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
    print(f"{arguments.out}: {len(recorder.lines)} lines, {arguments.out.stat().st_size} bytes")


main()
