"""A picture of what each rank of a pipeline really did in one step: `tfdist.pipeline.measure`, drawn.

    python -m benchmarks.pipeline_picture docs/images/pipeline_1f1b.png

The ranks are logical CPUs of this process and share its cores: with fewer cores than ranks, an action also takes the time in
which it waits for a core. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases, peers
from benchmarks.cases import TFDIST
from benchmarks.gpt_arrays import token_batch
from benchmarks.pipeline_training import build_pipeline
from tfdist.pipeline import draw, measure


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=pathlib.Path, help="the file to write, such as step.png")
    parser.add_argument("--ranks", type=cases.positive_int, default=4, help="default: 4")
    parser.add_argument("--microbatches", type=cases.positive_int, default=8, help="default: 8")
    names = ("gpipe", "1f1b", "interleaved", "zero_bubble")
    parser.add_argument("--schedule", choices=names, default="1f1b", help="default: 1f1b")
    parser.add_argument("--runs", type=cases.positive_int, default=10, help="steps, of which the shortest is drawn; default: 10")
    peers.add_size_arguments(parser, layers=8)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    case = peers.make_case(args, TFDIST, args.ranks, schedule=args.schedule, num_microbatches=args.microbatches)
    _, model = build_pipeline(case)
    measured = measure(model, *token_batch(case), runs=args.runs)
    title = f"{args.schedule}: {case.num_stages} stages, {args.microbatches} microbatches, {1e3 * measured.total_time:.0f} ms"
    draw(measured.spans, args.picture, title=title)
    print(f"{title}, idle / busy time {measured.bubble_fraction:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
