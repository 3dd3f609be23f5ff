"""Tries scripts/scale.sh without a Docker engine: a load rises and falls, replicas come and go, and no request fails.

    try.py ENVOY PROMETHEUS WASM PREPARED FOLDER_OF_PROGRAMS WORK

Envoy, the filter, Prometheus with the shipped rules, the mock replicas and the load are real. Only `docker` is this file,
too: it starts and ends replicas as processes, each on an address of its own on the loopback, tells Envoy by a file of
endpoints, and lets a replica drain as an agent does, by its health. scripts/compose.sh runs the same on a real engine's
containers where there is one.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts/bench"))

from gateway import free_ports

PORT = 18600
FEWEST, MOST = 2, 4
PATIENCE_S = 120
API = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def replicas(work):
    """Running replicas: id, address, process and whether it drains."""
    found = []
    for path in (work / "replicas").iterdir():
        try:
            found.append(json.loads(path.read_text()))
        except FileNotFoundError:
            pass  # it went meanwhile
    return sorted(found, key=lambda one: one["number"])


def note(work, state):
    """Writes what is known of a replica, moved into place."""
    new = work / f"replica-{state['number']}.new"
    new.write_text(json.dumps(state))
    new.rename(work / "replicas" / f"c{state['number']}")


def tell_envoy(work):
    """Writes the endpoints of both clusters, each file moved into place, as Envoy wants it."""
    for cluster in ("replicas", "replicas_poll"):
        members = [
            {"endpoint": {"address": {"socket_address": {"address": one["ip"], "port_value": PORT}}},
             "health_status": "DRAINING" if one["drains"] else "HEALTHY"}
            for one in replicas(work)
        ]
        resource = {"@type": API, "cluster_name": cluster, "endpoints": [{"lb_endpoints": members}]}
        new = work / "eds" / f"{cluster}.new"
        new.write_text(json.dumps({"version_info": str(time.time_ns()), "resources": [resource]}))
        new.rename(work / "eds" / f"{cluster}.json")


def start_replica(work):
    taken = {one["number"] for one in replicas(work)}
    number = next(n for n in range(1, 200) if n not in taken)
    ip = f"127.0.7.{number}"
    log = open(work / f"replica-{number}.log", "ab")
    process = subprocess.Popen(
        [os.environ["MOCK"], "--listen", f"{ip}:{PORT}", "--model", f"Qwen/Qwen3-8B={os.environ['PREPARED']}",
         "--model", "qwen3", "--prefill-rate", "60000", "--attention-rate", "2e9", "--step-ms", "5",
         "--decode-ms", "0.15", "--capacity-blocks", "7000", "--max-num-seqs", "256", "--drain-s", "60"],
        stdout=log, stderr=log, start_new_session=True,
    )
    until(f"{ip} answers", lambda: fetch(f"http://{ip}:{PORT}/health") is not None)
    note(work, {"number": number, "ip": ip, "pid": process.pid, "drains": False})
    tell_envoy(work)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def docker(work, words):
    """What scripts/scale.sh asks of Docker."""
    with open(work / "docker.log", "a") as log:
        log.write(" ".join(words)[:200] + "\n")
    one = lambda name: work / "replicas" / name
    if words[:2] == ["compose", "ps"]:
        print("\n".join(f"c{state['number']}" for state in replicas(work)))
    elif words[:2] == ["compose", "up"]:
        scale = next(int(word.split("=")[1]) for word in words if word.startswith("replica="))
        while len(replicas(work)) < scale:
            start_replica(work)
        if len(replicas(work)) > scale:
            sys.exit("Compose itself would have chosen whom to stop")
    elif words[0] == "inspect":
        print(json.loads(one(words[-1]).read_text())["ip"])
    elif words[0] == "exec":
        state = json.loads(one(words[1]).read_text())
        note(work, {**state, "drains": True})
        tell_envoy(work)
    elif words[0] == "stop":
        state = json.loads(one(words[-1]).read_text())
        os.kill(state["pid"], signal.SIGTERM)
        until("it ends", lambda: not alive(state["pid"]))
    elif words[0] == "rm":
        one(words[-1]).unlink()
        tell_envoy(work)
    else:
        sys.exit(f"docker {' '.join(words)}: not played")


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


def until(what, check, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.2)
    sys.exit(f"not within {seconds} s: {what}")


def configure(work, ports, wasm, prepared):
    """The shipped file with watched endpoints, targets that a small load is over, and windows of seconds."""
    text = (ROOT / "envoy/watched.yaml").read_text()
    for old, new in [
        ("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {ports['gateway']}"),
        ("port_value: 9901", f"port_value: {ports['admin']}"),
        ("port_value: 9902", f"port_value: {ports['files']}"),
        ("0.0.0.0, port_value: 9903", f"127.0.0.1, port_value: {ports['metrics']}"),
        ("port_value: 9904", f"port_value: {ports['live']}"),
        ("/etc/warmpath/warmpath.wasm", wasm), ("/etc/warmpath/qwen3.warmpath", prepared),
        ("/etc/warmpath/live.html", str(ROOT / "envoy/live.html")), ("/dev/stdout", str(work / "access.log")),
        ('"min_replicas": 2, "max_replicas": 16, "first_token_ms": 1000',
         f'"min_replicas": {FEWEST}, "max_replicas": {MOST}, "prefill_share": 0.02, "up_after_s": 3, "down_after_s": 8'),
    ]:
        assert old in text, old
        text = text.replace(old, new)
    for cluster in ("replicas", "replicas_poll"):
        eds = work / "eds" / f"{cluster}.json"
        source = {"resource_api_version": "V3", "path_config_source":
                  {"path": str(eds), "watched_directory": {"path": str(eds.parent)}}}
        head = f"  - name: {cluster}\n    type: STATIC\n"
        before, rest = text.split(head)
        section, after = re.split(r"\n\n", rest, maxsplit=1)
        section = section.split("    load_assignment:")[0]
        text = (f"{before}  - name: {cluster}\n    type: EDS\n"
                f"    eds_cluster_config: {{service_name: {cluster}, eds_config: {json.dumps(source)}}}\n{section}\n{after}")
    (work / "envoy.yaml").write_text(text)


def play(work, ports, programs, began):
    gateway = f"http://127.0.0.1:{ports['gateway']}"

    def load(requests, seconds, seed):
        return subprocess.Popen(
            [f"{programs}/warmpath-replay", "live", "--url", gateway, "--requests", str(requests), "--duration",
             str(seconds), "--seed", str(seed), "--model", "qwen3"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    def finish(process, what):
        output, _ = process.communicate(timeout=240)
        # Its exit code also says whether it kept its own times, which a busy machine does not.
        played = re.search(r"\d+ requests, hit rate [\d.]+ %", output)
        if not played or "failed" in output:
            sys.exit(f"requests failed while {what}:\n{output[-3000:]}")
        print(f"  no request failed while {what}: {played.group(0)}")

    count = lambda: len(replicas(work))
    busy = load(350, 30, 1)
    until("more replicas", lambda: count() == MOST, 100)
    print(f"  load rose: {FEWEST} replicas, then {count()}")
    finish(busy, "replicas were added")
    quiet = load(40, 30, 2)
    until("fewer replicas", lambda: count() == FEWEST, 150)
    finish(quiet, "replicas were drained and stopped")
    log = (work / "docker.log").read_text().splitlines()
    drained = [line.split()[1] for line in log if line.startswith("exec ")]
    stopped = [line.split()[-1] for line in log if line.startswith("stop ")]
    if drained != stopped or len(drained) != MOST - FEWEST:
        sys.exit(f"drained {drained}, stopped {stopped}")
    print(f"  load fell: {drained} drained, one after the other, and stopped in that order; {count()} replicas")
    if any(process.poll() is not None for process in began):
        sys.exit("something ended on its own")


def main(envoy, prometheus, wasm, prepared, programs, folder):
    work = pathlib.Path(folder).resolve()
    subprocess.run(["rm", "-rf", str(work)], check=True)
    for name in ("replicas", "eds", "bin", "prometheus"):
        (work / name).mkdir(parents=True)
    stub = work / "bin" / "docker"
    stub.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" docker "{work}" "$@"\n')
    stub.chmod(0o755)
    os.environ.update(MOCK=f"{programs}/warmpath-mock-replica", PREPARED=prepared)
    names = ("gateway", "admin", "files", "metrics", "live", "prometheus")
    ports = dict(zip(names, free_ports(len(names))))
    configure(work, ports, wasm, prepared)
    shipped = ROOT / "envoy/prometheus"
    text = (shipped / "prometheus.yml").read_text().split("# What engines say")[0]
    text = text.replace("envoy:9903", f"127.0.0.1:{ports['metrics']}").replace("5s", "1s")
    (work / "prometheus/prometheus.yml").write_text(text)
    for name in ("warmpath.rules.yml", "warmpath.alerts.yml"):
        (work / "prometheus" / name).write_text((shipped / name).read_text())
    began = []
    def begin(name, *arguments, **more):
        log = open(work / f"{name}.log", "wb")
        began.append(subprocess.Popen(arguments, stdout=log, stderr=log, **more))

    try:
        for _ in range(FEWEST):
            start_replica(work)
        begin("envoy", envoy, "-c", str(work / "envoy.yaml"), "--concurrency", "2", "--disable-hot-restart", "-l", "warning",
              "--service-node", "try", "--service-cluster", "try")
        begin("prometheus", prometheus, f"--config.file={work}/prometheus/prometheus.yml", "--log.level=error",
              f"--storage.tsdb.path={work}/prometheus/data", f"--web.listen-address=127.0.0.1:{ports['prometheus']}")
        stats = f"http://127.0.0.1:{ports['admin']}/stats?filter=warmpath_vms"
        until("tokenizers", lambda: "state=ready;warmpath_vms: 2" in (fetch(stats) or ""))
        query = urllib.parse.quote("max(warmpath:recommended_replicas)")
        until("a recommendation", lambda: '"value"' in (
            fetch(f"http://127.0.0.1:{ports['prometheus']}/api/v1/query?query={query}") or ""))
        environment = {
            **os.environ, "PATH": f"{work}/bin:{os.environ['PATH']}",
            "PROMETHEUS": f"http://127.0.0.1:{ports['prometheus']}", "METRICS": f"http://127.0.0.1:{ports['metrics']}",
        }
        begin("scale", str(ROOT / "scripts/scale.sh"), "--every", "1", "--for", "400", env=environment)
        play(work, ports, programs, began)
    except SystemExit:
        for log in sorted(work.glob("*.log")):
            if log.name != "access.log":
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
        raise
    finally:
        for process in reversed(began):
            process.terminate()
        for process in began:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for one in replicas(work):
            if alive(one["pid"]):
                os.kill(one["pid"], signal.SIGKILL)


if sys.argv[1:2] == ["docker"]:
    docker(pathlib.Path(sys.argv[2]), sys.argv[3:])
elif len(sys.argv) == 7:
    main(*sys.argv[1:])
else:
    sys.exit(__doc__)
