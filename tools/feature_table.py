"""The README's table of features by backend, asked of the registry so that it cannot lie.

python tools/feature_table.py            prints it
python tools/feature_table.py --write    writes it between the markers in README.md
python tools/feature_table.py --check    fails if README.md has another one
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxcap import selection  # noqa: E402
from jaxcap.sharding.ring import Ring  # noqa: E402
from jaxcap.spec import AttentionSpec  # noqa: E402

BEGIN, END = "<!-- features: tools/feature_table.py -->", "<!-- /features -->"
CAP = 50.0
INPUTS = ("query", "key", "value")

BASE = AttentionSpec(
    batch=2,
    query_length=1024,
    key_length=1024,
    query_heads=8,
    kv_heads=8,
    head_size=128,
    value_size=128,
    dtype="bfloat16",
    scale=128**-0.5,
    is_causal=True,
    platform="sm90",
)

#: What a row changes in BASE, and which gradients it asks for.
FEATURES: dict[str, tuple[dict, tuple[str, ...]]] = {
    "causal attention": ({}, INPUTS),
    "attention to all": ({"is_causal": False}, INPUTS),
    "`T != S`, causal top-left": ({"query_length": 512}, INPUTS),
    "`T != S`, causal bottom-right": (
        {"query_length": 512, "causal_alignment": "bottom_right"},
        INPUTS,
    ),
    "decoding, `T = 1`": ({"query_length": 1, "causal_alignment": "bottom_right"}, ()),
    "grouped heads (GQA, MQA)": ({"kv_heads": 2}, INPUTS),
    "head size 64": ({"head_size": 64, "value_size": 64}, INPUTS),
    "head size 256": ({"head_size": 256, "value_size": 256}, INPUTS),
    "head size 512": ({"head_size": 512, "value_size": 512}, INPUTS),
    "value head size of its own": ({"value_size": 64}, INPUTS),
    "lengths that are no multiple of 128": ({"query_length": 1000, "key_length": 1000}, INPUTS),
    "float16": ({"dtype": "float16"}, INPUTS),
    "float32": ({"dtype": "float32"}, INPUTS),
    "float64": ({"dtype": "float64"}, INPUTS),
    "window": ({"window": (255, 0)}, INPUTS),
    "boolean mask": ({"is_causal": False, "mask_shape": (2, 1, 1024, 1024)}, INPUTS),
    "bias": ({"bias_shape": (1, 8, 1024, 1024), "bias_dtype": "bfloat16"}, INPUTS),
    "bias with its gradient": (
        {"bias_shape": (1, 8, 1024, 1024), "bias_dtype": "bfloat16"},
        (*INPUTS, "bias"),
    ),
    "sequence lengths": ({"query_lengths": True, "kv_lengths": True}, INPUTS),
    "segment ids": ({"segment_ids": True}, INPUTS),
    "positions": ({"query_positions": True, "kv_positions": True}, INPUTS),
    "ALiBi": ({"alibi": True}, INPUTS),
    "sinks": ({"sinks": True}, (*INPUTS, "sinks")),
    "layer scale": ({"layer_scale": 8.0}, INPUTS),
    "dropout": ({"dropout_rate": 0.1}, INPUTS),
    "residual": ({"return_residual": True}, INPUTS),
    "deterministic gradients": ({"deterministic": True}, INPUTS),
    "in a ring of devices": ({"context_parallel": Ring(("context",), 8, "zigzag")}, INPUTS),
    "on CPU": ({"platform": "cpu"}, INPUTS),
    "on sm80 (A100)": ({"platform": "sm80"}, INPUTS),
    "on sm90 (H100, H200)": ({"platform": "sm90"}, INPUTS),
    "on sm100 (B200)": ({"platform": "sm100"}, INPUTS),
}


def cell(backend: selection.Backend, changes: dict, gradients: tuple[str, ...]) -> str:
    for softcap, suffix in ((CAP, ""), (None, ", no cap")):
        spec = BASE.replace(softcap=softcap, **changes)
        if not selection.reasons_of(backend, spec.replace(gradients=gradients)):
            return "yes" + suffix
        if gradients and not selection.reasons_of(backend, spec):
            return "forward" + suffix
    return "–"


def table() -> str:
    # Where a backend calls another package, a complete build of that package: not what this machine has.
    known = {name: getattr(b, "full_build", b) for name, b in selection.backends().items()}
    names = selection.preference(BASE.replace(softcap=CAP))
    lines = [
        "| | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for feature, (changes, gradients) in FEATURES.items():
        cells = [cell(known[name], changes, gradients) for name in names]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The README's table of features")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not (options.write or options.check):
        print(table())
        return
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"README.md lacks the markers {BEGIN} and {END}")
    wanted = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if options.write:
        readme.write_text(wanted)
    elif text != wanted:
        sys.exit("README.md has an old table of features; run: make table")


if __name__ == "__main__":
    main()
