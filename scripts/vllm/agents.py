"""Conversations through Envoy to two real engines with agents: is what the filter predicts what the engines had cached?

    agents.py --envoy IP:PORT --admin IP:PORT --workers N --secret S --requests N --clients N ENGINE ENGINE

where ENGINE is IP:PORT,EVENTS,PID,START: the address, where it publishes its cache events, the first process of its
process group, and the script that starts it anew. Runs in the engine's own venv.

The filter says in its explain header what it predicts, the engine in its answer what it had cached. This listens to the
engines' events, too, and from them says of each difference how old the knowledge was that explains it: what the engine
held when the request was sent, or so long before. Some turns go to an engine past Envoy, as another gateway's would:
they are not judged, but what they leave behind and what they evict is in the way of those that are. No conversation goes on
before its client has had an answer in another, as nobody asks the next question in no time. Exits with 1 where fewer than
98 % are equal, where no more than a fifth of the stored blocks was evicted, or where a request was predicted on blocks that
had been gone for longer than two reports.
"""

import argparse
import collections
import dataclasses
import http.client
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import check
import held
import mix
import zmq

BLOCK_TOKENS = 32
SHARE_WANTED = 0.98
# Of the stored blocks, so many must have been evicted at least.
EVICTED_WANTED = 0.2
# What the filter says of a prompt that it did not read, for lack of time: how long it is, it then only estimates.
UNREAD = ("prompt_cpu", "prompt_timeout")
START_TIMEOUT_S = 1200
TOPIC = "kv-events"
# How far back a wrong prediction is traced.
OLDEST_S = 30
REQUESTS_AFTER = 120
# Of all turns, those that go past Envoy.
FOREIGN_SHARE = 0.15

SYSTEM = "You answer travellers' questions in short. " + " ".join(mix.SENTENCES[:6])


@dataclasses.dataclass
class Request:
    """One request, and what became of it."""

    number: int
    phase: str
    sent: float
    # Past Envoy.
    is_foreign: bool = False
    explain: str = ""
    ended: float = 0.0
    status: int = 0
    reason: str = ""
    replica: str = ""
    prompt: list = dataclasses.field(default_factory=list)
    counted: int = 0
    predicted: int = 0
    cached: int = 0
    # How long before it was sent the prediction was last right; nothing if it never was.
    age: float | None = None

    @property
    def name(self):
        return f"request-{self.number}"

    @property
    def is_pending(self):
        """Whether the prediction was of what another request was still to bring, not of what the engine was said to hold."""
        return "overlap_source=pending" in self.explain.split("; replica=")[1]

    @property
    def off(self):
        return (self.predicted - self.cached) // BLOCK_TOKENS


