"""Runs the checks of `make test`, each under a heading, and stops at the first that fails.

    python tools/check.py lint tests -- -m gpu     # what follows -- goes to pytest

With both, the types are checked beside the tests, and what was found is said after them.

`--as-is` is for an interpreter that was not set up for jaxcap: a tool that is missing there is
named and left out, instead of being an error.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2

LINT = {
    "ruff": [["ruff", "check", "."], ["ruff", "format", "--check", "."]],
    "pyright": [["pyright", "--warnings", "--pythonpath", sys.executable]],
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run(command: list[str]) -> None:
    print(f"==> {' '.join(command)}", flush=True)
    start = time.monotonic()
    status = subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
    print(f"==> {command[0]}: {time.monotonic() - start:.0f} s, exit status {status}", flush=True)
    if status:
        sys.exit(status)


@contextlib.contextmanager
def beside(command: list[str]) -> Iterator[None]:
    """Runs the command meanwhile: one processor's work for a minute, which the tests need not wait for."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            status = process.wait()
            said.seek(0)
            print(f"==> {' '.join(command)}\n{said.read()}", end="")
            print(f"==> {command[0]}: exit status {status}, beside the rest", flush=True)
    if status:
        sys.exit(status)


def lint(as_is: bool) -> list[list[str]]:
    """The commands of the tools that there are."""
    found = []
    for tool, commands in LINT.items():
        if as_is and not installed(tool):
            print(f"==> {tool} left out: {sys.executable} does not have it", flush=True)
        else:
            found += commands
    return found


def tests(as_is: bool, arguments: list[str]) -> None:
    command = ["pytest"]
    if installed("pytest_timeout") or not as_is:
        command += ["--timeout", "900"]
    # Tests on GPUs share them badly: one process there.
    marks = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    on_gpu = "gpu" in marks and "not" not in marks
    if (installed("xdist") or not as_is) and not on_gpu:
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    run(command + arguments)


def main() -> None:
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    for_pytest = sys.argv[len(own) + 2 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="+", choices=["lint", "tests"])
    parser.add_argument("--as-is", action="store_true")
    options = parser.parse_args(own)
    commands = lint(options.as_is) if "lint" in options.steps else []
    with contextlib.ExitStack() as stack:
        for command in commands:
            if command[0] == "pyright" and "tests" in options.steps:
                stack.enter_context(beside(command))
            else:
                run(command)
        if "tests" in options.steps:
            tests(options.as_is, for_pytest)


if __name__ == "__main__":
    main()
