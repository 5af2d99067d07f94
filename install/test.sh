#!/usr/bin/env bash
# Installs what the tests need and runs every test.
#
#   install/test.sh              everything, real vLLM and NVIDIA's NIXL included
#   install/test.sh --offline    without what must be downloaded: no real vLLM, and no NIXL unless it is there
#
# vLLM's environment, NIXL and the tiny models go to ${SPARK_KV_CACHE:-$HOME/.cache/spark-kv} and are made when missing.
set -euo pipefail
cd "$(dirname "$0")/.."

offline=
for argument in "$@"; do
  case $argument in
    --offline) offline=1 ;;
    *) sed -n '2,7p' "$0"; exit 64 ;;
  esac
done

begin=$SECONDS
say() { printf '== %s (%d:%02d)\n' "$*" $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)); }

# Silence looks like a hang: a line at least every minute, whatever a step prints itself.
( while sleep 50; do say "still at work"; done ) & ticker=$!
stop_ticker() { kill "$ticker" 2>/dev/null && wait "$ticker" 2>/dev/null || :; }
trap stop_ticker EXIT

need() { # COMMAND DEBIAN_PACKAGE
  command -v "$1" >/dev/null && return
  [ -n "$offline" ] && { echo "missing: $1 (Debian package $2); --offline installs nothing" >&2; exit 1; }
  say "installing $2"
  [ -n "${updated:-}" ] || { apt-get update -qq; updated=1; }
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null
}
need g++ g++
need python3 python3
command -v cargo >/dev/null || { echo "missing: the Rust toolchain (cargo)" >&2; exit 1; }

say "formatting"
cargo fmt --check
say "lints"
cargo clippy --all-targets --quiet -- -D warnings
say "building the tests"
cargo build --quiet
cargo test --no-run --quiet

if [ -z "$offline" ]; then
  say "NIXL"
  install/nixl.sh >/dev/null
  export SPARK_KV_NIXL=1 # from here on its absence is a failure
  say "vLLM's environment and the tiny models"
  target/debug/spark-kv provision --profile cpu-tiny
  target/debug/spark-kv provision --profile cpu-tiny-hybrid
  say "the plugin against vLLM's own tiering manager"
  python=$(target/debug/spark-kv provision --profile cpu-tiny --print-python)
  "$python" -m pytest -q -p no:cacheprovider tests/plugin
else
  export SPARK_KV_OFFLINE=1
fi

say "all tests"
stop_ticker
if cargo nextest --version >/dev/null 2>&1; then
  exec cargo nextest run
else
  exec cargo test --no-fail-fast -- --test-threads=2
fi
