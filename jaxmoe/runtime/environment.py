"""What a run is made with: versions, commit, flags; and the one flag that a process sets for itself. No JAX here."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("jaxmoe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
#: Variables that change what XLA compiles or where it runs.
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str | None]:
    """Of Python and the packages that numbers depend on; None for one that runs without being installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE_DIR), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def commit() -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout that the package runs from; None when it is installed without one."""
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None  # no git, or a checkout that is not ours around an installed package
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", str(_PACKAGE_DIR))
    return None if head is None else {"commit": head.strip(), "dirty": bool(changes)}


def variables() -> dict[str, str]:
    """The environment variables among those that matter which are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def restart_with_huge_pages() -> None:
    """Start this process anew, with the same arguments and number, so that glibc asks for huge pages; once.

    The allocator reads the setting at process start alone. Large arrays on a CPU then cost fewer page faults:
    measured 5.46 against 5.99 s a step of `configs/bench_cpu.yaml`. Nothing happens without glibc, beside an NVIDIA
    driver, or where the user has set the tunable.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables or platform.libc_ver()[0] != "glibc" or _NVIDIA_DRIVER.exists():
        return
    huge = "glibc.malloc.hugetlb=1"
    environment = {**os.environ, "GLIBC_TUNABLES": f"{tunables}:{huge}" if tunables else huge}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
