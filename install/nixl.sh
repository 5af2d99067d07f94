#!/usr/bin/env bash
# Puts NVIDIA's NIXL, with its own UCX, where nodes and tests find it: ${SPARK_KV_CACHE:-$HOME/.cache/spark-kv}/nixl.
# From NVIDIA's wheel; needs no GPU, no RDMA card and no CUDA to be there. Once it is there, nothing is downloaded.
#   nixl.sh          prints the path of the library
set -euo pipefail

version=1.5.1
cache=${SPARK_KV_CACHE:-$HOME/.cache/spark-kv}
packages=$cache/nixl/lib/python3/site-packages
library=$packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so

if [ ! -e "$packages/nixl_cu12-$version.dist-info/RECORD" ]; then
  mkdir -p "$cache"
  exec 9>"$cache/nixl.lock"
  flock 9
  fresh=$(mktemp -d "$cache/nixl.XXXXXX")
  trap 'rm -rf "$fresh"' EXIT
  # Wheels are tagged with Python versions, which the C library does not care about; pip's own decides.
  # The system's own Python may have no pip, or not let itself be used.
  python3 -m venv "$fresh/venv"
  "$fresh/venv/bin/python" -m pip download -q --no-deps --only-binary=:all: -d "$fresh" "nixl-cu12==$version"
  mkdir -p "$fresh/nixl/lib/python3/site-packages"
  python3 -m zipfile -e "$fresh"/nixl_cu12-*.whl "$fresh/nixl/lib/python3/site-packages"
  rm -rf "$cache/nixl"
  mv "$fresh/nixl" "$cache/nixl"
fi
[ -e "$library" ] || { echo "no $library in the wheel" >&2; exit 1; }
echo "$library"
