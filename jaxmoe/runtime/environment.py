"""What a run was made with: versions, commit, flags. Does not import JAX."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("jaxmoe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
#: Variables that change what XLA compiles or where it runs.
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES")
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
