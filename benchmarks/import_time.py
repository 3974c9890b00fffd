"""What `import jaxcap` adds to `import jax, flax`.

    python -m benchmarks.import_time

Each sample is a fresh interpreter that imports jax and flax, and then, timed apart, jaxcap.
"""

import argparse
import json
import statistics
import subprocess
import sys

CHILD = """
import json, sys, time
start = time.perf_counter()
import jax, flax
middle = time.perf_counter()
before = set(sys.modules)
import jaxcap
end = time.perf_counter()
print(json.dumps([middle - start, end - middle, sorted(set(sys.modules) - before)]))
"""


def sample() -> tuple[float, float, list[str]]:
    done = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True)
    base, added, modules = json.loads(done.stdout)
    return base, added, modules


def main() -> None:
    parser = argparse.ArgumentParser(description="What import jaxcap adds")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument(
        "--modules", action="store_true", help="list what jaxcap's import brings in"
    )
    options = parser.parse_args()
    sample()  # fills the file cache and writes the bytecode
    samples = [sample() for _ in range(options.samples)]
    base, added = [s[0] for s in samples], [s[1] for s in samples]
    print(f"import jax, flax   {statistics.median(base):.3f} s  (best {min(base):.3f})")
    print(f"import jaxcap      {statistics.median(added):+.3f} s  (best {min(added):+.3f})")
    print(f"median of {options.samples} fresh interpreters; {len(samples[0][2])} more modules")
    if options.modules:
        print("\n".join(samples[0][2]))


if __name__ == "__main__":
    main()
