#!/usr/bin/env bash
# Two boxes on one machine, for tests and for trying things without a cable: two network namespaces joined by two
# shaped cables. Needs root. Every command names the pair by a word, so that several can stand at once.
#   rails.sh up NAME [MBIT [MBIT1]]   both cables carry MBIT megabits a second (default 400), the second one MBIT1
#   rails.sh rate NAME RAIL MBIT      shapes a cable anew, while it carries
#   rails.sh cut NAME RAIL            pulls a cable: its packets vanish, both ends still look well
#   rails.sh unplug NAME RAIL         the same with the link gone at one end
#   rails.sh mend NAME RAIL MBIT      puts it back
#   rails.sh bytes NAME               received bytes per box and cable, as the kernel counts them
#   rails.sh down NAME                takes all of it away; nothing there is no error
# NAME-a has 10.77.0.1 (rail0) and 10.77.1.1 (rail1), NAME-b the same with .2.
set -euo pipefail

usage() { sed -n '2,12p' "$0" >&2; exit 64; }
[ $# -ge 2 ] || usage
verb=$1 a=$2-a b=$2-b
shift 2

# A burst of 2 ms at the rate, at least a few large packets; what waits longer than 50 ms is dropped, as a switch does.
shape() { # RAIL MBIT
  local burst=$(($2 * 1000 / 8 * 2))
  if [ "$burst" -lt 65536 ]; then burst=65536; fi
  for n in "$a" "$b"; do
    tc -n "$n" qdisc replace dev "rail$1" root tbf rate "$2mbit" burst "$burst" latency 50ms
  done
}

case $verb in
  up)
    first=${1:-400} second=${2:-${1:-400}}
    ip netns add "$a"
    ip netns add "$b"
    ip -n "$a" link set lo up
    ip -n "$b" link set lo up
    for r in 0 1; do
      ip link add "rail$r" netns "$a" type veth peer name "rail$r" netns "$b"
      ip -n "$a" addr add "10.77.$r.1/24" dev "rail$r"
      ip -n "$b" addr add "10.77.$r.2/24" dev "rail$r"
      for n in "$a" "$b"; do ip -n "$n" link set "rail$r" up mtu 9000; done
    done
    shape 0 "$first"
    shape 1 "$second"
    ;;
  rate) shape "$1" "$2" ;;
  cut) for n in "$a" "$b"; do tc -n "$n" qdisc replace dev "rail$1" root pfifo limit 0; done ;;
  unplug) ip -n "$b" link set "rail$1" down ;;
  mend)
    ip -n "$b" link set "rail$1" up
    shape "$1" "$2"
    ;;
  bytes)
    for n in "$a" "$b"; do
      for r in 0 1; do
        echo "$n rail$r $(ip netns exec "$n" cat "/sys/class/net/rail$r/statistics/rx_bytes")"
      done
    done
    ;;
  down)
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
    ;;
  *) usage ;;
esac
