#!/usr/bin/env python3
"""CPU and latency of requests through Envoy, by filter; scripts/bench.sh builds what it needs."""
import argparse
import collections
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from gateway import configuration, end, free_ports, heading, machine, scrape, start, value, wait, without_filter

ARMS = ("no filter", "hold and copy", "warmpath")
MODEL = "qwen3"
TURNS = ("cold", "next")
PERCENTILES = (50, 95, 99)
# Tokens of a prompt: chats of a round, rounds. Each chat is a request, and one more with the next turn.
PLAN = {1_000: (40, 20), 10_000: (12, 20), 100_000: (4, 16)}
QUICK = {1_000: (10, 3), 10_000: (4, 3), 100_000: (2, 2)}
# Streams of a round, rounds, events of a stream, microseconds between them.
STREAMS, QUICK_STREAMS = (8, 10, 300, 200), (4, 2, 200, 200)
# Rounds that are not counted, while V8 still compiles what has become hot.
WARM_UP = 2
# What a phase may take on a machine that is busy; then it ends with fewer rounds, and says so.
LIMIT_SECONDS = 75


def cpu_us(pid):
    """User and system time of a process, by the clock that the kernel keeps of it."""
    return time.clock_gettime((~pid << 3) | 2) * 1e6


class Peer:
    """The client: it is told what to play."""

    def __init__(self, traffic, prepared):
        self.process = subprocess.Popen(
            [traffic, "load", "--prepared", str(prepared), "--model", MODEL],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("the client gave up; see above")
        return json.loads(answer)


class Arm:
    """An Envoy, and what it has cost so far."""

    def __init__(self, name, process, ports):
        self.name, self.process = name, process
        self.inference, self.admin = ports[:2]
        # What it costs while nothing is asked of it: ticks, polls, health checks.
        self.idle_us = self.idle_seconds = 0.0
        self.left = None

    def enter(self):
        now, cpu = time.monotonic(), cpu_us(self.process.pid)
        if self.left:
            self.idle_seconds += now - self.left[0]
            self.idle_us += cpu - self.left[1]
        return now, cpu

    def leave(self):
        # The end of a request is seen by the client before Envoy is done with it.
        time.sleep(0.01)
        self.left = time.monotonic(), cpu_us(self.process.pid)
        return self.left

    def idle_rate(self):
        return self.idle_us / self.idle_seconds if self.idle_seconds else 0.0


def play(peer, arm, **order):
    began, before = arm.enter()
    answer = peer.do(do="play", port=arm.inference, **order)
    ended, after = arm.leave()
    return {"cpu_us": after - before, "seconds": ended - began, **answer}


def rounds(peer, arms, args, chats, count, turns, **order):
    """Plays rounds, the arms by turns; samples by arm and turn, and what the prompts were."""
    samples = collections.defaultdict(list)
    written, tokens, size = 0, 0.0, 0.0
    deadline = time.monotonic() + LIMIT_SECONDS
    for number in range(-WARM_UP, count):
        if number > 1 and time.monotonic() > deadline:
            print(f"no time for rounds {number + 1} to {count}", file=sys.stderr)
            break
        args.seed += 1
        prompts = peer.do(do="write", count=chats, seed=args.seed, events=order.get("events", 0), tokens=order["tokens"])
        written, tokens, size = written + 1, tokens + prompts["tokens"], size + prompts["bytes"]
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            for turn in turns:
                sample = play(peer, arm, turn=turn, connections=args.connections, **order)
                args.sent[arm.name, turn] += chats
                args.bytes[arm.name] += sample["body_bytes"]
                if number >= 0:
                    samples[arm.name, turn].append(sample)
    return samples, tokens / written, size / written


def interval(values):
    """Half of the mean's 95 % interval."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan")


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(arms, samples, turn, per_sample):
    """What each arm's requests cost, idle work taken away."""
    rows = {}
    for arm in arms:
        of_arm = samples[arm.name, turn]
        costs = [(s["cpu_us"] - arm.idle_rate() * s["seconds"]) / per_sample for s in of_arm]
        latencies = [latency for sample in of_arm for latency in sample["latencies_us"]]
        rows[arm.name] = {
            "cpu_us": statistics.mean(costs),
            "cpu_us_95": interval(costs),
            "samples": len(latencies),
            **{f"p{p}_us": percentile(latencies, p / 100) for p in PERCENTILES},
        }
    return rows


def milliseconds(us, row, share):
    """A quantile of too few samples is none."""
    return f"{us / 1e3:.2f}" if row["samples"] * (100 - share) >= 100 else "-"


def ratio(rows, name, to):
    return rows[name]["cpu_us"] / rows[to]["cpu_us"]


def bench_requests(peer, arms, args, report):
    plan = QUICK if args.quick else PLAN
    print("CPU of the Envoy process, us per request, and latency added to that of no filter, ms\n")
    print("| tokens | turn | filter | requests | CPU us | of hold and copy | added p50 | p95 | p99 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for tokens, (chats, count) in plan.items():
        samples, mean_tokens, mean_bytes = rounds(peer, arms, args, chats, count, TURNS, tokens=tokens)
        for turn in TURNS:
            rows = figures(arms, samples, turn, chats)
            bare = rows[ARMS[0]]
            for arm in arms:
                row = rows[arm.name]
                row["of_hold_and_copy"] = ratio(rows, arm.name, ARMS[1])
                if arm is arms[0]:
                    shown = [f"({milliseconds(bare[f'p{p}_us'], row, p)})" for p in PERCENTILES]
                else:
                    shown = [milliseconds(row[f"p{p}_us"] - bare[f"p{p}_us"], row, p) for p in PERCENTILES]
                print(f"| {tokens:,} | {turn} | {arm.name} | {row['samples']:,} | {row['cpu_us']:,.0f} ± {row['cpu_us_95']:,.0f} "
                      f"| {row['of_hold_and_copy']:.2f} | {' | '.join(shown)} |", flush=True)
            report["requests"].append(
                {"tokens": tokens, "mean_tokens": mean_tokens, "mean_bytes": mean_bytes, "turn": turn, "arms": rows})
    print()


def bench_events(peer, arms, args, report):
    streams, count, events, pace = QUICK_STREAMS if args.quick else STREAMS
    before = callbacks(arms[2])
    args.connections, connections = 4, args.connections
    samples, _, _ = rounds(peer, arms, args, streams, count, ("cold",), tokens=1_000, events=events, pace_us=pace)
    args.connections = connections
    all_events = streams * (events + 3)
    seen = all_events * (len(samples[ARMS[2], "cold"]) + WARM_UP)
    per_callback = seen / max(1, callbacks(arms[2]) - before)
    rows = figures(arms, samples, "cold", all_events)
    bare = rows[ARMS[0]]["cpu_us"]
    print(f"CPU of the Envoy process, us per event of a stream: {events + 3} events of some 230 bytes, {pace} us apart, 4 streams at once;")
    print(f"the request (1,000 tokens) is counted with them; the filter got {per_callback:.1f} events at once\n")
    print("| filter | events | CPU us | added us | of hold and copy |")
    print("| --- | --- | --- | --- | --- |")
    for arm in arms:
        row = rows[arm.name]
        row["of_hold_and_copy"] = ratio(rows, arm.name, ARMS[1])
        total = all_events * len(samples[arm.name, "cold"])
        print(f"| {arm.name} | {total:,} | {row['cpu_us']:.2f} ± {row['cpu_us_95']:.2f} | {row['cpu_us'] - bare:.2f} "
              f"| {row['of_hold_and_copy']:.2f} |")
    print(flush=True)
    report["events"] = {"events": events + 3, "bytes": 230, "pace_us": pace, "events_per_callback": per_callback, "arms": rows}


def callbacks(arm):
    # Envoy's histograms are up to five seconds late.
    time.sleep(6)
    return value(scrape(arm.admin), 'warmpath_callback_us_count{callback="response_body"}')


def verify(arms, args):
    """The filter must have done what it was measured for: its own counts say so."""
    page = scrape(arms[2].admin)
    sent = {turn: args.sent[ARMS[2], turn] for turn in TURNS}
    wanted = {
        'warmpath_requests_total{reason="cold"}': sent["cold"],
        'warmpath_requests_total{reason="prefix"}': sent["next"],
        f'warmpath_prompt_count_total{{model="{MODEL}",result="equal"}}': sum(sent.values()),
        f'warmpath_prediction_total{{model="{MODEL}",result="equal"}}': sum(sent.values()),
    }
    wrong = [f"{series} is {value(page, series):.0f}, not {count}" for series, count in wanted.items() if value(page, series) != count]
    copied = value(scrape(arms[1].admin), "hold_and_copy_bytes_total{}")
    if copied != args.bytes[ARMS[1]]:
        wrong.append(f"hold and copy has copied {copied:,.0f} bytes of {args.bytes[ARMS[1]]:,}")
    if wrong:
        lines = [line for line in page.splitlines() if line.startswith(("warmpath_requests_total", "warmpath_prediction"))]
        sys.exit("not what was to be measured: " + "; ".join(wrong) + "\n" + "\n".join(lines))
    total = sum(args.sent.values())
    print(f"verified: {total:,} requests over all filters, warm-up included; every answer whole; of Warmpath's {sum(sent.values()):,},"
          f" every prompt count and prediction equal, {sent['cold']:,} cold and {sent['next']:,} by prefix")


def arm_configurations(args, ports, replicas, prepared):
    """Three times the shipped configuration: without the filter, with another plugin in its place, as it is."""
    files = [(MODEL, prepared)]
    own = [ports[i:i + 4] for i in (0, 4, 8)]
    bare = without_filter(configuration(args.wasm, own[0], replicas, files))
    copying = configuration(args.copy, own[1], replicas, files)
    return own, (bare, copying, configuration(args.wasm, own[2], replicas, files))


def run(args, folder, report):
    prepared = folder / "model.warmpath"
    subprocess.run([args.prepare, args.model, "--output", str(prepared)], check=True, stdout=subprocess.DEVNULL)
    ports = free_ports(16)
    replicas = ports[12:]
    own, texts = arm_configurations(args, ports, replicas, prepared)
    processes = []
    with (folder / "log").open("w") as log:
        try:
            listens = [option for port in replicas for option in ("--listen", f"127.0.0.1:{port}")]
            processes.append(subprocess.Popen([args.traffic, "replica", "--model", MODEL, *listens], stdout=log, stderr=log))
            arms = []
            for name, ports, text in zip(ARMS, own, texts):
                config = folder / f"{name.replace(' ', '-')}.yaml"
                config.write_text(text)
                processes.append(start(args.envoy, config, 1, log))
                arms.append(Arm(name, processes[-1], ports))
            peer = Peer(args.traffic, prepared)
            processes.append(peer.process)

            def is_ready():
                page = scrape(arms[2].admin)
                healthy = value(page, 'warmpath_replicas{cluster="replicas",health="healthy"}') == len(replicas)
                return healthy and value(page, 'warmpath_vms{state="ready"}') == 1 and all(scrape(arm.admin) for arm in arms)

            wait(is_ready, processes, folder / "log")
            time.sleep(2)
            bench_requests(peer, arms, args, report)
            bench_events(peer, arms, args, report)
            report["idle_us_per_second"] = {arm.name: arm.idle_rate() for arm in arms}
            idle = ", ".join(f"{arm.name} {arm.idle_rate() / 1e4:.2f} %" for arm in arms)
            print(f"CPU of an Envoy that is asked nothing, of one core, taken away above: {idle}")
            verify(arms, args)
        finally:
            end(processes)


def main():
    parser = argparse.ArgumentParser()
    for name in ("envoy", "wasm", "copy", "prepare", "traffic"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model", default="tests/data/models/qwen3")
    parser.add_argument("--connections", type=int, default=1, choices=(1, 2, 3, 4))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.sent, args.bytes = collections.Counter(), collections.Counter()
    report = machine(args.envoy) | {
        "wasm_bytes": pathlib.Path(args.wasm).stat().st_size,
        "model": args.model, "connections": args.connections, "seed": args.seed, "quick": args.quick,
        "requests": [],
    }
    print(f"{heading(report)}; 1 worker;")
    print(f"filter of {report['wasm_bytes']:,} bytes; model {args.model}; 4 replicas that answer at once; closed loop of"
          f" {args.connections}, seed {args.seed}\n")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        run(args, pathlib.Path(name), report)
    report["seconds"] = time.monotonic() - began
    print(f"{report['seconds']:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


main()
