#!/usr/bin/env python3
"""Runs a wasm32-wasip1 test binary under wasmtime: cargo's runner for that target.

scripts/test.sh puts the PyPI package `wasmtime` into .work/venv; this file re-executes
itself with that interpreter when the current one lacks the package.
"""
import os
import sys

try:
    import wasmtime
except ImportError:
    venv = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".work", "venv", "bin", "python")
    if os.environ.get("WARMPATH_WASM_RUNNER") == "venv" or not os.path.exists(venv):
        sys.exit("wasm-runner: no wasmtime; run ./scripts/test.sh once, it sets up .work/venv")
    os.environ["WARMPATH_WASM_RUNNER"] = "venv"
    os.execv(venv, [venv, *sys.argv])

config = wasmtime.Config()
config.cache = True
engine = wasmtime.Engine(config)
linker = wasmtime.Linker(engine)
linker.define_wasi()
store = wasmtime.Store(engine)
wasi = wasmtime.WasiConfig()
wasi.argv = sys.argv[1:]
wasi.inherit_stdout()
wasi.inherit_stderr()
wasi.preopen_dir(os.getcwd(), "/")
wasi.env = [(key, value) for key, value in os.environ.items() if key.startswith(("RUST_", "WARMPATH_"))]
store.set_wasi(wasi)
instance = linker.instantiate(store, wasmtime.Module.from_file(engine, sys.argv[1]))
try:
    instance.exports(store)["_start"](store)
except wasmtime.ExitTrap as exit_trap:
    sys.exit(exit_trap.code)
