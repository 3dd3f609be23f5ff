#!/usr/bin/env python3
"""Brings docker-compose.yml up, plays against it while replicas come and go, and takes it down.

    scenario.py COMPOSE...      the words of the command, such as: docker compose

Fails on any request that failed, any replica that was not found or not forgotten, and on anything left behind.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROJECT = "warmpath-test"
REPLICAS = 4
# What envoy/compose/envoy.yaml recommends at least.
FEWEST = 2


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


NAMES = ("WARMPATH_PORT", "WARMPATH_METRICS_PORT", "WARMPATH_LIVE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
PORTS = {name: free_port() for name in NAMES}
ENVIRONMENT = {**os.environ, **{name: str(port) for name, port in PORTS.items()}, "COMPOSE_PROJECT_NAME": PROJECT}


class Compose:
    def __init__(self, words):
        self.words = words
        self.loads = 0

    def command(self, *arguments):
        return [*self.words, "-f", str(ROOT / "docker-compose.yml"), *arguments]

    def run(self, *arguments, limit=900):
        done = subprocess.run(
            self.command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=limit, check=False
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def load(self, requests, seconds):
        """Starts the load generator; it ends by itself. No two loads have prompts in common."""
        self.loads += 1
        environment = {
            **ENVIRONMENT, "REQUESTS": str(requests), "ARRIVALS_S": str(seconds), "SEED": str(self.loads)
        }
        return subprocess.Popen(
            self.command("run", "--rm", "-T", "load"),
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def failed(output):
    """How many requests a load says have failed."""
    found = re.search(r"(\d+) of \d+ requests failed", output)
    return int(found.group(1)) if found else 0


def until(what, check, seconds=120):
    """Polls until `check` returns something true."""
    end = time.monotonic() + seconds
    last = None
    while time.monotonic() < end:
        try:
            last = check()
            if last:
                return last
        except (OSError, ValueError, KeyError) as error:
            last = error
        time.sleep(0.3)
    sys.exit(f"not within {seconds} s: {what}; last: {last}")


def metrics():
    """Envoy's own page, as {series: value}."""
    series = {}
    for line in get(PORTS["WARMPATH_METRICS_PORT"], "/stats/prometheus").splitlines():
        if not line.startswith("#") and " " in line:
            name, value = line.rsplit(" ", 1)
            series[name] = float(value)
    return series


def total(name, **labels):
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value for series, value in metrics().items()
        if series.split("{")[0] == name and all(label in series for label in wanted)
    )


def replicas():
    """The replicas that the filter knows, by address. What is gone keeps its series, at 0."""
    return {re.search(r'replica="([^"]+)"', series).group(1) for series, value in metrics().items()
            if series.startswith("warmpath_replica_capacity_blocks{") and value > 0}


def known(count):
    """Whether the filter has this many healthy replicas, and no other."""
    by_health = {health: total("warmpath_replicas", health=health) for health in ("healthy", "unhealthy", "draining")}
    return by_health == {"healthy": count, "unhealthy": 0, "draining": 0}


def ask_prometheus(query):
    answer = json.loads(get(PORTS["PROMETHEUS_PORT"], "/api/v1/query?" + urllib.parse.urlencode({"query": query})))
    return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in answer["data"]["result"]}


def docker(*arguments):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=180).stdout


def containers(service):
    """Ids of a service's running containers by their number, from the lowest."""
    listed = docker(
        "ps", "--filter", f"label=com.docker.compose.project={PROJECT}",
        "--filter", f"label=com.docker.compose.service={service}",
        "--format", '{{.ID}} {{.Label "com.docker.compose.container-number"}}',
    )
    return dict(sorted((int(number), name) for name, number in (line.split() for line in listed.splitlines())))


def finish(load, what):
    output, _ = load.communicate(timeout=300)
    # Its exit code also says whether it kept its own times, which a busy machine does not.
    played = re.search(r"(\d+) requests, hit rate [\d.]+ %", output)
    if not played or "failed" in output or "ERROR" in output:
        sys.exit(f"requests failed while {what}:\n{output[-3000:]}")
    print(f"  no request failed while {what}: {played.group(0)}")


def scale_by_load(compose):
    """scripts/scale.sh as it is started by hand: what it recommends of a load that rises and falls, it does."""
    address = "http://127.0.0.1:{}".format
    environment = {
        **ENVIRONMENT, "COMPOSE": " ".join(compose.words),
        "PROMETHEUS": address(PORTS["PROMETHEUS_PORT"]), "METRICS": address(PORTS["WARMPATH_METRICS_PORT"]),
    }
    with tempfile.NamedTemporaryFile("w+") as log:
        said = lambda: pathlib.Path(log.name).read_text()
        scaler = subprocess.Popen(
            [ROOT / "scripts/scale.sh", "--every", "2", "--for", "900"],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )
        try:
            busy = compose.load(2000, 40)
            until("more replicas", lambda: " replicas, from " in said())
            finish(busy, "replicas were added by the load")
            quiet = compose.load(300, 90)
            until("the fewest", lambda: said().endswith(f"is gone: {FEWEST} replicas\n") and known(FEWEST), 400)
            finish(quiet, "replicas were drained and stopped")
        finally:
            scaler.terminate()
            scaler.wait(60)
            print("  " + said().strip().replace("\n", "\n  "))
        drained = re.findall(r"(\S+) drains$", said(), re.M)
        gone = re.findall(r"(\S+) is gone", said())
        most = max(map(int, re.findall(r" (\d+) replicas, from", said())))
    if drained != gone or len(gone) < most - FEWEST:
        sys.exit(f"{most} replicas became {FEWEST}; drained {drained}, gone {gone}")
    print(f"  the load made them {most} replicas and {FEWEST} again; each was drained before it was stopped")


