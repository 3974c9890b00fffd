"""The command line of `jaxcap bench` and of `benchmarks/attention.py`."""

import argparse
import dataclasses
import math
import pathlib
import shlex
import sys
from collections.abc import Sequence

import jax

from jaxcap.bench import report
from jaxcap.bench.cases import CASES, Case
from jaxcap.bench.implementations import Implementation, available
from jaxcap.bench.measure import PASSES, measure
from jaxcap.bench.progress import Progress
from jaxcap.explain import explain

#: Options that say what shape to measure.
OF_A_SHAPE = ("kv_heads", "kv_len", "causal", "window_left", "softcap", "dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", help=f"comma-separated, of {', '.join(CASES)}; all")
    add("--q", metavar="B,T,N,H", help="measure this shape of the query instead")
    add("--kv-heads", type=int, metavar="K", help="with --q: heads of key and value")
    add("--kv-len", type=int, metavar="S", help="with --q: length of key and value")
    add("--causal", action="store_true", help="with --q")
    add("--window-left", type=int, metavar="W", help="with --q: keys before the query, causal")
    add("--softcap", type=float, help="with --q; 50")
    add("--dtype", help="with --q; bfloat16")
    add(
        "--logits",
        default="1",
        metavar="S,...",
        help="standard deviations of the logits before the cap, which speed may depend on; 1",
    )
    add("--implementations", help="comma-separated beginnings of names; all that are installed")
    add("--passes", default=",".join(PASSES), help=",".join(PASSES))
    add("--rounds", type=int, default=5)
    add("--burst", type=float, default=0.15, metavar="S", help="seconds of one burst; 0.15")
    sustain = "seconds of the same work right before a burst; 0: half a burst; 0.12"
    add("--sustain", type=float, default=0.12, metavar="S", help=sustain)
    path = pathlib.Path
    add("--lock", type=path, metavar="FILE", help="by turns with other processes that name it")
    add("--json", type=path, metavar="FILE", help="write rows there")
    add("--merge", nargs="+", type=path, metavar="FILE", help="measure nothing, put these together")
    add("--picture", type=path, metavar="FILE", help="draw a bar chart there")


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    for name in ("burst", "sustain"):
        if not 0 <= (seconds := getattr(args, name)) < math.inf:
            raise ValueError(f"--{name} must be seconds, 0 or more, got {seconds:g}")
    if args.q is None:
        if given := [x for x in OF_A_SHAPE if getattr(args, x) not in (None, False)]:
            name = given[0].replace("_", "-")
            raise ValueError(f"--{name} goes with --q, the cases have theirs; leave it out")
        if args.cases is None and jax.default_backend() == "cpu":
            raise ValueError(
                "the cases are for a GPU and there is none; give a shape, --q 1,1024,4,64"
            )
        names = list(CASES) if args.cases is None else args.cases.split(",")
        if unknown := [name for name in names if name not in CASES]:
            raise ValueError(f"--cases: no {', '.join(unknown)}; there are {', '.join(CASES)}")
        return [CASES[name] for name in names]
    if args.cases is not None:
        raise ValueError("--cases and --q are two ways to say what to measure; leave one out")
    try:
        batch, length, heads, size = (int(part) for part in args.q.split(","))
    except ValueError:
        raise ValueError(f"--q must be B,T,N,H, got {args.q!r}") from None
    causal = args.causal or args.window_left is not None
    case = Case(
        name=f"{batch}x{length}x{heads}x{size}",
        batch=batch,
        query_length=length,
        key_length=args.kv_len or length,
        query_heads=heads,
        kv_heads=args.kv_heads or heads,
        head_size=size,
        causal=causal,
        window_left=args.window_left,
        softcap=50.0 if args.softcap is None else args.softcap,
        dtype=args.dtype or "bfloat16",
    )
    key = (case.batch, case.key_length, case.kv_heads, size)
    try:
        q, k = (jax.ShapeDtypeStruct(x, case.dtype) for x in ((batch, length, heads, size), key))
    except TypeError as error:
        raise ValueError(f"--dtype: {error}") from error
    explain(q, k, k, softcap=case.softcap, is_causal=causal)  # raises if there is no such call
    return [case]


def _with_logits(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    """Each case once for every standard deviation that is asked for."""
    try:
        sizes = [float(part) for part in args.logits.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"--logits must be positive numbers, S,..., got {args.logits!r}")
    suffix = {size: "" if size == 1 else f"_logits{size:g}" for size in sizes}
    return [
        dataclasses.replace(case, name=case.name + suffix[size], logits=size)
        for case in cases
        for size in sizes
    ]


def _implementations(args: argparse.Namespace) -> list[Implementation]:
    known = available()
    if args.implementations is None:
        return list(known.values())
    wanted = tuple(args.implementations.split(","))
    chosen = [x for name, x in known.items() if name.startswith(wanted)]
    if not chosen:
        raise ValueError(
            f"--implementations: none begins with {', '.join(wanted)}; there are {', '.join(known)}"
        )
    return chosen


def run(args: argparse.Namespace) -> int:
    try:
        if args.merge and (args.q, args.cases) != (None, None):
            raise ValueError("--merge measures nothing: leave out --q and --cases")
        cases = [] if args.merge else _with_logits(_cases(args), args)
        implementations = _implementations(args)
        rows, merged = report.read(args.merge) if args.merge else ([], None)
        passes = args.passes.split(",")
        if unknown := [name for name in passes if name not in PASSES]:
            raise ValueError(f"--passes: no {', '.join(unknown)}; there are {', '.join(PASSES)}")
    except (ValueError, OSError) as error:
        print(f"jaxcap bench: {error}", file=sys.stderr)
        return 2

    progress = Progress(sys.stderr)
    command = shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
    ran = merged or report.Run.now(command)
    for number, case in enumerate(cases, 1):
        progress.where = f"case {number} of {len(cases)}, "
        for row in measure(
            case,
            implementations,
            passes,
            rounds=args.rounds,
            burst_s=args.burst,
            sustain_s=args.sustain,
            progress=progress,
            lock=args.lock,
        ):
            rows.append(row)
            if args.json is not None:  # as it goes: a run that is cut short keeps what it has
                report.write(rows, ran, args.json)
    progress.end()
    if merged and args.json is not None:
        report.write(rows, ran, args.json)
    for name in passes:
        print(report.table(rows, name), end="\n\n")
    shown = [row for row in rows if row.passes in passes]
    named = bool(args.implementations or args.merge)
    for text in (report.refusals(shown, named), report.idle(shown)):
        if text:
            print(text)
    print(", ".join(f"{k} {v}" for k, v in ran.versions.items()))
    if not any(row.tflops for row in shown):
        print("jaxcap bench: nothing ran", file=sys.stderr)
        return 2
    if args.picture is not None:
        report.picture(shown, args.picture, f"attention on {ran.versions['device']}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
