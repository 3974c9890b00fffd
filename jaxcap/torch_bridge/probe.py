"""What an installed library can do, found out without importing it, and failing closed.

Versions come from the packages' metadata, parameters from the source of the entry points, build flags from
the file that a build writes, and what a binary was built without from the messages that it would
raise. Nothing here imports PyTorch but `load`, which is the last question and asked only where all
others are answered.
"""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

#: Compiled into flash-attn and its `hopper` builds wherever a feature was left out.
_WITHOUT = re.compile(rb"This flash attention build does not support ([\w ]+)\.")
#: The mangled names of flash-attn 2's kernels: direction, dtype, head size.
_KERNEL = re.compile(rb"run_mha_(fwd|bwd)_IN7cutlass(?:10(bfloat)16_t|6(half)_t)ELi(\d+)E")


class Unusable(Exception):
    """Why a library cannot be used; the message is a reason for `explain`."""


_answers: list[dict[tuple[Any, ...], Any]] = []


def once(function: Callable) -> Callable:
    """`function`, asked once for each set of arguments; an Unusable is an answer too."""
    answers: dict[tuple[Any, ...], Any] = {}
    _answers.append(answers)

    @functools.wraps(function)
    def ask(*args: Any) -> Any:
        if args not in answers:
            try:
                answers[args] = function(*args)
            except Unusable as error:
                answers[args] = error
        if isinstance(answers[args], Unusable):
            raise Unusable(str(answers[args]))
        return answers[args]

    return ask


def forget() -> None:
    """Ask everything again: the installed packages have changed."""
    importlib.invalidate_caches()
    for answers in _answers:
        answers.clear()


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """ "2.8.3.post2+local" is (2, 8, 3); "4.0.0b36" is (4, 0, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in release[0].split(".")) if release else ()


def beta(version: str) -> float:
    """36 for "4.0.0b36", infinity for a final release."""
    found = re.search(r"b(\d+)", version.split("+")[0])
    return int(found[1]) if found else float("inf")


def file_of(module: str) -> Path | None:
    """The file of a top-level module, or of its `__init__`; nothing is imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def folders_of(package: str) -> list[Path]:
    """Where the submodules of a top-level package are looked for, with or without an `__init__`."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []


@once
def parameters(source: Path) -> dict[str, frozenset[str]]:
    """Of every top-level function in a source file the names of its parameters."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise Unusable(f"cannot read {source.name}: {error}") from error
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found[node.name] = frozenset(a.arg for a in every)
    return found


def require(source: Path, entries: Mapping[str, Collection[str]]) -> None:
    """Raises Unusable where a function lacks a parameter, or is not there."""
    known = parameters(source)
    for function, wanted in entries.items():
        if function not in known:
            raise Unusable(f"{source.name} has no {function}")
        if missing := sorted(set(wanted) - known[function]):
            raise Unusable(f"{function} in {source.name} has no parameter {', '.join(missing)}")


@once
def build_flags(config: Path) -> dict[str, bool]:
    """`CONFIG["build_flags"]` of the file that FlashAttention 3's setup writes."""
    try:
        for node in ast.parse(config.read_bytes()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "CONFIG":
                flags = ast.literal_eval(node.value)["build_flags"]
                return {str(name): bool(on) for name, on in flags.items()}
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"cannot read the build flags in {config.name}: {error!r}") from error
    raise Unusable(f"{config.name} has no CONFIG with build flags")


@once
def left_out(binary: Path) -> frozenset[str]:
    """What a binary says it was built without: "softcap", "backward", "local attention", ..."""
    return frozenset(name.decode() for name in _scan(binary, _WITHOUT))


@once
def kernels(binary: Path) -> frozenset[tuple[str, str, int]]:
    """("fwd", "bfloat16", 128) and so on; empty where the names were stripped."""
    found = _scan(binary, _KERNEL)
    return frozenset(
        (way.decode(), "bfloat16" if wide else "float16", int(size)) for way, wide, _, size in found
    )


def _scan(binary: Path, pattern: re.Pattern[bytes]) -> set[Any]:
    try:
        with open(binary, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return set()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return set(pattern.findall(data))
    except OSError as error:
        raise Unusable(f"cannot read {binary.name}: {error}") from error


@once
def load(module: str) -> Any:
    """Imports PyTorch, then `module`. Raises Unusable."""
    for name in ("torch", module):
        try:
            loaded = importlib.import_module(name)
        except Exception as error:  # a library may raise anything while it initialises
            raise Unusable(f"importing {name} fails: {error!r}") from error
    return loaded


def sees_gpu() -> bool:
    return bool(load("torch").cuda.is_available())
