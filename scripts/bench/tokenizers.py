#!/usr/bin/env python3
"""Runs the tokenizer_load plugin in Envoy for each model and form; scripts/bench.sh builds what it needs."""
import argparse
import gzip
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

FORMS = ("json", "parts", "prepared")
LIMIT_SECONDS = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listener(name, port, filters, routes):
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                "stat_prefix": name,
                "route_config": {
                    "max_direct_response_body_size_bytes": 200_000_000,
                    "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}],
                },
                "http_filters": filters + [{
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
                }],
            },
        }]}],
    }


def bootstrap(plugin, form, text, model):
    files, other = free_port(), free_port()

    def file_route(path, name):
        return {"match": {"path": path}, "direct_response": {"status": 200, "body": {"filename": str(name)}}}

    wasm = {
        "name": "envoy.filters.http.wasm",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            "config": {
                "name": "bench",
                "configuration": {
                    "@type": "type.googleapis.com/google.protobuf.StringValue",
                    "value": f"{form} /text /model",
                },
                "vm_config": {
                    "vm_id": "bench",
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": {"local": {"filename": str(plugin)}},
                },
            },
        },
    }
    served = [file_route("/text", text), file_route("/model", model)]
    return {
        "layered_runtime": {"layers": [{"name": "static", "static_layer": {"http.async_response_buffer_limit": 200_000_000}}]},
        "static_resources": {
            "listeners": [
                listener("files", files, [], served),
                listener("plugin", other, [wasm], [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]),
            ],
            "clusters": [{
                "name": "files",
                "type": "STATIC",
                "per_connection_buffer_limit_bytes": 200_000_000,
                "load_assignment": {"cluster_name": "files", "endpoints": [{"lb_endpoints": [{"endpoint": {
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": files}}}}]}]},
            }],
        },
    }


def rss_mb(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


def run(args, folder, form, text, model, concurrency):
    """One Envoy; returns the log's numbers, the worst over its VMs, and its memory at the end."""
    config = folder / "envoy.json"
    config.write_text(json.dumps(bootstrap(args.plugin, form, text, model)))
    log = folder / "envoy.log"
    end_of = {"none": None, "parts": "bench from_config", "json": "bench encoded", "prepared": "bench encoded"}[form]
    with log.open("w") as out:
        envoy = subprocess.Popen(
            [args.envoy, "-c", str(config), "--concurrency", str(concurrency), "-l", "warn", "--base-id", str(os.getpid())],
            stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while time.monotonic() < deadline and envoy.poll() is None:
                lines = log.read_text(errors="replace")
                # Each worker has a VM, and the main thread one more.
                if end_of and lines.count(end_of) >= concurrency + 1 or "bench failed" in lines:
                    break
                if end_of is None and time.monotonic() > deadline - LIMIT_SECONDS + 4:
                    break
                time.sleep(0.2)
            time.sleep(1)
            memory = rss_mb(envoy.pid) if envoy.poll() is None else float("nan")
        finally:
            envoy.terminate()
            envoy.wait()
    lines = log.read_text(errors="replace")
    if end_of and lines.count(end_of) < concurrency + 1:
        print(lines[-3000:], file=sys.stderr)
    return lines, memory


def worst(lines, event, field, pick=max):
    values = [float(v) for v in re.findall(rf"bench {event} .*?\b{field}=([\d.]+)", lines)]
    return pick(values) if values else float("nan")


def models(paths):
    for path in map(pathlib.Path, paths):
        inner = [path] if any(path.glob("tokenizer.json*")) else sorted(p for p in path.iterdir() if any(p.glob("tokenizer.json*")))
        yield from inner


def main():
    # Who is asked to end ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser()
    for name in ("envoy", "plugin", "prepare"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--text", default="")
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    print("| model | form | file MB | load ms | longest stall ms | VM MB | RSS MB, 1 worker | 4 workers | encode MB/s first / warm |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = folder / "text"
        source = pathlib.Path(args.text) if args.text else pathlib.Path("README.md")
        text.write_bytes(source.read_bytes()[:37_600])
        idle = [run(args, folder, "none", text, text, n)[1] for n in (1, 4)]
        print(f"| none | idle plugin | | | | | {idle[0]:.0f} | {idle[1]:.0f} | |", flush=True)
        for model in models(args.models):
            plain, prepared = folder / "tokenizer.json", folder / "prepared"
            packed = model / "tokenizer.json.gz"
            plain.write_bytes(gzip.decompress(packed.read_bytes()) if packed.exists() else (model / "tokenizer.json").read_bytes())
            made = subprocess.run([args.prepare, str(model), "--output", str(prepared)], capture_output=True, text=True)
            if made.returncode:
                print(f"| {model.name} | {made.stderr.strip()} |", flush=True)
                continue
            for form in FORMS:
                served = prepared if form == "prepared" else plain
                lines, one = run(args, folder, form, text, served, 1)
                size = served.stat().st_size / 1e6
                if form == "parts":
                    stall = worst(lines, "from_config", "ms")
                    print(f"| {model.name} | crate's tables from parts | | | {stall:.0f} | | | | |", flush=True)
                    continue
                four = run(args, folder, form, text, served, 4)[1]
                row = [worst(lines, "loaded", field) for field in ("load_ms", "stall_ms", "vm_mb")]
                first, warm = (worst(lines, "encoded", field, min) for field in ("first_mbs", "warm_mbs"))
                print(f"| {model.name} | {form} | {size:.1f} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.0f} | {one:.0f} | {four:.0f} | {first:.0f} / {warm:.0f} |", flush=True)


main()
