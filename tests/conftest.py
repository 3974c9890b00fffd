"""What every test stands on: devices, strict promotion, hypothesis profiles, skipping without GPUs.

The environment is set in `pytest_configure`, before any test module imports jax. Eight virtual CPU
devices stand in for a mesh. `pytest -m gpu` (or `-m multigpu`) runs on the real GPUs instead.
"""

import importlib.util
import os
import re
import sys

import hypothesis
import pytest

VIRTUAL_CPU_DEVICES = 8

if importlib.util.find_spec("torch") is None:  # an interpreter that was not set up for jaxcap
    collect_ignore_glob = ["test_torch_*.py", "test_flash_*.py"]

# deadline=None: the first example of a shape compiles. CI must not fail by the draw of the day, so
# it repeats the same examples; `thousands` (make fuzz) is where new ones are found.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
}
hypothesis.settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("thousands", max_examples=5000, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def wants_gpu(mark_expression: str) -> bool:
    """Whether `-m EXPRESSION` asks for the GPU tests: names their mark other than after `not`."""
    positive = re.sub(r"\bnot\s+(\(.*?\)|\w+)", "", mark_expression)
    return re.search(r"\b(multi)?gpu\b", positive) is not None


def pytest_configure(config: pytest.Config) -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could set it up")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={VIRTUAL_CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if wants_gpu(config.getoption("markexpr") or ""):
        # Several test processes, and torch, share the GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Half of a test's time is LLVM, and every program runs once: nothing to gain by optimising.
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    for name in list(os.environ):  # a user's settings must not steer the tests
        if name.startswith("JAXCAP_"):
            del os.environ[name]


def _gpu_count() -> int:
    import jax

    try:
        return len(jax.devices("gpu"))
    except RuntimeError:  # no GPU backend, or JAX_PLATFORMS leaves it out
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if mark := item.get_closest_marker("multigpu"):
        needed = mark.kwargs.get("n", mark.args[0] if mark.args else 2)
    if needed and (found := _gpu_count()) < needed:
        pytest.skip(f"needs {needed} GPU(s), found {found}; run with -m gpu on a machine with them")


#: Linux allows a process 65530 memory mappings, and each program that XLA compiles takes dozens.
MOST_MAPPINGS = 20_000


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Forgets compiled programs before a long run of tests has used up the process's mappings."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
    except OSError:  # not Linux
        return
    if count > MOST_MAPPINGS and "jax" in sys.modules:
        import gc

        import jax

        jax.clear_caches()
        gc.collect()
