"""How much of a step's communication passes behind its products on GPUs: TensorFlow's GPU runtime and NCCL path on null GPUs.

    python -m benchmarks.gpu_timeline
    python -m benchmarks.gpu_timeline --links 400gbit --picture docs/images/gpu_timeline.png

A null GPU (tests/null_gpu) computes nothing, but its streams keep their order and take time, so that what waits for what is
TensorFlow's own doing. Every product takes --product-us. A message takes what it would take beside products of an H100: with
--tokens tokens per device, a layer's product of W x W weights is 2 tokens W^2 operations at 400 TFLOP/s, its weights are 4 W^2
bytes on a link of so many bytes per second; both are stretched alike until the host of this machine is not what is waited for.
All other kernels take no time.

    compute     time in which a device computes products, of one step
    messages    time in which it is in a collective whose ranks have all come
    hidden      the part of `messages` in which it also computes
    can hide    what could be hidden: not the gather before the first product, nor what follows the last gradient
    share       hidden / can hide
    step        the step's time beside the ideal one, max(compute, messages that can hide) + messages that cannot
    waits       gathers after the first in which no product ran for a tenth of a product's time or more

Figures are of the median step. A table, and a line of JSON for each case, are printed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from tabulate import tabulate

from benchmarks import cases
from benchmarks.timelines import Message, Timeline
from tests.null_gpu import building, running
from tests.null_gpu.log import Log

LINKS = {"nvlink": 450e9, "400gbit": 50e9, "25gbit": 3.125e9}  # bytes per second that a device sends
FLOPS = 400e12  # what large products reach on an H100, in bfloat16
BYTES_PER_WEIGHT = 4
# Strategies: None is MirroredStrategy.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "mirrored": None,
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3, prefetch 0": {"zero_stage": 3, "prefetch": 0},
    "stage 3, prefetch 2": {"zero_stage": 3, "prefetch": 2},
}
PICTURED = ("mirrored", "stage 0", "stage 1", "stage 2", "stage 3")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all")
    parser.add_argument("--bucket-layers", type=cases.positive_int, default=2, help="layers in a gradient bucket; default: 2")
    sizes = {"devices": 4, "layers": 12, "width": 512, "tokens": 8192, "product-us": 10_000, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=cases.positive_int, default=default, help=f"default: {default}")
    pending_help = "kernels that may be queued on a device before the host waits (TensorFlow's kernel tracker); default: no limit"
    parser.add_argument("--pending-kernels", type=cases.positive_int, metavar="N", help=pending_help)
    parser.add_argument("--picture", type=pathlib.Path, help="a file for timelines of the last link's steps")
    return parser.parse_args(argv)


def microseconds_per_mib(args: argparse.Namespace, link: str) -> float:
    """Returns how long a MiB on the link takes, in the time in which a product takes `--product-us`."""
    product_seconds = 2 * args.tokens / FLOPS  # per weight
    message_seconds = BYTES_PER_WEIGHT / LINKS[link]
    weights_per_mib = 2**20 / BYTES_PER_WEIGHT
    return args.product_us * message_seconds / product_seconds * weights_per_mib / args.width**2


def run(args: argparse.Namespace, link: str) -> dict[str, list[Timeline]]:
    """Returns the timelines of each contender's steps on the first device."""
    machine = running.Machine(
        args.devices, bytes=1 << 30, product_us=args.product_us, message_us_per_mib=round(microseconds_per_mib(args, link))
    )
    bucket = args.bucket_layers * BYTES_PER_WEIGHT * args.width**2
    children = {
        name: {
            "layers": args.layers,
            "width": args.width,
            "steps": args.steps,
            "settings": None if CONTENDERS[name] is None else {**CONTENDERS[name], "bucket_bytes": bucket},
        }
        for name in args.contenders
    }
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "benchmarks.gpu_timeline_child", json.dumps(children), str(args.pending_kernels or 0)]
        ended = running.run(pathlib.Path(folder), machine, program, seconds=1800)
    for name, result in ended.results[0].items():
        if "error" in result:
            print(f"{name}: {result['error']}", file=sys.stderr)
    if ended.codes != [0]:
        print(ended.outputs[0][-3000:], file=sys.stderr)
    done = [name for name in args.contenders if "error" not in ended.results[0].get(name, {"error": "not run"})]
    return {name: [timeline_of(ended.log, f"{name} {step}") for step in range(args.steps)] for name in done}


