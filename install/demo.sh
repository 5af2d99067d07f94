#!/usr/bin/env bash
# Two nodes with real vLLM on this machine, three growing conversations, one engine restart, one table.
#
#   install/demo.sh            installs, builds, runs, cleans up; about ten minutes on two cores the first time
#   install/demo.sh --keep     leaves both nodes running and says how to stop them
#
# Exits 0 only when every prompt's tokens came from where they should and every text was the same.
set -euo pipefail
cd "$(dirname "$0")/.."

keep=
case ${1:-} in
  '') ;;
  --keep) keep=1 ;;
  *) sed -n '2,8p' "$0"; exit 64 ;;
esac

begin=$SECONDS
say() { printf '== %d:%02d %s\n' $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) "$*"; }
quiet() { # WHAT COMMAND…: runs it with its output in a log, a line every half minute, the log when it fails
  local what=$1 log; shift
  log=$(mktemp)
  say "$what"
  ( while sleep 30; do say "  still: $what"; done ) & local ticker=$!
  local code=0
  "$@" >"$log" 2>&1 || code=$?
  kill "$ticker" 2>/dev/null; wait "$ticker" 2>/dev/null || :
  [ "$code" -eq 0 ] || { cat "$log"; echo "failed: $what" >&2; }
  rm -f "$log"
  return "$code"
}
need() { # COMMAND DEBIAN_PACKAGE
  command -v "$1" >/dev/null && return
  [ -n "${updated:-}" ] || { quiet "reading Debian's package lists" apt-get update; updated=1; }
  quiet "installing $2 (Debian package)" env DEBIAN_FRONTEND=noninteractive apt-get install -y "$2"
}

need g++ g++
need python3 python3
command -v cargo >/dev/null || { echo "missing: the Rust toolchain (cargo)" >&2; exit 1; }

quiet "building spark-kv (release)" cargo build --release
binary=${CARGO_TARGET_DIR:-target}/release/spark-kv
cache=${SPARK_KV_CACHE:-$HOME/.cache/spark-kv}
say "a vLLM environment for the CPU and a small model, in $cache"
"$binary" provision --profile cpu-tiny
python=$("$binary" provision --profile cpu-tiny --print-python)
# A model that computes more for each KV byte than the tests' does; the tests' is so small that nothing is worth keeping.
model=$cache/demo-$(sha256sum install/tiny_model.py | cut -c1-16)
[ -e "$model" ] || quiet "making the demo's model" "$python" install/tiny_model.py "$model" --family llama-wide

folder=$(mktemp -d "${TMPDIR:-/tmp}/spark-kv-demo.XXXXXX")
python3 install/demo.py --binary "$binary" --model "$model" --folder "$folder" ${keep:+--keep}
[ -n "$keep" ] || rm -rf "$folder"
say "done"