def play(compose):
    # Real engines want a GPU; that the file says what it should of them is all that can be seen without.
    compose.run("--profile", "vllm", "config", "--quiet")
    compose.run("up", "--build", "-d")
    until(f"{REPLICAS} replicas found", lambda: known(REPLICAS) and len(replicas()) == REPLICAS, 300)
    until("every worker's tokenizer", lambda: total("warmpath_vms", state="ready") >= 2)
    until("every agent's report", lambda: total("warmpath_agents", state="reporting") == REPLICAS)
    envoy = containers("envoy")
    began = docker("inspect", "--format", "{{.State.StartedAt}}", *envoy.values())
    print(f"  {REPLICAS} replicas found by DNS, and an agent beside each")
    live = PORTS["WARMPATH_LIVE_PORT"]
    if "</html>" not in get(live, "/") or not json.loads(get(live, "/stats?format=json&filter=warmpath_vms"))["stats"]:
        sys.exit("the live page is not served, or may not read what it shows")

    first = compose.load(400, 20)
    finish(first, "four replicas answered")
    if total("warmpath_requests_total", reason="prefix") < 100:
        sys.exit(f"few hits: {total('warmpath_requests_total', reason='prefix')}")
    hits = until("hits in Prometheus", lambda: ask_prometheus("sum(warmpath_reported_cached_tokens_total) > 0"), 60)
    share = ask_prometheus("sum(warmpath_reported_cached_tokens_total) / sum(warmpath_reported_prompt_tokens_total)")
    print(f"  Prometheus has {sum(hits.values()):,.0f} cached tokens, {sum(share.values()):.0%} of all prompts'")
    up = until("Prometheus' targets", lambda: ask_prometheus("up") or None, 60)
    if min(up.values()) < 1:
        sys.exit(f"Prometheus misses targets: {up}")

    before = replicas()
    growing = compose.load(600, 40)
    compose.run("up", "-d", "--no-recreate", "--scale", "replica=6")
    until("six replicas", lambda: known(6) and len(replicas()) == 6)
    until("six agents", lambda: total("warmpath_agents", state="reporting") == 6)
    new = replicas() - before
    finish(growing, "two replicas came")
    # Where the machine is slow they came when that load was over.
    for _ in range(5):
        if all(total("warmpath_replica_shadow_blocks", replica=replica) > 0 for replica in new):
            break
        finish(compose.load(200, 10), "six replicas answered")
    else:
        sys.exit(f"some of the new ones get no requests: {new}")
    print(f"  six replicas; the new ones hold prompts: {sorted(new)}")

    shrinking = compose.load(600, 40)
    compose.run("up", "-d", "--no-recreate", "--scale", "replica=3")
    until("three replicas", lambda: known(3))
    finish(shrinking, "three replicas went")

    scale_by_load(compose)

    compose.run("up", "-d", "--no-recreate", "--scale", "replica=3")
    until("three replicas again", lambda: known(3))
    stopping = compose.load(400, 25)
    first, second, _ = containers("replica").values()
    docker("stop", "-t", "45", first)
    until("two replicas", lambda: known(2))
    finish(stopping, "a replica was stopped by hand")

    killing = compose.load(400, 25)
    time.sleep(5)
    docker("kill", second)
    until("one replica", lambda: known(1))
    output, _ = killing.communicate(timeout=300)
    print(f"  {failed(output)} of 400 requests failed when a replica was killed: streams that had begun")
    until("what is gone is forgotten", lambda: len(replicas()) == 1)

    if docker("inspect", "--format", "{{.State.StartedAt}}", *envoy.values()) != began or containers("envoy") != envoy:
        sys.exit("Envoy was started anew")
    print("  Envoy ran through it all; two went at last, and one is known")


def left():
    label = f"label=com.docker.compose.project={PROJECT}"
    return {
        "containers": docker("ps", "-aq", "--filter", label).split(),
        "networks": docker("network", "ls", "-q", "--filter", label).split(),
        "volumes": docker("volume", "ls", "-q", "--filter", label).split(),
    }


def main():
    compose = Compose(sys.argv[1:])
    if not compose.words:
        sys.exit(__doc__)
    # Who is asked to end ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        play(compose)
    except SystemExit:
        logs = subprocess.run(
            compose.command("logs", "--no-color", "--tail", "40"), env=ENVIRONMENT, capture_output=True, text=True
        )
        print(logs.stdout[-12000:], file=sys.stderr)
        raise
    finally:
        compose.run("--profile", "load", "down", "--volumes", "--remove-orphans")
    if any(left().values()):
        sys.exit(f"left behind: {left()}")
    print("  nothing is left")


if __name__ == "__main__":
    main()
