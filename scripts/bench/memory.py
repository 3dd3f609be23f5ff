#!/usr/bin/env python3
"""Resident memory of Envoy with the shipped configuration; scripts/bench.sh builds what it needs."""
import argparse
import concurrent.futures
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

WORKERS = (1, 4, 16)
LIMIT_SECONDS = 180
REQUESTS = 600
WORDS = "river stone garden window letter market forest engine castle silver winter bridge".split()


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def configuration(args, ports, models):
    """The shipped file with this machine's paths and ports, and as many models."""
    text = pathlib.Path("envoy/envoy.yaml").read_text()
    inference, admin, files, metrics, replicas = *ports[:4], ports[4:]

    def replace(old, new):
        nonlocal text
        if old not in text:
            sys.exit(f"envoy/envoy.yaml has no {old!r}")
        text = text.replace(old, new)

    replace("/etc/warmpath/warmpath.wasm", args.wasm)
    replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {inference}")
    replace("address: 0.0.0.0, port_value: 9903", f"address: 127.0.0.1, port_value: {metrics}")
    for old, new in [(9901, admin), (9902, files), *zip((8001, 8002, 8003, 8004), replicas)]:
        replace(f"port_value: {old}", f"port_value: {new}")
    route = re.search(r"^( *)- match: \{path: /qwen3\.warmpath\}\n.*\n", text, re.M)
    routes = "".join(
        f"{route[1]}- match: {{path: /{i}}}\n{route[1]}  direct_response: {{status: 200, body: {{filename: {path}}}}}\n"
        for i, (_, path) in enumerate(models)
    )
    text = text.replace(route[0], routes)
    plugin = re.search(r"value: \|\n((?: {20}.*\n)+)", text)
    options = json.loads(plugin[1])
    options["models"] = [
        {"name": name, "prepared": {"cluster": "warmpath_files", "path": f"/{i}"}} for i, (name, _) in enumerate(models)
    ]
    return text.replace(plugin[1], " " * 20 + json.dumps(options) + "\n")


def scrape(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats/prometheus", timeout=5) as page:
            return page.read().decode()
    except (OSError, urllib.error.URLError):
        return ""


def value(page, series):
    found = re.search(rf"^{re.escape(series)} ([\d.]+)$", page, re.M)
    return float(found[1]) if found else 0.0


def rss_mb(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024 / 1e6


def send(port, models, number):
    random_words = random.Random(number)
    content = " ".join(random_words.choice(WORDS) for _ in range(2000))
    body = {
        "model": models[number % len(models)][0],
        "max_tokens": 2,
        "messages": [{"role": "user", "content": f"Case {number}: {content}"}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def run(args, folder, workers, models, with_filter=True):
    """One Envoy: its memory when all is loaded, and after traffic."""
    ports = free_ports(8)
    text = configuration(args, ports, models)
    if not with_filter:
        start = text.index("          - name: warmpath\n")
        text = text[:start] + text[text.index("          - name: envoy.filters.http.router", start):]
    config = folder / "envoy.yaml"
    config.write_text(text)
    listens = [option for port in ports[4:] for option in ("--listen", f"127.0.0.1:{port}")]
    # A mock has one tokenizer, whatever names it serves.
    served = [f"{models[0][0]}={models[0][1]}", *(name for name, _ in models[1:])]
    names = [option for name in served for option in ("--model", name)]
    with (folder / "log").open("w") as log:
        mock = subprocess.Popen([args.mock, *listens, *names], stdout=log, stderr=log)
        envoy = subprocess.Popen(
            [args.envoy, "-c", str(config), "--concurrency", str(workers), "-l", "error", "--disable-hot-restart"],
            stdout=log, stderr=log)
        try:
            ready = 'warmpath_vms{state="ready"}'
            deadline = time.monotonic() + LIMIT_SECONDS
            while True:
                page = scrape(ports[1])
                if value(page, ready) == workers or (not with_filter and page):
                    break
                if time.monotonic() > deadline or envoy.poll() is not None or mock.poll() is not None:
                    sys.exit(f"not ready:\n{(folder / 'log').read_text()[-3000:]}")
                time.sleep(0.2)
            time.sleep(2)
            idle = rss_mb(envoy.pid)
            with concurrent.futures.ThreadPoolExecutor(16) as clients:
                list(clients.map(lambda number: send(ports[0], models, number), range(REQUESTS)))
            time.sleep(1)
            vms = re.findall(r'^warmpath_vm_memory_bytes\{vm="\d+"\} ([\d.]+)$', scrape(ports[1]), re.M)
            return idle, rss_mb(envoy.pid), max(map(float, vms), default=0.0) / 1e6
        finally:
            for process in (envoy, mock):
                process.terminate()
                process.wait()


def main():
    parser = argparse.ArgumentParser()
    for name in ("envoy", "wasm", "prepare", "mock"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        models = []
        # Three models: what is given, once more under other names and files if that is fewer.
        for i in range(3):
            source = pathlib.Path(args.models[i % len(args.models)])
            prepared = folder / f"{i}.warmpath"
            subprocess.run([args.prepare, str(source), "--output", str(prepared)], check=True, stdout=subprocess.DEVNULL)
            models.append((f"{source.name}-{i}", prepared))
        print(f"models: {', '.join(name for name, _ in models)}; {REQUESTS} prompts of some 2,000 tokens\n")
        print("| workers | models | RSS MB, all loaded | after traffic | largest VM MB |")
        print("| --- | --- | --- | --- | --- |")
        for workers in WORKERS:
            for count in (0, 1, 3):
                idle, busy, vm = run(args, folder, workers, models[: count or 1], count > 0)
                print(f"| {workers} | {count or 'no filter'} | {idle:.0f} | {busy:.0f} | {vm:.0f} |", flush=True)


main()
