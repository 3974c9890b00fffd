"""`tools/find_python.sh` on machines put together from scripts that pose as interpreters."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "find_python.sh"


class Machine:
    """A PATH and a HOME with nothing in them but what a test puts there."""

    def __init__(self, root: Path):
        self.path, self.home = root / "bin", root / "home with a space"
        self.path.mkdir()
        self.home.mkdir()
        for tool in ("sh", "sort", "head"):
            found = shutil.which(tool)
            assert found
            (self.path / tool).symlink_to(found)

    def add(self, at: Path, body: str) -> Path:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"#!/bin/sh\n{body}\n")
        at.chmod(0o755)
        return at

    def python(self, at: Path, minor: int) -> Path:
        return self.add(at, f'echo "{minor} {at}"' if minor >= 12 else "exit 1")

    def find(self, *extra_path: Path, **environment: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join(str(p) for p in (self.path, *extra_path))
        return subprocess.run(
            [str(self.path / "sh"), str(SCRIPT)],
            env={"PATH": path, "HOME": str(self.home), **environment},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_none_is_one_line_that_says_what_to_install(machine):
    machine.python(machine.path / "python3", 11)
    done = machine.find()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Python 3.12" in done.stderr
    assert "install" in done.stderr


def test_a_shim_that_does_not_run_is_passed_over(machine, tmp_path):
    machine.add(machine.path / "python3.12", "echo 'pyenv: command not found'; exit 127")
    good = machine.python(tmp_path / "later" / "python3.12", 12)
    assert machine.find(tmp_path / "later").stdout.strip() == str(good)


def test_pins_were_made_on_3_12_so_it_comes_first(machine):
    machine.python(machine.path / "python3.13", 13)
    good = machine.python(machine.home / ".pyenv" / "versions" / "3.12.9" / "bin" / "python", 12)
    assert machine.find().stdout.strip() == str(good)


def test_newer_ones_in_order_of_age(machine):
    machine.python(machine.path / "python3.14", 14)
    good = machine.python(machine.path / "python3.13", 13)
    assert machine.find().stdout.strip() == str(good)


def test_unnamed_version_on_path(machine):
    good = machine.python(machine.path / "python", 16)
    assert machine.find().stdout.strip() == str(good)


def test_pyenv_root_by_variable_and_by_command(machine, tmp_path):
    good = machine.python(tmp_path / "elsewhere" / "versions" / "3.12.1" / "bin" / "python", 12)
    assert machine.find(PYENV_ROOT=str(tmp_path / "elsewhere")).stdout.strip() == str(good)
    machine.add(machine.path / "pyenv", f'echo "{tmp_path / "elsewhere"}"')
    assert machine.find().stdout.strip() == str(good)


def test_uv_managed_with_and_without_uv(machine, tmp_path):
    share = machine.home / ".local" / "share" / "uv" / "python"
    good = machine.python(share / "cpython-3.12.7-linux" / "bin" / "python3", 12)
    assert machine.find().stdout.strip() == str(good)
    shutil.rmtree(share)
    other = machine.python(tmp_path / "uv's" / "python3", 12)
    machine.add(machine.path / "uv", f'echo "{other}"')
    assert machine.find().stdout.strip() == str(other)


def test_a_virtual_environment_answers_with_what_it_was_made_from(machine):
    done = machine.find(Path(sys.executable).parent)
    assert done.returncode == 0, done.stderr
    code = "import sys; print(sys.prefix == sys.base_prefix and sys.version_info >= (3, 12))"
    answer = subprocess.run([done.stdout.strip(), "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "True"
