#!/usr/bin/env bash
# Checks everything: shell scripts, format, lint, types, import floors, tests. CI runs the same.
#
#   bash launch/test.sh                    without the tests marked slow
#   bash launch/test.sh all                with them: every family on 8 devices, runs of several processes
#   bash launch/test.sh [all] -k router    further words go to pytest
#
# Makes .venv and installs jaxmoe[demo,test] when no virtual environment is active (launch/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

select=(-m "not slow")
if [ "${1:-}" = all ]; then
    select=()
    shift
fi

set_up_environment demo,test
# More than 8 workers only cost memory: each holds 8 virtual devices and their threads.
workers=$("$python" -c 'import os; print(min(8, os.cpu_count() or 1))')

failed=""
stage() {
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then
        printf '== %s: passed in %d s\n' "$name" $((SECONDS - start))
    else
        printf '== %s: FAILED after %d s\n' "$name" $((SECONDS - start))
        failed="$failed $name"
    fi
}

stage shell "$(dirname "$python")/shellcheck" -x launch/*.sh launch/slurm/*.sbatch .ci/run
stage format "$python" -m ruff format --check .
stage lint "$python" -m ruff check --output-format concise .
stage types "$python" -m pyright --pythonpath "$python"
stage floors "$(dirname "$python")/lint-imports" --no-logo
stage tests "$python" -m pytest -q -n "$workers" --dist worksteal --no-skips --durations 10 ${select[@]+"${select[@]}"} "$@"

printf '\n'
[ -z "$failed" ] || die "failed:$failed"
say "all stages passed"
