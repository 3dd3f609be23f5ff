#!/usr/bin/env python3
"""CPU of asking idle replicas, against proxying requests; scripts/bench.sh builds what it needs."""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from gateway import configuration, end, free_ports, heading, machine, scrape, start, value, wait

REPLICAS, OFFSET, MODEL = 64, 1000, "qwen3"
# The pace at which an agent is asked while its replica has something to do.
INTERVAL_S = 0.2
# What each Envoy asks, and the series that counts it. The last but one asks idle agents as if they were busy.
REPORTS = 'warmpath_cache_reports_total{result="unchanged"}'
ARMS = {
    "nothing": ({}, False, None),
    "agents, as shipped": ({}, True, REPORTS),
    "agents, each 200 ms": ({"idle_interval_ms": 200}, True, REPORTS),
    "metrics, each 500 ms": ({}, False, 'warmpath_polls_total{result="ok",target="metrics"}'),
}
# Tokens of a prompt, chats of a round, rounds.
PLAN = [(1_000, 40, 5), (10_000, 12, 5)]


def cpu_us(process):
    """User and system time of a process, by the clock that the kernel keeps of it."""
    return time.clock_gettime((~process.pid << 3) | 2) * 1e6


def many(text, cluster, ports):
    """The configuration with these endpoints of a cluster."""
    place = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}\n"
    pattern = rf"(cluster_name: {cluster}\n      endpoints:\n      - lb_endpoints: # CHANGE\n)((?:        - endpoint.*\n)+)"
    text, found = re.subn(pattern, lambda match: match[1] + "".join(place % port for port in ports), text)
    if found != 1:
        sys.exit(f"envoy/envoy.yaml has no endpoints of {cluster}")
    return text


def arm_configuration(args, own, replicas, prepared, name):
    report, asks_agents, counted = ARMS[name]
    text = configuration(args.wasm, own, replicas[:4], [(MODEL, prepared)])
    for cluster, ports in [("replicas", replicas), ("replicas_poll", replicas), ("agents", [p + OFFSET for p in replicas])]:
        text = many(text, cluster, ports)
    lines = re.search(r"value: \|\n( {20}\{.*\n)", text)[1]
    options = json.loads(lines)
    if asks_agents or not counted:
        del options["clusters"][0]["poll_cluster"]
    if asks_agents:
        options["cache_report"] = {"cluster": "agents", "port_offset": OFFSET, **report}
    # Health checks and the admin's answers are the same in each; the filter's own clocks are, too.
    return text.replace(lines, " " * 20 + json.dumps(options) + "\n")


class Arm:
    def __init__(self, name, process, own):
        self.name, self.process, self.counted = name, process, ARMS[name][2]
        self.inference, self.admin = own[:2]

    def count(self):
        return value(scrape(self.admin), self.counted) if self.counted else 0.0

    def look(self):
        return time.monotonic(), cpu_us(self.process), self.count()


def idle(arms, seconds):
    """CPU of each, us per second, and what it asked in one."""
    before = {arm.name: arm.look() for arm in arms}
    time.sleep(seconds)
    rates = {}
    for arm in arms:
        (t0, c0, n0), (t1, c1, n1) = before[arm.name], arm.look()
        rates[arm.name] = ((c1 - c0) / (t1 - t0), (n1 - n0) / (t1 - t0))
    return rates


def request_cost(peer, arm, idle_rate, plan, seed):
    """CPU of the Envoy process for one request with a prompt that is new."""
    tokens, chats, rounds = plan
    costs = []
    for number in range(rounds + 2):
        peer("write", count=chats, seed=seed + number, events=0, tokens=tokens)
        began, before = time.monotonic(), cpu_us(arm.process)
        peer("play", port=arm.inference, turn="cold", connections=1, tokens=tokens)
        time.sleep(0.01)
        spent = cpu_us(arm.process) - before - idle_rate * (time.monotonic() - began)
        if number >= 2:
            costs.append(spent / chats)
    return sum(costs) / len(costs)


