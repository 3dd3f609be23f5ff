# What Warmpath is delivered in, and the image of the demo in docker-compose.yml. Needs Docker alone.
#
#   docker build --target plugin -t warmpath .             the filter, /plugin.wasm and nothing else
#   docker build --target tokenizers -t tokenizers .       prepared tokenizers, and nothing else
#   docker build --target agent -t warmpath-agent .        what stands beside an engine and reports its cache
#   docker build --target demo -t warmpath-demo .          all of it, and the demo's programs
#
# The first build takes ten minutes or more: everything is compiled from source, by the versions that
# Cargo.lock names.

FROM rust:1.95.0-bookworm AS build
WORKDIR /src
RUN rustup target add wasm32-wasip1
COPY . .
RUN cargo build --locked --release --lib --target wasm32-wasip1
RUN cargo build --locked --profile quick --features demo --bins
RUN target/quick/warmpath-prepare tests/data/models/qwen3 -o qwen3.warmpath

# Istio's WasmPlugin and anything else that reads OCI images expects the module under this name.
FROM scratch AS plugin
COPY --from=build /src/target/wasm32-wasip1/release/warmpath.wasm /plugin.wasm

FROM scratch AS tokenizers
COPY --from=build /src/qwen3.warmpath /qwen3.warmpath

FROM debian:12.11-slim AS agent
COPY --from=build /src/target/quick/warmpath-agent /usr/local/bin/
USER 65532:65532
ENTRYPOINT ["warmpath-agent"]

FROM debian:12.11-slim AS demo
COPY --from=build /src/target/wasm32-wasip1/release/warmpath.wasm /src/qwen3.warmpath /warmpath/
COPY --from=build /src/target/quick/warmpath-agent /src/target/quick/warmpath-mock-replica \
    /src/target/quick/warmpath-prepare /src/target/quick/warmpath-replay /usr/local/bin/
COPY envoy/compose/replica.sh /usr/local/bin/replica.sh
# Nothing in it needs to be root.
USER 65532:65532
