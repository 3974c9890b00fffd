"""`jaxcap doctor`, `explain` and `bench`: what this machine and a call run on, and how fast."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

#: Distributions that decide what can run. Versions are read from their metadata: importing torch
#: or triton would take seconds and touch the GPU.
PACKAGES = {
    "JAX": ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    "PyTorch, Triton": ("torch", "triton", "jax-triton"),
    "FlashAttention": ("flash-attn", "flash-attn-3", "fa3-fwd", "tokenspeed-fa3", "flash-attn-4"),
}


def _numbers(count: int | None = None) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if count is not None and len(values) != count:
            raise argparse.ArgumentTypeError(f"needs {count} numbers, got {text!r}")
        if any(v < 1 for v in values):
            raise argparse.ArgumentTypeError(f"needs positive numbers, got {text!r}")
        return values

    parse.__name__ = "comma-separated numbers"
    return parse


def _window(text: str) -> tuple[int | None, ...]:
    """ "4095,0", "256" for both sides, "none" for an unbounded side."""
    sides = [None if part.strip() == "none" else int(part) for part in text.split(",")]
    if len(sides) > 2 or any(side is not None and side < 0 for side in sides):
        raise argparse.ArgumentTypeError(f"needs LEFT,RIGHT, zero or more each, got {text!r}")
    return tuple(sides * 2 if len(sides) == 1 else sides)


def _parser() -> argparse.ArgumentParser:
    from jaxcap.bench import command as bench

    parser = argparse.ArgumentParser(prog="jaxcap", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="versions, devices, and what each backend can do")
    doctor.set_defaults(run=run_doctor)

    explain = commands.add_parser("explain", help="the backend of a call, and why not the others")
    explain.set_defaults(run=run_explain)
    add = explain.add_argument
    add("--q", type=_numbers(4), required=True, metavar="B,T,N,H", help="shape of the query")
    add("--kv-heads", type=int, metavar="K", help="heads of key and value; as the query")
    add("--kv-len", type=int, metavar="S", help="length of key and value; as the query")
    add("--v-dim", type=int, metavar="V", help="head size of the value; as the query")
    add("--dtype", default="bfloat16", help="bfloat16, float16, float32, float64")
    add("--softcap", type=float, metavar="CAP")
    add("--scale", type=float)
    add("--layer-scale", type=float, default=1.0)
    add("--causal", action="store_true")
    add("--bottom-right", action="store_true", help="align causality to the last query and key")
    add("--window", type=_window, metavar="LEFT,RIGHT", help="none for an unbounded side")
    add("--bias", type=_numbers(), metavar="B,N,T,S", help="shape of a bias, 1 where broadcast")
    add("--mask", type=_numbers(), metavar="B,N,T,S", help="shape of a boolean mask")
    add("--lengths", action="store_true", help="sequence lengths of query, key and value")
    add("--segments", action="store_true", help="segment ids")
    add("--positions", action="store_true", help="explicit positions")
    add("--alibi", action="store_true")
    add("--sinks", action="store_true")
    add("--dropout", type=float, default=0.0, metavar="RATE")
    add("--residual", action="store_true", help="return the log-sum-exp too")
    add("--deterministic", action="store_true", default=None)
    add("--gradients", metavar="NAMES", help="query,key,value,bias,sinks; all that can be")
    add("--backend", metavar="NAME", help="as if this one had been named")
    add("--platform", metavar="NAME", help="cpu, sm80, sm90, ...; else this machine's")
    add("--json", action="store_true", help="for programs")

    timing = commands.add_parser("bench", help="speed beside whatever attention is installed")
    bench.add_arguments(timing)
    timing.set_defaults(run=bench.run)
    return parser


def _call(options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for `jaxcap.explain`; arrays are shapes only."""
    import jax

    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)

    def array(shape: Sequence[int], dtype: str = options.dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    batch, length, heads, size = options.q
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    kv_length = length if options.kv_len is None else options.kv_len
    value_size = size if options.v_dim is None else options.v_dim
    keywords: dict[str, Any] = {
        "softcap": options.softcap,
        "scale": options.scale,
        "layer_scale": options.layer_scale,
        "is_causal": options.causal,
        "causal_alignment": "bottom_right" if options.bottom_right else "top_left",
        "local_window_size": options.window,
        "dropout_rate": options.dropout,
        "return_residual": options.residual,
        "deterministic": options.deterministic,
        "implementation": options.backend,
        "platform": options.platform,
    }
    if options.gradients is not None:
        keywords["gradients"] = tuple(options.gradients.split(","))
    if options.bias:
        keywords["bias"] = array(options.bias)
    if options.mask:
        keywords["mask"] = array(options.mask, "bool")
    both = {"query": length, "key_value": kv_length}
    for side, sequence in both.items():
        if options.lengths:
            keywords[f"{side}_seq_lengths"] = array((batch,), "int32")
        if options.segments:
            keywords[f"{side}_segment_ids"] = array((batch, sequence), "int32")
        if options.positions:
            keywords[f"{side}_positions"] = array((batch, sequence), "int32")
    if options.alibi:
        keywords["alibi_slopes"] = array((heads,), "float32")
    if options.sinks:
        keywords["sinks"] = array((heads,), "float32")
    if options.dropout:
        keywords["dropout_rng"] = jax.eval_shape(lambda: jax.random.key(0))
    key = (batch, kv_length, kv_heads)
    return [array(options.q), array((*key, size)), array((*key, value_size))], keywords


def run_explain(options: argparse.Namespace) -> int:
    import jax

    import jaxcap

    if options.platform is not None:
        jax.config.update("jax_platforms", "cpu")  # the device here is not asked: start no GPU
    try:
        arrays, keywords = _call(options)
        explanation = jaxcap.explain(*arrays, **keywords)
    except (ValueError, TypeError) as error:
        print(f"jaxcap explain: {error}", file=sys.stderr)
        return 2
    decisions = {"forward": explanation.forward, "training": explanation.training}
    if options.json:
        record = {"spec": dataclasses.asdict(explanation.spec)}
        for name, decision in decisions.items():
            record[name] = {"backend": decision.backend, "reasons": decision.reasons}
        print(json.dumps(record, indent=2))
    else:
        print(explanation)
    return 0 if explanation.forward.backend else 1


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _abilities(name: str) -> tuple[str, list[str]]:
    """What a backend can do here with an everyday call, and why not more."""
    import jax

    import jaxcap

    q = jax.ShapeDtypeStruct((1, 1024, 8, 128), "bfloat16")
    found, why = [], []
    for softcap, kind in ((50.0, "with a cap"), (None, "without a cap")):
        explanation = jaxcap.explain(q, q, q, softcap=softcap, is_causal=True)
        forward = explanation.forward.reasons[name]
        training = explanation.training.reasons[name]
        if not training:
            found.append(f"{kind}: forward and backward")
        elif not forward:
            found.append(f"{kind}: forward")
        why += [*forward, *training]
    return "; ".join(found) or "cannot run here", list(dict.fromkeys(why))


def run_doctor(options: argparse.Namespace) -> int:
    del options
    import jax

    import jaxcap
    from jaxcap import device, selection
    from jaxcap.pallas import compiler

    print(f"jaxcap {jaxcap.__version__}, Python {platform.python_version()} ({sys.executable})")
    for group, distributions in PACKAGES.items():
        versions = [(name, _version(name)) for name in distributions]
        present = ", ".join(f"{name} {version}" for name, version in versions if version)
        print(f"{group}: {present or 'not installed'}")
    settings = sorted(name for name in os.environ if name.startswith(("JAXCAP_", "JAX_", "XLA_")))
    print("environment: " + (", ".join(f"{n}={os.environ[n]}" for n in settings) or "no settings"))
    try:
        selection.check_name(os.environ.get("JAXCAP_BACKEND") or None, "JAXCAP_BACKEND")
    except ValueError as error:
        print(f"jaxcap doctor: {error}", file=sys.stderr)
        return 2

    print("\ndevices")
    for one in jax.devices():
        print(f"  {one.id}  {one.device_kind}  {device.name_of(one)}")
    if jax.devices()[0].platform == "cpu" and not any(map(_version, PACKAGES["JAX"][3:])):
        print("  JAX sees no GPU: for NVIDIA install jaxcap[cuda13] or jaxcap[cuda12]")
    if slower := compiler.slow_here():
        print(f"  {slower}")

    print("\nbackends, for bfloat16 [1, 1024, 8, 128], causal")
    width = max(map(len, selection.backends()))
    for name in selection.backends():
        able, why = _abilities(name)
        print(f"  {name:<{width}}  {able}")
        for reason in why:
            print(f"  {'':<{width}}    - {reason}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