def run(args, folder, report):
    prepared = folder / "model.warmpath"
    subprocess.run([args.prepare, args.model, "--output", str(prepared)], check=True, stdout=subprocess.DEVNULL)
    replicas = free_ports(REPLICAS, OFFSET)
    processes = []
    with (folder / "log").open("w") as log:
        try:
            listens = [part for port in replicas for at in (port, port + OFFSET) for part in ("--listen", f"127.0.0.1:{at}")]
            processes.append(subprocess.Popen([args.traffic, "replica", "--model", MODEL, *listens], stdout=log, stderr=log))
            arms = []
            for number, name in enumerate(ARMS):
                own = free_ports(4)
                config = folder / f"{number}.yaml"
                config.write_text(arm_configuration(args, own, replicas, prepared, name))
                processes.append(start(args.envoy, config, 1, log))
                arms.append(Arm(name, processes[-1], own))

            def is_ready():
                pages = [scrape(arm.admin) for arm in arms]
                healthy = 'warmpath_replicas{cluster="replicas",health="healthy"}'
                reporting = 'warmpath_agents{cluster="replicas",state="reporting"}'
                asked = [page for arm, page in zip(arms, pages) if ARMS[arm.name][1]]
                return (all(value(page, healthy) == REPLICAS and value(page, 'warmpath_vms{state="ready"}') == 1 for page in pages)
                        and all(value(page, reporting) == REPLICAS for page in asked))

            wait(is_ready, processes, folder / "log")
            # Until idle agents are asked as seldom as they ever are.
            time.sleep(8)
            rates = idle(arms, args.seconds)
            client = subprocess.Popen([args.traffic, "load", "--prepared", str(prepared), "--model", MODEL],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(client)

            def peer(action, **order):
                client.stdin.write(json.dumps({"do": action, **order}) + "\n")
                client.stdin.flush()
                return client.stdout.readline() or sys.exit("the client gave up; see above")

            requests = {plan[0]: request_cost(peer, arms[0], rates["nothing"][0], plan, args.seed) for plan in PLAN}
            show(rates, requests, report)
        finally:
            end(processes)


def show(rates, requests, report):
    bare = rates["nothing"][0]
    print("| asked | questions a second | CPU of one core | us a question |")
    print("| --- | --- | --- | --- |")
    questions = {}
    for name, (cpu, count) in rates.items():
        questions[name] = (cpu - bare) / count if count else 0.0
        print(f"| {name} | {count:.0f} | {cpu / 1e4:.2f} % | {questions[name]:.0f} |" if count else
              f"| {name} | | {cpu / 1e4:.2f} % | |")
    shipped = rates["agents, as shipped"][0] - bare
    report["requests"], report["shares"] = requests, {}
    print(f"\nAgainst proxying a request with a new prompt in the place of each question that {REPLICAS} replicas are due at the\n"
          f"interval of {INTERVAL_S * 1e3:.0f} ms, as shipped: idle agents are asked ever less; and question by question\n")
    print("| tokens of a prompt | us a request | asking idle agents | one question |")
    print("| --- | --- | --- | --- |")
    for tokens, cost in requests.items():
        share = shipped / (REPLICAS / INTERVAL_S * cost)
        one = questions["agents, each 200 ms"] / cost
        report["shares"][tokens] = {"idle": share, "question": one}
        print(f"| {tokens:,} | {cost:,.0f} | {100 * share:.2f} % | {100 * one:.1f} % |")
    report["rates"] = {name: {"cpu_us_per_second": cpu, "per_second": count} for name, (cpu, count) in rates.items()}
    # What is compared must have happened.
    if not 0.8 * REPLICAS / INTERVAL_S <= rates["agents, each 200 ms"][1] <= 1.1 * REPLICAS / INTERVAL_S:
        sys.exit("agents were not asked at their interval")
    worst = max(shares["idle"] for shares in report["shares"].values())
    print(f"\nthe poll of {REPLICAS} idle replicas costs {100 * worst:.2f} % at most of what proxying one request per poll would")
    if worst >= 0.05:
        sys.exit("that is 5 % or more")


def main():
    parser = argparse.ArgumentParser()
    for name in ("envoy", "wasm", "prepare", "traffic"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model", default="tests/data/models/qwen3")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    report = machine(args.envoy) | {"seed": args.seed, "seconds": args.seconds}
    print(f"{heading(report)}; 1 worker; {REPLICAS} replicas that answer at once, each with an agent\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        run(args, pathlib.Path(name), report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


main()
