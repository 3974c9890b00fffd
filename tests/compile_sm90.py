"""Compile Mosaic-GPU kernels for an H200 on a machine without a GPU, and read what ptxas says.

    python -m tests.compile_sm90 MODULE NAME...     # one JSON line a name

MODULE.compiled(NAME) gives (function, its arguments as jax.ShapeDtypeStructs), which may be sharded over
`devices(n)`. It runs in a process of its own (`reports`), whose output ptxas may write to. It catches what
ptxas catches (spills, serialised wgmma, an impossible set_max_registers); no numerics, no races, no
deadlocks.

Needs the packages of tools/compile-tools.txt, installed or in the folder beside the virtual environment's
own packages that `make test` puts them in (JAX must not find its CUDA plugin in other programs), and
ptxas: the pinned one in that folder, else one on the PATH.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""

#: wgmma that ptxas had to serialise, and set_max_registers that it ignored.
SERIOUS = ("C7507", "C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7516", "C7517")


@dataclasses.dataclass(frozen=True)
class Report:
    """Of the worst kernel of a program: bytes spilled, and the codes of ptxas's warnings.

    `steps`: what a device does, in XLA's order: (name, instruction, names of its operands).
    """

    kernels: int
    registers: int
    spill_stores: int
    spill_loads: int
    codes: tuple[str, ...]
    calls: int = 0  # of kernels, in all computations
    temporary: int = 0  # bytes beyond arguments and results, a device
    steps: tuple[tuple[str, str, list[str]], ...] = ()

    @property
    def serialised(self) -> tuple[str, ...]:
        return tuple(code for code in self.codes if code in SERIOUS)


#: Where tools/setup_venv.sh puts the packages.
TOOLS = pathlib.Path(sys.prefix) / "compile-tools"
SET_UP = pathlib.Path(sys.prefix) / ".jaxcap-set-up"


def _ptxas_folder() -> str | None:
    for path in (TOOLS / "nvidia").glob("**/bin/ptxas"):  # the pinned one: others spill otherwise
        return str(path.parent)
    if found := shutil.which("ptxas"):
        return os.path.dirname(found)
    with_files = importlib.util.find_spec("nvidia")
    for base in with_files.submodule_search_locations or () if with_files else ():
        for path in pathlib.Path(base).glob("**/bin/ptxas"):
            return str(path.parent)
    return None


def missing() -> str | None:
    """What this machine lacks to compile, or None."""
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        places = [*sys.path, str(TOOLS)]
        if next(iter(importlib.metadata.distributions(name=name, path=places)), None) is None:
            return f"the package {name} is not installed"
    return None if _ptxas_folder() else "no ptxas, on the PATH or from nvidia-cuda-nvcc"


def required() -> None:
    """Skips a test where the tools are missing and nobody promised them; fails where `make` did."""
    import pytest

    if why := missing():
        (pytest.fail if SET_UP.exists() else pytest.skip)(why)


def devices(count: int) -> Any:
    """H200s that are not here, of one host."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=H200, topology=f"1x1x{count}"
    )
    return topology.devices


def compile_for_h200(function: Any, arguments: Any) -> Any:
    """The executable (it cannot run here) of `function(*arguments)`, ShapeDtypeStructs or pytrees of them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(devices(1), ("x",)), PartitionSpec())

    def placed(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or sharding)

    arguments = jax.tree.map(placed, tuple(arguments))
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def parsed(text: str) -> Report:
    """From what ptxas -v prints."""
    spills = [
        tuple(map(int, pair))
        for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    ]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    return Report(
        kernels=len(set(re.findall(r"Compiling entry function '(\w*mosaic\w*)'", text))),
        registers=max(registers, default=0),
        spill_stores=max((s for s, _ in spills), default=0),
        spill_loads=max((s for _, s in spills), default=0),
        codes=tuple(sorted(set(re.findall(r"\b[C]7\d\d\d\b", text)))),
    )


def scheduled(text: str) -> tuple[tuple[str, str, list[str]], ...]:
    """`Report.steps` of a compiled program; kernels are "custom-call", also where slices are part of them."""
    found, computation, with_kernel = [], "", set()
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            computation = header[1]
        if 'custom_call_target="mosaic' in line:
            with_kernel.add(computation)
    for line in text[text.index("\nENTRY") :].splitlines():
        if match := re.match(r" +(?:ROOT )?%(\S+) = .*? ([a-z-]+)\((.*?)\)", line):
            name, instruction, operands = match.groups()
            called = re.search(r"calls=%([\w.-]+)", line)
            kernel = called is not None and called[1] in with_kernel
            instruction = "custom-call" if kernel else instruction
            found.append((name, instruction, re.findall(r"%([\w.-]+)", operands)))
    return tuple(found)


def _captured(function: Any, arguments: Any) -> tuple[str, Any]:
    """What the compiler writes to the process's own stdout and stderr meanwhile, and its result."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            program = compile_for_h200(function, arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        file.seek(0)
        return file.read().decode(errors="replace"), program


def environment() -> dict[str, str]:
    """Of a process that compiles."""
    folder = _ptxas_folder()
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": f"{TOOLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def reports(module: str, names: list[str], timeout: float = 600) -> Iterator[tuple[str, Report]]:
    """Compile `module.compiled(name)` for each name, in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_sm90", module, *names],
        env=environment(),
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != len(names):
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    for name, fields in zip(names, found, strict=True):
        yield name, Report(**(fields | {"codes": tuple(fields["codes"])}))


def main(module: str, names: list[str]) -> None:
    compiled = importlib.import_module(module).compiled
    for name in names:
        text, program = _captured(*compiled(name))
        hlo = program.as_text()
        report = dataclasses.replace(
            parsed(text),
            calls=hlo.count('custom_call_target="mosaic'),
            temporary=program.memory_analysis().temp_size_in_bytes,
            steps=scheduled(hlo),
        )
        print(json.dumps(dataclasses.asdict(report)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
