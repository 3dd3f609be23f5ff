"""An Envoy with the shipped configuration, for a bench: other ports, other files, and what else the bench changes."""
import json
import pathlib
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

LIMIT_SECONDS = 180

# Who is asked to end ends what it started: Python's own way would leave it behind.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def free_ports(count, offset=0):
    """Ports that nobody has, and with an offset those so far above them. Not of those that systems hand out: between this and
    the use of it, one of these may become any connection's."""
    found = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)
        pair, taken = (port, port + offset), [n for p in found for n in (p, p + offset)]
        if all(n not in taken and is_free(n) for n in pair):
            found.append(port)
    return found


def is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def configuration(wasm, own, replicas, models):
    """The shipped file with this machine's paths and ports, and as many models: names with their prepared files.

    `own` are four free ports: inference, admin, files and metrics.
    """
    text = pathlib.Path("envoy/envoy.yaml").read_text()
    inference, admin, files, metrics = own

    def replace(old, new):
        nonlocal text
        if old not in text:
            sys.exit(f"envoy/envoy.yaml has no {old!r}")
        text = text.replace(old, new)

    replace("/etc/warmpath/warmpath.wasm", str(wasm))
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


def without_filter(text):
    """The same configuration, but for the filter."""
    start = text.index("          - name: warmpath\n")
    return text[:start] + text[text.index("          - name: envoy.filters.http.router", start):]


def start(envoy, config, workers, log):
    """Starts an Envoy. Whoever starts it ends it."""
    return subprocess.Popen(
        [envoy, "-c", str(config), "--concurrency", str(workers), "-l", "error", "--disable-hot-restart"],
        stdout=log, stderr=log)


def scrape(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats/prometheus", timeout=5) as page:
            return page.read().decode()
    except (OSError, urllib.error.URLError):
        return ""


def value(page, series):
    found = re.search(rf"^{re.escape(series)} ([\d.]+)$", page, re.M)
    return float(found[1]) if found else 0.0


def wait(is_ready, processes, log):
    """Polls until it is ready; the bench ends with the log if that takes too long, or a process is gone."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            sys.exit(f"not ready:\n{pathlib.Path(log).read_text()[-3000:]}")
        time.sleep(0.2)


def end(processes):
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def output(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def machine(envoy):
    """What a figure depends on beside the code."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": sum(line.startswith("processor") for line in lines),
        "system": platform.platform(),
        "load_before": float(pathlib.Path("/proc/loadavg").read_text().split()[0]),
        "envoy": output(envoy, "--version").split("version: ")[-1].split("/")[1],
        "commit": output("git", "describe", "--always", "--dirty"),
    }


def heading(report):
    return (f"{report['cpu']}, {report['cores']} cores, load {report['load_before']} before; Envoy {report['envoy']};"
            f" commit {report['commit']}")