class Engine:
    """A real engine, and all that it has published."""

    def __init__(self, text):
        self.address, self.events, pid, self.start_script = text.split(",")
        self.pid = int(pid)
        self.process = None
        # (when, event), in order; None for what is known to be lost without an event that says so.
        self.log = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        events = zmq.Context.instance().socket(zmq.SUB)
        events.setsockopt(zmq.RCVHWM, 0)
        events.connect(self.events)
        events.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        while True:
            _, _, payload = events.recv_multipart()
            now = time.monotonic()
            self.log.extend((now, event) for event in held.decoded(payload))

    def turnover(self, until):
        """Blocks that it has stored and evicted by then."""
        counts = collections.Counter()
        for when, event in list(self.log):
            if when <= until:
                counts[event["type"]] += len(event.get("block_hashes", ()))
        return counts["BlockStored"], counts["BlockRemoved"]

    def note_that_all_is_gone(self):
        self.log.append((time.monotonic(), {"type": "AllBlocksCleared"}))

    def kill(self):
        os.killpg(self.pid, signal.SIGKILL)

    def wait_until_dead(self):
        """A killed process gives its memory back before it closes its sockets, which takes a busy machine seconds. Returns
        how many."""
        began = time.monotonic()
        for address in (self.address, self.events.removeprefix("tcp://")):
            host, port = address.split(":")
            while is_listened_on(host, int(port)):
                time.sleep(0.01)
        return time.monotonic() - began

    def start(self):
        log = open(f"{self.start_script}.log", "ab")
        command = ["nice", "-n", "5", "bash", self.start_script]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.pid = self.process.pid
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if check.ask(self.address, "GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(1)
        sys.exit(f"the engine did not start again; see {self.start_script}.log")

    def replay(self, requests):
        """By its events: what each request found cached when the engine came to it, and of each prediction that was not
        right how long before it was sent it last was. Returns the former."""
        begun, found = self.begun(requests), {}
        by_place = {place: request for request, place in begun.items()}
        wrong = [request for request in requests if request.off]
        state, since = held.Held(BLOCK_TOKENS), 0.0
        for place, (when, event) in enumerate([*self.log, (math.inf, {"type": "end"})]):
            for request in wrong:
                # What it stored itself says nothing of what it found.
                is_before = place <= begun.get(request.name, place) and since <= request.ended
                is_recent = when >= request.sent - OLDEST_S
                if is_before and is_recent and state.cached_tokens(request.prompt) == request.predicted:
                    request.age = max(0.0, request.sent - when)
            if place in by_place:
                name = by_place[place]
                found[name] = state.cached_tokens(self.named[name].prompt)
            state.apply(event)
            since = when
        return found

    def begun(self, requests):
        """Where in the events each request's own begin."""
        self.named = {request.name: request for request in requests}
        begun = {}
        for place, (_, event) in enumerate(self.log):
            if event.get("session_id") in self.named:
                begun.setdefault(event["session_id"], place)
        return begun


def is_listened_on(host, port):
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


class Conversation:
    """A chat that grows by what is answered."""

    def __init__(self, seed):
        self.seed = seed
        self.chance = random.Random(seed)
        self.messages = [mix.system(SYSTEM)] if self.chance.random() < 0.7 else []
        self.ends_after = self.chance.randint(3, 9)
        self.turns = 0

    def ask(self):
        self.turns += 1
        length = self.chance.choice([1, 2, 3, 5, 8, 12])
        self.messages.append(mix.user(mix.prose(f"{self.seed}, part {self.turns}", length)))

    @property
    def is_over(self):
        return self.turns >= self.ends_after


class Run:
    """Clients, what they sent, and the engines."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.engines = [Engine(text) for text in arguments.engines]
        # Those that are not killed.
        self.up = list(self.engines)
        self.requests = []
        self.numbers = itertools.count(1)
        self.phase = "steady"
        self.lock = threading.Lock()
        self.left = 0
        self.over = []

    def send(self, conversation, max_tokens, is_streamed, past=None):
        body = {"model": mix.MODEL, "messages": conversation.messages, "temperature": 0, "max_tokens": max_tokens}
        body["return_token_ids"] = True
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        request = Request(next(self.numbers), self.phase, time.monotonic(), bool(past))
        headers = {"content-type": "application/json", "x-warmpath-explain": self.arguments.secret}
        # Comes back in the engine's events, which so say whose blocks they are.
        headers["x-session-id"] = request.name
        try:
            answer = check.asked(past or self.arguments.envoy, mix.CHAT, json.dumps(body), headers)
        except (OSError, http.client.HTTPException) as error:
            answer = check.Answer(0, "", error=repr(error))
        request.ended, request.status = time.monotonic(), answer.status
        request.explain = answer.error or answer.explain
        request.prompt = answer.first_prompt_ids
        if said := answer.said():
            request.reason, request.counted, request.replica, request.predicted = said
        request.cached = answer.cached_tokens or 0
        with self.lock:
            self.requests.append(request)
        conversation.messages.append(mix.assistant(answer.text))
        return request

    def client(self, number):
        """Some conversations at a time, in any order; now and then one goes on that was left long ago."""
        chance = random.Random(f"{self.arguments.seed} {self.phase} {number}")
        mine, last = [], None
        for turn in itertools.count():
            past = chance.choice(self.up).address if chance.random() < FOREIGN_SHARE else None
            with self.lock:
                if not self.left:
                    return
                self.left -= 0 if past else 1
                if self.over and chance.random() < 0.05:
                    mine.append(self.over.pop(chance.randrange(len(self.over))))
            while len(mine) < 3:
                mine.append(Conversation(f"{self.arguments.seed} {self.phase} {number} {turn} {len(mine)}"))
            conversation = last = chance.choice([one for one in mine if one is not last])
            conversation.ask()
            self.send(conversation, chance.choice([4, 12, 24, 48]), chance.random() < 0.5, past)
            if conversation.is_over:
                mine.remove(conversation)
                if conversation.turns < 12:
                    conversation.ends_after += 3
                    self.over.append(conversation)
            if sys.stderr.isatty():
                print(f"\r{len(self.requests)} requests", end="\r", file=sys.stderr)

    def load(self, phase, requests, meanwhile=None):
        """So many requests through Envoy from all clients, and something else while they run."""
        self.phase, self.left = phase, requests
        clients = [threading.Thread(target=self.client, args=[number]) for number in range(self.arguments.clients)]
        for client in clients:
            client.start()
        if meanwhile:
            meanwhile()
        for client in clients:
            client.join()

    def reset_under_load(self):
        self.wait_for(REQUESTS_AFTER // 3)
        engine = self.engines[0]
        status, _, text = check.ask(engine.address, "POST", "/reset_prefix_cache?reset_running_requests=true")
        print(f"reset of {engine.address} while it works: HTTP {status} {text}")

    def wait_for(self, requests):
        before = len(self.requests)
        while len(self.requests) < before + requests:
            time.sleep(0.1)

    def reset_at_rest(self):
        """The engine says so with its next step only, so nobody can know before the first request after it."""
        engine = self.engines[1]
        time.sleep(2)
        status, _, text = check.ask(engine.address, "POST", "/reset_prefix_cache")
        engine.note_that_all_is_gone()
        print(f"reset of {engine.address} at rest: HTTP {status} {text}")
        time.sleep(2)
        self.load("reset at rest", REQUESTS_AFTER // 2)

    def killed(self):
        engine = self.engines[0]
        self.up.remove(engine)
        engine.kill()

        def die():
            took = engine.wait_until_dead()
            engine.note_that_all_is_gone()
            print(f"killed {engine.address}: dead after {took:.2f} s")

        # While it is away, the other has it all.
        self.load("one is away", REQUESTS_AFTER // 2, die)
        engine.start()
        self.up.append(engine)
        print(f"started {engine.address}")
        check.wait_until_ready(self.arguments.admin, [each.address for each in self.engines], self.arguments.workers)
        self.load("restarted", REQUESTS_AFTER)

    def all(self):
        check.wait_until_ready(self.arguments.admin, [each.address for each in self.engines], self.arguments.workers)
        self.load("steady", self.arguments.requests)
        self.load("reset under load", REQUESTS_AFTER, self.reset_under_load)
        self.reset_at_rest()
        if not self.arguments.no_restart:
            self.killed()
        time.sleep(2)
        return self.judge()

    def judge(self):
        if os.environ.get("DUMP"):
            import pickle
            pickle.dump(([dataclasses.asdict(r) for r in self.requests], [(e.address, e.log) for e in self.engines]), open(os.environ["DUMP"], "wb"))
        truth = {}
        for engine in self.engines:
            mine = [request for request in self.requests if request.replica == engine.address]
            truth |= engine.replay([request for request in mine if request.status == 200])
        steady_end = max(request.ended for request in self.requests if request.phase == "steady")
        stored, evicted = map(sum, zip(*(engine.turnover(steady_end) for engine in self.engines)))
        judged = [request for request in self.requests if not request.is_foreign]
        told = [request for request in judged if request.status == 200 and request.replica]
        self.print_phases(told)
        exact = [request for request in told if request.name in truth]
        agreed = len([request for request in exact if truth[request.name] == request.cached])
        sizes = sorted(len(request.prompt) for request in told)
        print(f"prompts: {sizes[0]} to {sizes[-1]} tokens, median {sizes[len(sizes) // 2]}")
        print(f"steady: blocks stored {stored}, of them evicted {evicted} ({evicted / max(stored, 1):.0%})")
        print(f"the engines' events, read up to where each request was begun, give its cached tokens: {agreed} of {len(exact)}")
        return self.verdict(told, evicted / max(stored, 1))

    def print_phases(self, told):
        print(f"{'':18}{'past Envoy':>10}{'through it':>10}{'failed':>8}{'equal':>8}{'share':>9}{'95 % interval':>18}{'over':>6}{'under':>7}{'gone':>6}")
        for phase in dict.fromkeys(request.phase for request in self.requests):
            mine = [request for request in told if request.phase == phase]
            asked = [request for request in self.requests if request.phase == phase]
            foreign = len([request for request in asked if request.is_foreign])
            failed = [request for request in asked if not request.is_foreign and request not in mine]
            equal = len([request for request in mine if not request.off])
            low, high = wilson(equal, len(mine))
            over, gone = [request for request in mine if request.off > 0], [request for request in mine if self.is_gone(request)]
            print(
                f"{phase:18}{foreign:10}{len(mine) + len(failed):10}{len(failed):8}{equal:8}{equal / max(len(mine), 1):9.2%}"
                f"{low:10.2%}-{high:.2%}{len(over):6}{len(mine) - equal - len(over):7}{len(gone):6}"
            )
            for request in failed[:3]:
                print(f"  request {request.number}: HTTP {request.status} {request.explain}")

    def is_gone(self, request):
        """Predicted on blocks that had been gone for longer than two reports, not on what was still to come."""
        is_old = request.age is None or request.age > self.old_s
        return request.off > 0 and is_old and not request.is_pending

    @property
    def old_s(self):
        return 2 * self.arguments.report_ms / 1000

    def verdict(self, told, evicted):
        steady = [request for request in told if request.phase == "steady"]
        wrong = [request for request in steady if request.off]
        equal = len(steady) - len(wrong)
        low, high = wilson(equal, len(steady))
        print(f"steady: {equal} of {len(steady)} predicted exactly, {equal / len(steady):.2%} (95 % interval {low:.2%} to {high:.2%})")
        self.print_errors(steady)
        # At rest nobody is told of a reset before the next step; that phase is shown, not judged.
        gone = [request for request in told if self.is_gone(request) and request.phase != "reset at rest"]
        for request in [request for request in told if self.is_gone(request) or request.off and request.age is None]:
            age = "never right" if request.age is None else f"last right {request.age:.2f} s before"
            print(
                f"  {request.phase}, request {request.number} ({request.reason}) of {len(request.prompt)} tokens to "
                f"{request.replica}: predicted {request.predicted}, engine {request.cached}, {age}"
            )
        unread = [request for request in told if request.reason in UNREAD]
        counted = [request for request in told if request.reason not in UNREAD]
        miscounted = len([request for request in counted if request.counted != len(request.prompt)])
        print(f"prompts not read for lack of time: {len(unread)}; of the others counted otherwise than by the engine: {miscounted}")
        print(f"predicted on blocks that were gone for longer than two reports: {len(gone)}")
        is_good = equal >= SHARE_WANTED * len(steady) and not gone and not miscounted and evicted > EVICTED_WANTED
        return 0 if is_good or self.arguments.reports == "no" else 1

    def print_errors(self, steady):
        histogram = collections.Counter(request.off for request in steady)
        print("predicted less cached, in blocks: " + ", ".join(f"{off:+} {histogram[off]}" for off in sorted(histogram) if off))
        wrong = [request for request in steady if request.off]
        at_sending = [request for request in wrong if request.age == 0]
        by_age = [request for request in wrong if request.age and request.age <= self.old_s]
        older = [request for request in wrong if request.age and request.age > self.old_s]
        print(
            f"of {len(wrong)} errors: {len(at_sending)} were right when they were sent and wrong when the engine came to "
            f"them, {len(by_age)} were right within the two reports before, {len(older)} longer ago, "
            f"{len(wrong) - len(at_sending) - len(by_age) - len(older)} never"
        )


def wilson(successes, trials, z=1.96):
    """The score interval of a share."""
    if not trials:
        return 0.0, 1.0
    share = successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    whole = 1 + z * z / trials
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--envoy", required=True)
    arguments.add_argument("--admin", required=True)
    arguments.add_argument("--workers", type=int, required=True)
    arguments.add_argument("--secret", required=True)
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--clients", type=int, default=6)
    arguments.add_argument("--report-ms", type=int, default=200)
    arguments.add_argument("--reports", choices=["yes", "no"], default="yes", help="no: there are none, nothing is judged")
    arguments.add_argument("--seed", default="1")
    arguments.add_argument("--no-restart", action="store_true", help="kill no engine")
    arguments.add_argument("engines", nargs=2)
    # A started engine must not outlive this, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(arguments.parse_args())
    try:
        sys.exit(run.all())
    finally:
        for engine in run.engines:
            # What this started, nobody else stops.
            if engine.process:
                os.killpg(engine.process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