def timeline_of(log: Log, step: str) -> Timeline:
    records = [record for record in log.between(f"{step} begins", f"{step} ends").records if record.device == 0]
    products = [(record.began, record.ended) for record in records if record.kind == "product"]
    calls = sorted(Log(records).calls(), key=lambda call: call.met)
    return Timeline(products, [Message(call.op, (call.met, call.record.ended), call.bytes) for call in calls])


def record_of(args: argparse.Namespace, link: str, name: str, timelines: list[Timeline]) -> dict[str, Any]:
    def median(field: str) -> float:
        return statistics.median(getattr(timeline, field) for timeline in timelines)

    fields = ("step_us", "compute_us", "message_us", "hidden_us", "can_hide_us", "ideal_us", "hidden_share")
    return {
        "link": link,
        "contender": name,
        "devices": args.devices,
        "pending_kernels": args.pending_kernels,
        **{field: median(field) for field in fields},
        "waits": statistics.median(timeline.waits(args.product_us / 10) for timeline in timelines),
    }


def row_of(record: dict[str, Any]) -> list[Any]:
    times = [f"{record[field] / 1000:.0f}" for field in ("compute_us", "message_us", "hidden_us", "can_hide_us")]
    return [
        record["link"],
        record["contender"],
        *times,
        f"{record['hidden_share']:.0%}",
        f"{record['step_us'] / 1000:.0f}",
        f"{record['step_us'] / record['ideal_us']:.2f}",
        f"{record['waits']:g}",
    ]


def draw(timelines: dict[str, Timeline], link: str, path: pathlib.Path) -> None:
    """Draws a step of each contender: its products above its messages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"AllGather": "tab:orange", "ReduceScatter": "tab:green", "AllReduce": "tab:red", "AllToAll": "tab:purple"}
    figure, axes = pyplot.subplots(len(timelines), 1, sharex=True, figsize=(11, 1.3 * len(timelines) + 1), squeeze=False)
    seen: dict[str, Any] = {}
    for (name, timeline), axis in zip(timelines.items(), axes[:, 0], strict=True):
        start = min(begin for begin, _ in [*timeline.products, *(message.span for message in timeline.messages)])

        def bars(spans: Any, start: float = start) -> list[tuple[float, float]]:
            return [((begin - start) / 1000, (end - begin) / 1000) for begin, end in spans]

        seen["product"] = axis.broken_barh(bars(timeline.products), (1, 0.8), color="tab:blue", edgecolor="white")
        for op in dict.fromkeys(message.op for message in timeline.messages):
            spans = bars(message.span for message in timeline.messages if message.op == op)
            seen[op] = axis.broken_barh(spans, (0, 0.8), color=colors.get(op, "tab:gray"), edgecolor="white")
        axis.set_yticks([0.4, 1.4], ["NCCL", "compute"])
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel(f"milliseconds (of null GPUs; link: {link})")
    figure.legend(seen.values(), seen.keys(), loc="upper right", ncols=len(seen), fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if reason := building.missing():
        print(reason, file=sys.stderr)
        return 1
    records = []
    for link in args.links:
        found = run(args, link)
        for name, timelines in found.items():
            records.append(record_of(args, link, name, timelines))
            print(json.dumps(records[-1]), flush=True)
        if args.picture and link == args.links[-1]:
            draw({name: found[name][-1] for name in PICTURED if name in found}, link, args.picture)
    head = ["link", "strategy", "compute", "messages", "hidden", "can hide", "share", "step ms", "/ ideal", "waits"]
    print(tabulate([row_of(record) for record in records], head))
    return 0 if len(records) == len(args.links) * len(args.contenders) else 1


if __name__ == "__main__":
    sys.exit(main())
