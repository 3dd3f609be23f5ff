"""Sends two hundred requests through Envoy to real engines and compares what the filter said with what they did.

    check.py --envoy IP:PORT --admin IP:PORT --workers N --secret S --end-token ID REPLICA REPLICA

The filter says, in the explain header, how many tokens the prompt has, to which replica it goes and how many of the
tokens that replica has cached. The engine says, in its answer, how many tokens it read (of a batch, the first prompt's
ids, which are counted) and how many of them it had cached; which replica worked is read from the replicas' own
counters. Exits with 1 on any difference.
"""

import argparse
import collections
import dataclasses
import http.client
import json
import re
import sys
import time

import mix

REQUEST_TIMEOUT_S = 180
READY_TIMEOUT_S = 120
# Engines count at the end of a step, so a request's own count may come after its answer.
COUNTED_TIMEOUT_S = 20
TOKENIZED = {"prefix", "cold", "prefix_busy", "short_prompt"}


def ask(address, method, path, body=None, headers=None):
    """One request on a connection of its own, so that Envoy's workers take turns."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def samples(text):
    """A Prometheus page as {name: [(labels, value)]}."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        if match := re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found[match[1]].append((labels, float(match[3])))
    return found


def total(found, name, **wanted):
    matching = (value for labels, value in found.get(name, []) if wanted.items() <= labels.items())
    return int(sum(matching))


def filter_metrics(admin):
    return samples(ask(admin, "GET", "/stats/prometheus?filter=warmpath")[2])


def finished(replica):
    """Requests that the engine has finished since it started."""
    return total(samples(ask(replica, "GET", "/metrics")[2]), "vllm:request_success_total")


def wait_until_ready(admin, replicas, workers):
    """Until every worker has its tokenizer and every replica is healthy and has reported, and with it told its block size."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            found = filter_metrics(admin)
        except OSError:
            found = {}
        ready = total(found, "warmpath_vms", state="ready")
        healthy = total(found, "warmpath_replicas", health="healthy")
        told = len(found.get("warmpath_replica_report_age_ms", []))
        if ready >= workers and healthy == len(replicas) and told == len(replicas):
            return
        if time.monotonic() > deadline:
            sys.exit(f"not ready: {ready} of {workers} VMs, {healthy} healthy replicas, {told} with a report")
        time.sleep(0.2)


@dataclasses.dataclass
class Answer:
    """What came back for one step."""

    status: int
    explain: str
    text: str = ""
    token_ids: list = dataclasses.field(default_factory=list)
    prompt_tokens: int | None = None
    first_prompt_ids: list = dataclasses.field(default_factory=list)
    cached_tokens: int | None = None
    has_usage: bool = False
    served: str = ""
    error: str = ""

    def read(self, documents):
        for document in documents:
            self.read_text(document)
            # Streams without usage are asked for the prompt's ids, which are counted.
            if ids := prompt_ids(document):
                self.first_prompt_ids = self.first_prompt_ids or ids
            # The last event of a response holds it whole.
            if usage := document.get("usage") or (document.get("response") or {}).get("usage"):
                self.read_usage(usage)
        if self.prompt_tokens is None:
            self.prompt_tokens = self.first_prompt_tokens

    @property
    def first_prompt_tokens(self):
        return len(self.first_prompt_ids) or None

    def read_text(self, document):
        for choice in document.get("choices", []):
            part = choice.get("message") or choice.get("delta") or choice
            if choice.get("index", 0) == 0:
                self.text += part.get("content") or part.get("text") or ""
                self.token_ids += choice.get("token_ids") or []
        for part in document.get("output", []):
            self.text += "".join(piece.get("text", "") for piece in part.get("content") or [])
        for part in document.get("content", []) if document.get("type") == "message" else []:
            self.text += part.get("text", "")
        if document.get("type") == "response.output_text.delta":
            self.text += document["delta"]
        if document.get("type") == "content_block_delta":
            self.text += document["delta"].get("text", "")

    def read_usage(self, usage):
        self.has_usage = True
        if "prompt_tokens" in usage:
            self.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
        else:
            details = usage.get("input_tokens_details") or {}
            cached = usage.get("cache_read_input_tokens")
            # Anthropic's input tokens are those that were not cached.
            written = usage.get("cache_creation_input_tokens") or 0
            self.prompt_tokens = usage["input_tokens"] + (cached or 0) + written
            details = details if cached is None else {"cached_tokens": cached}
        self.cached_tokens = details.get("cached_tokens", self.cached_tokens)

    def said(self):
        """The filter's account: reason, prompt tokens, first replica, its overlap."""
        pattern = r"reason=(\w+), prompt_tokens=(\d+)[^;]*; replica=([^,;]+), overlap_tokens=(\d+),.*"
        match = re.fullmatch(pattern, self.explain)
        return (match[1], int(match[2]), match[3], int(match[4])) if match else None


