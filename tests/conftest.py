"""Shared by all tests: 8 virtual CPU devices, a compilation cache, strictness, and what happens to skips.

The environment is set before anything imports JAX, so that commands started by a test inherit it.
"""

import gc
import hashlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_CPU_DEVICES = 8
CACHE_DAYS = 7


def _compile_cache() -> Path:
    """A folder of this user and kind of processor: code compiled for another one may not run here."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return base / "jaxmoe" / "test_compile" / hashlib.sha256("\n".join(processor).encode()).hexdigest()[:12]


def _forget_old_entries(folder: Path) -> None:
    """Removes what is older than `CACHE_DAYS`: every change of a traced function leaves dead entries behind."""
    for path in folder.glob("*"):
        try:
            if path.stat().st_mtime < time.time() - CACHE_DAYS * 86400:
                path.unlink()
        except FileNotFoundError:  # another test run was faster
            continue


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    devices = f"--xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Tests compile much and compute little: low effort halves their time.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compile_cache())
    _compile_cache().mkdir(parents=True, exist_ok=True)
    _forget_old_entries(_compile_cache())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402

ON_GPU = any(name in os.environ["JAX_PLATFORMS"] for name in ("cuda", "gpu"))


MOST_MEMORY_MAPS = 20_000
"""Every compiled program takes some; Linux allows a process 65,530 and loading one more then ends it."""


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops compiled programs after a test when there are many; the compilation cache brings back what is needed."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit mode for one test."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the numbers that Hugging Face's implementations gave."""
    return Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run (launch/test.sh)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests run where JAX_PLATFORMS names a GPU, and nothing else runs there."""
    unfit = [item for item in items if (item.get_closest_marker("gpu") is not None) != ON_GPU]
    if unfit:
        items[:] = [item for item in items if item not in set(unfit)]
        config.hook.pytest_deselected(items=unfit)


def _skips(config: pytest.Config) -> list[str]:
    """One line per skipped test or file: where, and why."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    reports = terminal.stats.get("skipped", []) if terminal else []
    return [f"{report.nodeid}: {report.longrepr[2]}" for report in reports]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    caught = [
        f"{report.nodeid.split('[')[-1].rstrip(']'):50s} {value}"
        for report in terminalreporter.getreports("passed")
        for key, value in report.user_properties
        if key == "caught_by"
    ]
    if caught:
        terminalreporter.section("what caught each fault")
        for line in caught:
            terminalreporter.write_line(line)
    skips = _skips(config)
    if skips:
        terminalreporter.section("skipped tests")
        for line in skips:
            terminalreporter.write_line(line)
        if config.getoption("--no-skips"):
            terminalreporter.write_line(f"failed: {len(skips)} skipped, and --no-skips allows none", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--no-skips") and session.exitstatus == 0 and _skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
