# shellcheck shell=bash
# Sourced by the scripts beside it: finds or makes the virtual environment and installs jaxmoe into it.
#
#   set_up_environment EXTRAS     EXTRAS as in "test,demo"; afterwards $python is the interpreter to use.
#
# An active virtual environment (venv, or conda other than its base) is used as it is; otherwise .venv in the project's folder,
# made with $PYTHON or the first Python >= 3.11 found. The install is repeated only when pyproject.toml changes.

say() { printf '[%s] %s\n' "$(basename "$0")" "$*"; }
die() { say "$*" >&2; exit 1; }

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON does not run or is older than 3.11"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13 python; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3.12 bash launch/$(basename "$0")"
}

choose_environment() {
    local active base wanted found
    active=${VIRTUAL_ENV:-}
    if [ -z "$active" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        active=${CONDA_PREFIX:-}
    fi
    if [ -n "$active" ]; then
        python="$active/bin/python"
        say "using the active environment $active"
        is_supported "$python" || die "$python does not run or is older than 3.11; activate another environment"
        return
    fi
    python="$PWD/.venv/bin/python"
    if is_supported "$python"; then
        if [ -n "${PYTHON:-}" ]; then
            wanted=$("$PYTHON" -c 'import sys; print(*sys.version_info[:2], sep=".")')
            found=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
            [ "$wanted" = "$found" ] || die ".venv has Python $found, PYTHON asks for $wanted; remove .venv first"
        fi
        return
    fi
    base=$(find_python)
    say "making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv || die "$base cannot make environments (on Debian: apt-get install python3-venv)"
}

set_up_environment() {
    local extras=$1 stamp wanted
    choose_environment
    stamp="$("$python" -c 'import sys; print(sys.prefix)')/.jaxmoe_installed"
    wanted="$PWD $(cksum <pyproject.toml)"
    if [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$wanted" ]; then
        rm -f "$stamp"
    elif grep -qxF "$extras" "$stamp"; then
        return
    fi
    say "installing jaxmoe[$extras] (a few minutes the first time)"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    [ -f "$stamp" ] || printf '%s\n' "$wanted" >"$stamp"
    printf '%s\n' "$extras" >>"$stamp"
}
