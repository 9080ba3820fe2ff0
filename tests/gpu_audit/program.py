"""What is found in the steps whose names hold one of the given words, as JSON lines: nine devices, a host and eight GPUs.

python tests/gpu_audit/program.py --transport nccl 'stage 3' pipeline
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--transport", choices=("nccl", "ring"), default="nccl")
    options = parser.parse_args()

    import tfdist

    tfdist.use_logical_cpus(9)
    from tests.gpu_audit.as_gpus import as_gpus
    from tests.gpu_audit.audit import findings
    from tests.gpu_audit.parallel_steps import STEPS

    for name, trace in STEPS.items():
        if options.words and not any(word in name for word in options.words):
            continue
        start = time.monotonic()
        try:
            with as_gpus(options.transport), contextlib.redirect_stdout(sys.stderr):
                found = findings(trace())
        except Exception:
            print(json.dumps({"step": name, "error": traceback.format_exc()}), flush=True)
            continue
        rows = [[one.kind, one.what, seen.most, seen.example] for one, seen in sorted(found.items(), key=lambda pair: pair[0])]
        print(json.dumps({"step": name, "found": rows, "seconds": round(time.monotonic() - start, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
