#!/usr/bin/env bash
# Trains with N processes on this machine, as many machines would.
#
#   bash launch/local.sh 2 --config configs/quickstart.yaml run.steps=20
#
# Visible GPUs are dealt out evenly; without GPUs every process has one CPU device, or as many as XLA_FLAGS says.
# The output of process 0 is the run's; the others only warn. When one process dies the others end too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

count=${1:-}
[[ "$count" =~ ^[1-9][0-9]*$ ]] || die "usage: bash launch/local.sh N --config FILE [section.key=value ...]"
shift

choose_environment

# Two neighbouring free ports: one for JAX, one for the processes' own connections.
port=$("$python" - <<'PYTHON'
import random
import socket

while True:
    port = random.randrange(20000, 32000, 2)
    try:
        for number in (port, port + 1):
            socket.create_server(("127.0.0.1", number)).close()
    except OSError:
        continue
    print(port)
    break
PYTHON
)

gpus=()
if [ "${JAX_PLATFORMS:-}" != cpu ]; then
    visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
    [ -z "$visible" ] || IFS=, read -ra gpus <<<"$visible"
fi
share=$((${#gpus[@]} / count))
if [ "${#gpus[@]}" -gt 0 ] && [ $((share * count)) -ne "${#gpus[@]}" ]; then
    die "$count processes cannot share ${#gpus[@]} GPUs evenly; use a divisor, or set CUDA_VISIBLE_DEVICES"
fi

# Own process groups: Ctrl-C reaches this script alone, which hands it on once.
set -m
pids=()
# shellcheck disable=SC2329  # called by the traps
pass_on() { kill -s "$1" "${pids[@]}" 2>/dev/null || true; }
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

for ((id = 0; id < count; id++)); do
    if [ "$share" -gt 0 ]; then
        own=$(IFS=,; echo "${gpus[*]:id * share:share}")
        export CUDA_VISIBLE_DEVICES=$own
    fi
    "$python" -m jaxmoe.train --coordinator "127.0.0.1:$port" --num-processes "$count" --process-id "$id" "$@" &
    pids+=($!)
done

# The code of process 0 when it failed, else the worst of the others.
code=0
for pid in "${pids[@]}"; do
    while :; do
        own=0
        wait "$pid" || own=$?
        # A trapped signal interrupts the wait while the process still saves.
        kill -0 "$pid" 2>/dev/null || break
    done
    [ "$code" -ne 0 ] || code=$own
done
exit "$code"
