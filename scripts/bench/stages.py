#!/usr/bin/env python3
"""Each stage of a decision alone, natively and in Envoy's VM; scripts/bench.sh builds what it needs."""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from gateway import end, free_ports, heading, machine

LIMIT_SECONDS = 150
LINE = re.compile(r"bench stage=(.*) us=([\d.]+) longest_us=([\d.]+) input=(.*?)\s*$", re.M)


def bootstrap(plugin, prepared, only):
    """One VM, the main thread's, and a listener that serves it the prepared file."""
    (port,) = free_ports(1)
    manager = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "layered_runtime": {"layers": [{"name": "static", "static_layer": {"http.async_response_buffer_limit": 200_000_000}}]},
        "bootstrap_extensions": [{"name": "envoy.bootstrap.wasm", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.wasm.v3.WasmService",
            "singleton": True,
            "config": {
                "name": "bench",
                "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": f"/model {only}"},
                "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": str(plugin)}}},
            },
        }}],
        "static_resources": {
            "listeners": [{"name": "files", "address": address, "filter_chains": [{"filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": {
                    "@type": manager,
                    "stat_prefix": "files",
                    "route_config": {
                        "max_direct_response_body_size_bytes": 200_000_000,
                        "virtual_hosts": [{"name": "files", "domains": ["*"], "routes": [{
                            "match": {"path": "/model"},
                            "direct_response": {"status": 200, "body": {"filename": str(prepared)}}}]}],
                    },
                    "http_filters": [{
                        "name": "envoy.filters.http.router",
                        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
                    }],
                },
            }]}]}],
            "clusters": [{
                "name": "files",
                "type": "STATIC",
                "per_connection_buffer_limit_bytes": 200_000_000,
                "load_assignment": {"cluster_name": "files", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]},
            }],
        },
    }


def read(text):
    if "bench end" not in text:
        sys.exit(f"the cases did not come to their end:\n{text[-3000:]}")
    return {(stage, name): (float(us), float(longest)) for stage, us, longest, name in LINE.findall(text)}


def in_envoy(args, folder, prepared):
    config, log = folder / "envoy.json", folder / "log"
    config.write_text(json.dumps(bootstrap(args.plugin, prepared, args.only)))
    with log.open("w") as out:
        envoy = subprocess.Popen(
            [args.envoy, "-c", str(config), "--concurrency", "1", "-l", "warn", "--disable-hot-restart"], stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while time.monotonic() < deadline and envoy.poll() is None:
                text = log.read_text(errors="replace")
                if "bench end" in text or "bench failed" in text:
                    break
                time.sleep(0.2)
        finally:
            end([envoy])
    return read(log.read_text(errors="replace"))


def main():
    parser = argparse.ArgumentParser()
    for name in ("envoy", "plugin", "native", "prepare"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model", default="tests/data/models/qwen3")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", default="", help="one stage")
    args = parser.parse_args()
    report = machine(args.envoy)
    print(heading(report), f"; model {args.model}\n", sep="")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepared = folder / "model.warmpath"
        subprocess.run([args.prepare, args.model, "--output", str(prepared)], check=True, stdout=subprocess.DEVNULL)
        native = read(subprocess.run([args.native, str(prepared), *args.only.split()], capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout)
        wasm = in_envoy(args, folder, prepared)
    if native.keys() != wasm.keys():
        sys.exit(f"not the same cases: {sorted(native.keys() ^ wasm.keys())}")
    print("| stage | input | native us | in Envoy us | ratio | longest step in Envoy, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    report["stages"] = []
    for (stage, case), (native_us, native_longest) in sorted(native.items(), key=lambda item: (item[0][1].startswith("worst"), 0)):
        us, longest = wasm[stage, case]
        print(f"| {stage} | {case} | {native_us:,.1f} | {us:,.1f} | {us / max(native_us, 0.01):.1f} | {longest / 1e3:.2f} |")
        report["stages"].append({"stage": stage, "input": case, "native_us": native_us, "native_longest_us": native_longest,
                                 "wasm_us": us, "wasm_longest_us": longest})
    print("\nThe decision against hashing the prompt's blocks: 10,000 tokens where nothing else is said\n")
    print("| decision | native | in Envoy |")
    print("| --- | --- | --- |")
    report["decisions"] = []
    for stage, case in native:
        if stage == "decide" and not case.startswith("hashing"):
            hashing = ("decide", "hashing 100,000 tokens" if "100,000" in case else "hashing alone")
            ratios = [figures[stage, case][0] / figures[hashing][0] for figures in (native, wasm)]
            print(f"| {case} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
            report["decisions"].append({"case": case, "native": ratios[0], "wasm": ratios[1]})
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


main()
