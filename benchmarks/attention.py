"""jaxcap beside its peers on the cases of benchmarks/RESULTS.md, in one run.

    python benchmarks/attention.py --json benchmarks/results/h200.json --picture docs/speed.png

It measures whichever peers are installed, by turns, and prints a table a pass: the speed of the first calls
and, which counts, sustained: right after 0.12 s of the same work (`--sustain`). `jaxcap bench` is the same
command of an installed package.
"""

import os
import sys

# PyTorch's peers need room on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxcap.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