def asked(address, path, body, headers):
    """The answer to one request, whole or in events."""
    status, response_headers, text = ask(address, "POST", path, body, headers)
    answer = Answer(status, response_headers.get("x-warmpath-explain", ""))
    if status != 200:
        answer.error = text[:300]
    elif response_headers.get("content-type", "").startswith("text/event-stream"):
        lines = (line[5:].strip() for line in text.splitlines() if line.startswith("data:"))
        answer.read(json.loads(line) for line in lines if line != "[DONE]")
    else:
        answer.read([json.loads(text)])
    return answer


def prompt_ids(document):
    if document.get("prompt_token_ids"):
        return document["prompt_token_ids"]
    first = [choice for choice in document.get("choices", []) if choice.get("index") == 0]
    return first[0].get("prompt_token_ids") if first else None


def said_by(path, answer):
    """The answer, as the next turn's body has it."""
    if path == mix.GENERATE:
        return answer.token_ids
    if path == mix.COMPLETIONS:
        return [answer.text]
    return [mix.item("assistant", answer.text) if path == mix.RESPONSES else mix.assistant(answer.text)]


class Run:
    """The two hundred, sent one after another, and what was found."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.said_before = collections.defaultdict(list)
        self.served_before = {}
        self.counts = {replica: finished(replica) for replica in arguments.replicas}
        self.rows = []
        self.differences = []

    def body(self, step):
        body = {key: value for key, value in step.body.items() if value is not None}
        if step.thread:
            before = self.said_before[step.thread]
            key = mix.SAID[step.path]
            is_text = isinstance(body[key], str)
            before.extend([body[key]] if is_text else body[key])
            body[key] = "".join(before) if is_text else list(before)
        if step.mode != mix.JSON:
            body["stream"] = True
        # The other APIs tell their usage anyway, or know nothing of it.
        if step.mode == mix.USAGE and step.path not in (mix.RESPONSES, mix.MESSAGES):
            body.setdefault("stream_options", {"include_usage": True})
        if step.mode == mix.STREAM:
            body["return_token_ids"] = True
        return body

    def send(self, step):
        body = self.body(step)
        # Text as it is, or escaped to ASCII: clients do both, and both mean the same prompt.
        raw = json.dumps(body, ensure_ascii=len(self.rows) % 2 == 0).encode()
        headers = {"content-type": "application/json", "x-warmpath-explain": self.arguments.secret}
        answer = asked(self.arguments.envoy, step.path, raw, headers)
        if answer.status != 200:
            return answer
        answer.served = self.server_of_last(step.prompts)
        if step.thread:
            self.said_before[step.thread].extend(said_by(step.path, answer))
        return answer

    def server_of_last(self, prompts):
        """The replica whose count of finished requests went up."""
        deadline = time.monotonic() + COUNTED_TIMEOUT_S
        while time.monotonic() < deadline:
            now = {replica: finished(replica) for replica in self.arguments.replicas}
            grown = [replica for replica in now if now[replica] > self.counts[replica]]
            if sum(now[replica] - self.counts[replica] for replica in grown) >= prompts:
                self.counts = now
                return " and ".join(grown)
            time.sleep(0.05)
        return "none that counted it"

    def differs(self, step, what):
        self.differences.append(f"request {len(self.rows) + 1} ({step.kind}, {step.mode}): {what}")

    def compare(self, step, answer):
        """One row of the table: is the count right, and the prediction, and on which turn was it made."""
        row = {"kind": step.kind, "mode": step.mode, "count": "", "prediction": "", "turn": "", "answer": answer}
        said = answer.said()
        if answer.status != 200:
            self.differs(step, f"HTTP {answer.status}: {answer.error}")
        elif said is None or said[0] not in TOKENIZED:
            self.differs(step, f"not tokenized by the filter: {answer.explain!r}")
        else:
            _, tokens, replica, overlap = said
            row["tokens"], row["overlap"], row["replica"] = tokens, overlap, replica
            told = answer.prompt_tokens if step.prompts == 1 else answer.first_prompt_tokens
            row["count"] = "equal" if tokens == told else "differs"
            if row["count"] == "differs":
                self.differs(step, f"prompt_tokens: filter {tokens}, engine {told}")
            if replica != answer.served:
                self.differs(step, f"sent to {replica}, served by {answer.served}")
            self.compare_cached(step, answer, overlap, row)
            self.compare_turn(step, answer, overlap, row)
        self.rows.append(row)

    def compare_cached(self, step, answer, overlap, row):
        if answer.cached_tokens is None or not step.comparable:
            return
        row["off"] = overlap - answer.cached_tokens
        row["prediction"] = "over" if row["off"] > 0 else "under" if row["off"] < 0 else "equal"
        if row["off"]:
            self.differs(step, f"cached_tokens: predicted {overlap}, engine {answer.cached_tokens}")

    def compare_turn(self, step, answer, overlap, row):
        before = self.served_before.get(step.thread)
        if step.thread and before:
            row["turn"] = "same" if before == answer.served else "other"
            # A slow machine's last report can say that waiting there costs more; the filter then says so too.
            is_busy = "reason=prefix_busy" in answer.explain
            if row["turn"] == "other" and not is_busy:
                self.differs(step, f"turn of {step.thread} left {before}: {answer.explain}")
            if overlap == 0 and not is_busy:
                self.differs(step, f"turn of {step.thread} with nothing cached")
        self.served_before[step.thread] = answer.served

    def check_counters(self):
        """The filter's own counters must tell the same story."""
        wanted = {
            ("warmpath_requests_total", ""): len(self.rows),
            ("warmpath_prompt_count_total", "differs"): 0,
            ("warmpath_prompt_count_total", "equal"): self.seen(lambda row: row["counted"]),
            ("warmpath_prediction_total", "over"): self.seen(lambda row: row["prediction"] == "over"),
            ("warmpath_prediction_total", "under"): self.seen(lambda row: row["prediction"] == "under"),
            ("warmpath_prediction_total", "equal"): self.seen(lambda row: row["prediction"] == "equal"),
            ("warmpath_served_elsewhere_total", ""): 0,
            ("warmpath_failed_responses_total", ""): 0,
            ("warmpath_host_errors_total", ""): 0,
            ("warmpath_log_lapped_total", ""): 0,
            ("warmpath_oracle_total", "differs"): 0,
        }
        found = filter_metrics(self.arguments.admin)
        for (name, result), expected in wanted.items():
            value = total(found, name, **({"result": result} if result else {}))
            label = f'{name}{{result="{result}"}}' if result else name
            print(f"  {label:48} {value:6}   expected {expected}")
            if value != expected:
                self.differences.append(f"{label} is {value}, expected {expected}")
        distrusted = [labels["kind"] for labels, value in found["warmpath_model_trusted"] if not value]
        if distrusted:
            self.differences.append(f"not trusted: {', '.join(distrusted)}")
        reasons = {labels.get("reason"): int(value) for labels, value in found["warmpath_requests_total"] if value}
        print("  by reason: " + ", ".join(f"{name} {count}" for name, count in sorted(reasons.items())))

    def seen(self, wanted):
        return len([row for row in self.rows if wanted(row)])

    def print_table(self):
        columns = ["requests", "equal", "differs", "equal", "over", "under", "not told", "same", "other"]
        print(f"{'':28}{'':10}{'prompt tokens':>20}{'cached tokens predicted':>40}{'later turns on':>20}")
        print(f"{'kind':28}" + "".join(f"{column:>10}" for column in columns))
        kinds = list(dict.fromkeys(row["kind"] for row in self.rows))
        for kind in [*sorted(kinds), "all"]:
            rows = [row for row in self.rows if kind in (row["kind"], "all")]
            count = collections.Counter()
            for row in rows:
                count.update((name, row[name]) for name in ("count", "prediction", "turn"))
            cells = [len(rows), count["count", "equal"], len(rows) - count["count", "equal"]]
            cells += [count["prediction", result] for result in ("equal", "over", "under", "")]
            cells += [count["turn", result] for result in ("same", "other")]
            print(f"{kind:28}" + "".join(f"{cell:10}" for cell in cells))

    def print_sums(self):
        sizes = [row["tokens"] for row in self.rows if row["count"]]
        told = [row for row in self.rows if row["prediction"]]
        cached = [row["answer"].cached_tokens for row in told]
        modes = collections.Counter(row["mode"] for row in self.rows)
        served = collections.Counter(row["answer"].served for row in self.rows)
        print("answers: " + ", ".join(f"{name} {count}" for name, count in sorted(modes.items())))
        print("served by: " + ", ".join(f"{name} {count}" for name, count in sorted(served.items())))
        print(
            f"prompts: {sum(sizes)} tokens, "
            f"{min(sizes, default=0)} to {max(sizes, default=0)}; "
            f"of {sum(row['tokens'] for row in told)} in {len(told)} answers that tell, the engines had "
            f"{sum(cached)} cached ({len([1 for tokens in cached if tokens])} answers), "
            f"predicted {sum(row['overlap'] for row in told)}, "
            f"over {sum(max(row['off'], 0) for row in told)}, under {sum(max(-row['off'], 0) for row in told)}"
        )

    def print_conversations(self):
        print("conversations, turn by turn: prompt tokens (of them predicted/reported cached) at the replica's port")
        threads = collections.defaultdict(list)
        for step, row in zip(self.steps, self.rows):
            if step.thread and row["count"]:
                answer = row["answer"]
                cached = "-" if answer.cached_tokens is None else answer.cached_tokens
                port = answer.served.rsplit(":", 1)[-1]
                threads[step.thread].append(f"{row['tokens']} ({row['overlap']}/{cached}) at {port}")
        for thread in sorted(threads):
            print(f"  {thread:8} " + ", then ".join(threads[thread]))

    def all(self):
        self.steps = mix.steps(self.arguments.end_token)
        for step in self.steps:
            answer = self.send(step)
            self.compare(step, answer)
            # Whether the filter could compare too: it needs the usage, of this prompt alone.
            self.rows[-1]["counted"] = answer.has_usage and step.comparable and self.rows[-1]["count"] == "equal"
            if sys.stderr.isatty():
                print(f"\r{len(self.rows)} of {len(self.steps)}", end="\r", file=sys.stderr)
        self.print_table()
        self.print_sums()
        self.print_conversations()
        print("the filter's own counters:")
        self.check_counters()
        for difference in self.differences:
            print("DIFFERENCE " + difference)
        print(f"{len(self.rows)} requests, {len(self.differences)} differences")
        return 1 if self.differences else 0


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--envoy", required=True)
    arguments.add_argument("--admin", required=True)
    arguments.add_argument("--workers", type=int, required=True)
    arguments.add_argument("--secret", required=True)
    arguments.add_argument("--end-token", type=int, required=True)
    arguments.add_argument("replicas", nargs="+")
    arguments = arguments.parse_args()
    wait_until_ready(arguments.admin, arguments.replicas, arguments.workers)
    sys.exit(Run(arguments).all())


if __name__ == "__main__":
    main()
