#!/usr/bin/env bash
# Puts other routers into ${SPARK_KV_CACHE:-$HOME/.cache/spark-kv}/peers, each in an environment of its own, and prints how
# `spark-kv bench router` and `spark-kv bench matrix` start them. What is there is not downloaded again.
#   peers.sh router    prints the arguments for `bench router`
#   peers.sh matrix    prints the arguments for `bench matrix`, one to a line
# Use: mapfile -t peers < <(install/peers.sh matrix); spark-kv bench matrix "${peers[@]}"
set -euo pipefail

what=${1:-matrix}
cache=${SPARK_KV_CACHE:-$HOME/.cache/spark-kv}
peers=$cache/peers

mkdir -p "$cache"
exec 9>"$cache/peers.lock"
flock 9
for package in vllm-router==0.1.17 smg==1.13.0 sglang-router==0.3.2; do
  name=${package%%==*}
  [ -e "$peers/$package" ] && continue
  echo "$package" >&2
  rm -rf "${peers:?}/$name"
  python3 -m venv "$peers/$name"
  "$peers/$name/bin/python" -m pip install -q "$package" >&2
  touch "$peers/$package"
done

quiet="--host 127.0.0.1 --port {port} --worker-urls {backends}"
vllm="$peers/vllm-router/bin/vllm-router $quiet --log-level warning --prometheus-port 29201"
smg="$peers/smg/bin/smg launch $quiet --log-level warn --prometheus-port 29205 --disable-tokenizer-autoload"
sglang="$peers/sglang-router/bin/python -m sglang_router.launch_router $quiet --log-level warn --prometheus-port 29207"
say() { printf '%s\n' --peer "$1=$2"; }
case $what in
  router)
    say vllm-router "$vllm --policy cache_aware"
    ;;
  matrix)
    say vllm-kv "$vllm --policy kv_aware --kv-event-source {backend0}={events0} --kv-event-source {backend1}={events1} --kv-event-block-size 64 --kv-event-model mock"
    say vllm-cache "$vllm --policy cache_aware"
    ;;
  *)
    echo "router or matrix, not $what" >&2
    exit 64
    ;;
esac
say smg-cache "$smg --policy cache_aware"
say sglang-cache "$sglang --policy cache_aware"
