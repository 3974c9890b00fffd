"""What is shipped: metadata, pins, a light import, a wheel and an sdist that install and run."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parsed = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in parsed}


def test_extras_are_those_the_readme_promises():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {
        "cuda12",
        "cuda13",
        "torch",
        "triton",
        "fa2",
        "fa4",
        "examples",
        "test",
        "docs",
    }
    for requirement in PROJECT["dependencies"] + [r for extra in extras.values() for r in extra]:
        Requirement(requirement)
    readme = (ROOT / "README.md").read_text()
    for extra in ("cuda12", "cuda13", "torch", "triton", "fa2", "fa4"):
        assert extra in readme


def test_constraints_are_exact_and_have_no_urls():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    assert "@" not in text
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line


def test_every_dependency_of_the_environment_is_pinned():
    wanted = PROJECT["dependencies"] + [
        r for extra in ("examples", "test") for r in PROJECT["optional-dependencies"][extra]
    ]
    queue, seen, missing = [Requirement(r) for r in wanted], set(), set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in pins():
            missing.add(name)
        try:
            below = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an interpreter used as it is may lack a tool
        for line in below:
            child = Requirement(line)
            environments = [{**default_environment(), "extra": e} for e in extras or {""}]
            if child.marker is None or any(child.marker.evaluate(e) for e in environments):  # type: ignore[arg-type]
                queue.append(child)
    assert not missing


def shipped_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:  # an unpacked sdist
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file() and not any(p.startswith(".") for p in path.relative_to(ROOT).parts)
        ]
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def test_no_package_index_and_no_path_of_some_machine_is_named():
    # Put together here, so that this file does not name them either.
    hosts = ["py" + "pi.org", "python" + "hosted", "download.py" + "torch", "registry.np" + "mjs"]
    options = ["--index" + "-url", "--extra-index" + "-url", "--find" + "-links"]
    folders = [f"/{name}/" for name in ("ro" + "ot", "ho" + "me", "wo" + "rk", "op" + "t")]
    forbidden = re.compile(
        "|".join([re.escape(s) for s in hosts + options] + [rf"(?<![\w.~]){s}" for s in folders])
    )
    found = []
    for path in shipped_files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in forbidden.finditer(text)]
    assert not found


def test_readme_table_is_what_the_registry_generates():
    run(sys.executable, "tools/feature_table.py", "--check")


def test_import_brings_in_no_kernel_compiler_and_no_torch():
    code = """
import json, sys
import jax, flax
before = set(sys.modules)
import jaxcap
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    added = json.loads(run(sys.executable, "-c", code))
    heavy = re.compile(r"^(torch|triton|jax_triton|flash_attn|cutlass)\b|mosaic|pallas|triton")
    assert "jaxcap" in added
    assert [m for m in added if heavy.search(m)] == []


def test_an_interpreter_as_it_is_gets_no_set_up():
    if shutil.which("make") is None:
        pytest.skip("needs make")
    plain = run("make", "-n", "demo", "test")
    as_is = run("make", "-n", "demo", "test", "JAXCAP_PYTHON=python9")
    assert "setup_venv.sh" in plain
    assert ".venv/bin/python -m examples.gemma2.train" in plain
    assert "setup_venv.sh" not in as_is
    assert "python9 -m examples.gemma2.train" in as_is
    assert "python9 tools/check.py lint tests --as-is" in as_is


def test_readme_examples_run(monkeypatch):
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", re.sub(r"device_count=\d+", "device_count=2", flags))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    assert "blockwise" in run(sys.executable, "-W", "error", "-c", "\n".join(blocks))


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))],
)
def test_links_between_pages_resolve(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


SMOKE = """
import jax, jax.numpy as jnp, jaxcap
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8)) * 9
out = jaxcap.dot_product_attention(q, k, v, softcap=5.0, is_causal=True)
p = 5 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5 / 5)
p = jax.nn.softmax(jnp.where(jnp.tri(16, dtype=bool), p, -jnp.inf))
assert jnp.allclose(out, jnp.einsum("bnts,bsnh->btnh", p, v), atol=1e-5)
print(jaxcap.__file__)
"""


@pytest.mark.slow
def test_wheel_and_sdist_install_and_run(tmp_path):
    for tool in ("build", "hatchling"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"needs {tool}")
    # Without isolation, by the pinned hatchling: the sdist, and the wheel from the sdist.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {n.split("/")[0] for n in names} == {"jaxcap", f"jaxcap-{PROJECT['version']}.dist-info"}
    assert {"jaxcap/__init__.py", "jaxcap/py.typed", "jaxcap/attention.py"} <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
    with tarfile.open(sdist) as archive:
        in_sdist = {n.partition("/")[2] for n in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        assert name in in_sdist
    assert "tests/conftest.py" in in_sdist
    assert not any(n.startswith((".venv", ".notes", "dist")) for n in in_sdist)

    # A clean environment, with jaxcap from the wheel alone. Its dependencies are not downloaded
    # again: a .pth shows it this interpreter's packages, but not the editable install among them.
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, symlinks=True)
    python = clean / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert str(clean) in run(python, "-W", "error", "-c", SMOKE, cwd=tmp_path)
    printed = run(clean / "bin" / "jaxcap", "explain", "--q", "1,64,4,32", "--softcap", "50")
    assert "blockwise" in printed
