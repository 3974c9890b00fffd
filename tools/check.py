"""Runs the checks of `make test`, each under a heading, and stops at the first that fails.

    python tools/check.py lint tests -- -m gpu     # what follows -- goes to pytest

`--as-is` is for an interpreter that was not set up for jaxcap: a tool that is missing there is
named and left out, instead of being an error.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
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


def lint(as_is: bool) -> None:
    for tool, commands in LINT.items():
        if as_is and not installed(tool):
            print(f"==> {tool} left out: {sys.executable} does not have it", flush=True)
            continue
        for command in commands:
            run(command)


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
    if "lint" in options.steps:
        lint(options.as_is)
    if "tests" in options.steps:
        tests(options.as_is, for_pytest)


if __name__ == "__main__":
    main()
