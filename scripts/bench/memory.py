#!/usr/bin/env python3
"""Resident memory of Envoy with the shipped configuration; scripts/bench.sh builds what it needs."""
import argparse
import concurrent.futures
import json
import pathlib
import random
import re
import subprocess
import tempfile
import time
import urllib.request

from gateway import configuration, end, free_ports, scrape, start, value, wait, without_filter

WORKERS = (1, 4, 16)
REQUESTS = 600
WORDS = "river stone garden window letter market forest engine castle silver winter bridge".split()


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
    text = configuration(args.wasm, ports[:4], ports[4:], models)
    config = folder / "envoy.yaml"
    config.write_text(text if with_filter else without_filter(text))
    listens = [option for port in ports[4:] for option in ("--listen", f"127.0.0.1:{port}")]
    # A mock has one tokenizer, whatever names it serves.
    served = [f"{models[0][0]}={models[0][1]}", *(name for name, _ in models[1:])]
    names = [option for name in served for option in ("--model", name)]
    with (folder / "log").open("w") as log:
        mock = subprocess.Popen([args.mock, *listens, *names], stdout=log, stderr=log)
        envoy = start(args.envoy, config, workers, log)
        try:
            def is_ready():
                page = scrape(ports[1])
                return value(page, 'warmpath_vms{state="ready"}') == workers or (not with_filter and page)

            wait(is_ready, (envoy, mock), folder / "log")
            time.sleep(2)
            idle = rss_mb(envoy.pid)
            with concurrent.futures.ThreadPoolExecutor(16) as clients:
                list(clients.map(lambda number: send(ports[0], models, number), range(REQUESTS)))
            time.sleep(1)
            vms = re.findall(r'^warmpath_vm_memory_bytes\{vm="\d+"\} ([\d.]+)$', scrape(ports[1]), re.M)
            return idle, rss_mb(envoy.pid), max(map(float, vms), default=0.0) / 1e6
        finally:
            end((envoy, mock))


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
