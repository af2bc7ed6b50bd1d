#!/usr/bin/env bash
# Trains a small Mixture-of-Experts model on real text, from nothing: environment, install, run.
#
#   bash launch/quickstart.sh                   GPU when nvidia-smi finds one, else CPU (JAX_PLATFORMS=cpu forces it)
#   bash launch/quickstart.sh run.steps=20      further words are overrides of configs/quickstart.yaml
#
# What it should print is in the header of configs/quickstart.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

# Prints cuda13, cuda12 or nothing: what the driver and the oldest GPU of this machine can run.
cuda_extra() {
    local gpus driver capability
    [ "${JAX_PLATFORMS:-}" != cpu ] || return 0
    gpus=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null) || return 0
    driver=$(cut -d. -f1 <<<"$gpus" | sort -n | head -n 1)
    capability=$(cut -d, -f2 <<<"$gpus" | tr -d ' .' | sort -n | head -n 1)
    if [ "$driver" -ge 580 ] && [ "$capability" -ge 75 ]; then
        echo cuda13
    elif [ "$driver" -ge 525 ]; then
        echo cuda12
    else
        say "NVIDIA driver $driver is older than 525, the oldest that CUDA 12 runs on: training on the CPU" >&2
    fi
}

extra=$(cuda_extra)
if [ -n "$extra" ]; then
    say "training on $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) with JAX's $extra"
else
    say "training on the CPU"
    export JAX_PLATFORMS=cpu
fi

set_up_environment "demo${extra:+,$extra}"
exec "$python" -m jaxmoe.train --config configs/quickstart.yaml "$@"
