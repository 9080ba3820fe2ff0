"""How much of a step's communication passes behind its products on GPUs: TensorFlow's GPU runtime and NCCL path on null GPUs.

    python -m benchmarks.gpu_timeline
    python -m benchmarks.gpu_timeline --meshes "data 4" --links 400gbit --picture docs/images/gpu_timeline.png

A null GPU (tests/null_gpu) computes nothing, but its streams keep their order and take time, so that what waits for what is
TensorFlow's own doing. Every product takes --product-us: a tensor rank's is half of a layer's, a microbatch's of a pipeline a
quarter. A message takes what it would take beside products of an H100: with --tokens tokens per replica, a
layer's product of W x W weights is 2 tokens W^2 operations at 400 TFLOP/s, its weights are 4 W^2 bytes on a link of so many bytes
per second; both are stretched alike until the host of this machine is not what is waited for. Activations are as large beside
weights as those of layers of --hidden units. All other kernels, and copies between devices, take no time.

    compute     time in which a device computes products, of one step
    messages    time in which it is in a collective of the data axis whose ranks have all come
    can hide    for how long a device would be in a product and in a message at once in the best order, in which nobody waits for
                the host: see `benchmarks.best_order`. Of that are left out the gather before the first product, what is sent
                before the first gradients of backward are complete and after the last, activations of tensor-parallel layers in
                forward; and in a pipeline all but the last microbatch's backward, and the first one's forward
    hidden      the part of the step in which the device is in both
    share       hidden / can hide; "best" is that of the step in which it is largest: where other programs use the machine, one
                rank is late and the others wait for it, as no order of emission could help
    step        the step's time beside that of the best order; a pipeline's bubble there is as it was in this step
    waits       gathers after the first in which no product ran for a tenth of a product's time or more

Figures are of the first device, and of the median step. A table, and a line of JSON for each case, are printed. Messages take ten
times as long as products at 25 Gbit/s: there everything is stretched less, so that the whole ends in some ten minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from tabulate import tabulate

from benchmarks import best_order, cases
from benchmarks.timelines import Message, Timeline
from tests.null_gpu import building, running
from tests.null_gpu.log import Log

LINKS = {"nvlink": 450e9, "400gbit": 50e9, "25gbit": 3.125e9}  # bytes per second that a device sends
PRODUCT_US = {"nvlink": 20_000, "400gbit": 20_000, "25gbit": 3_000}
FLOPS = 400e12  # what large products reach on an H100, in bfloat16
BYTES_PER_WEIGHT = 4
MICROBATCHES = 4


@dataclasses.dataclass(frozen=True)
class Mesh:
    """What the devices of a run are: `devices` in each of `processes`, and the strategy's settings."""

    processes: int = 1
    devices: int = 4
    tensor: int = 1
    pipe: int = 1

    @property
    def settings(self) -> dict[str, int]:
        sizes = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipe}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def products(self) -> int:
        """Returns how many products of a device make one of a layer on a replica's whole batch."""
        return self.tensor * (MICROBATCHES if self.pipe > 1 else 1)

    def model(self, layers: int, settings: dict[str, Any] | None) -> best_order.Model:
        """Returns what the first device computes, by the settings of a contender."""
        known = {name: value for name, value in (settings or {}).items() if name in ("zero_stage", "prefetch")}
        microbatches = MICROBATCHES if self.pipe > 1 else 0
        return best_order.Model(layers // self.pipe, tensor=self.tensor > 1, microbatches=microbatches, **known)

    def is_over_data(self, ranks: list[int]) -> bool:
        """Whether `ranks` differ in their place on the axis "data" alone, the outermost."""
        return len({rank % (self.tensor * self.pipe) for rank in ranks}) == 1


MESHES = {
    "data 4": Mesh(),
    "data 2 x tensor 2": Mesh(tensor=2),
    "data 2 x pipe 2": Mesh(pipe=2),
    "2 processes": Mesh(processes=2, devices=1),
    "data 2 x tensor 2, 2 processes": Mesh(processes=2, devices=2, tensor=2),
    "data 2 x pipe 2, 4 processes": Mesh(processes=4, devices=1, pipe=2),
}
# Strategies: None is TensorFlow's own, of the axis "data" alone.
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
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES), help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all")
    bucket_help = "layers in a gradient bucket and in a parameter group; default: 2"
    parser.add_argument("--bucket-layers", nargs="+", type=cases.positive_int, default=[2], help=bucket_help)
    sizes = {"layers": 12, "width": 512, "tokens": 8192, "hidden": 8192, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=cases.positive_int, default=default, help=f"default: {default}")
    product_help = f"of one product of a device; default: by the link, {PRODUCT_US}"
    parser.add_argument("--product-us", type=cases.positive_int, help=product_help)
    pending_help = "kernels that may be queued on a device before the host waits (TensorFlow's kernel tracker); default: no limit"
    parser.add_argument("--pending-kernels", type=cases.positive_int, metavar="N", help=pending_help)
    parser.add_argument("--picture", type=pathlib.Path, help="a file for the fastest step of the last mesh and link")
    return parser.parse_args(argv)


def product_us(args: argparse.Namespace, link: str) -> int:
    return args.product_us or PRODUCT_US[link]


def microseconds_per_mib(args: argparse.Namespace, link: str) -> float:
    """Returns how long a MiB on the link takes, where a layer's product takes `product_us`."""
    product_seconds = 2 * args.tokens / FLOPS  # per weight
    message_seconds = BYTES_PER_WEIGHT / LINKS[link]
    weights_per_mib = 2**20 / BYTES_PER_WEIGHT
    return product_us(args, link) * message_seconds / product_seconds * weights_per_mib / args.width**2


def run(args: argparse.Namespace, mesh: Mesh, link: str, bucket_layers: int) -> dict[str, list[Timeline]]:
    """Returns the timelines of each contender's steps on the first device."""
    machine = running.Machine(
        mesh.devices,
        bytes=1 << 30,
        product_us=product_us(args, link),
        timeout_seconds=300,  # on a busy machine a process begins a step long after the others
        message_us_per_mib=round(mesh.products * microseconds_per_mib(args, link)),
    )
    bucket = bucket_layers * BYTES_PER_WEIGHT * args.width**2 // mesh.tensor
    names = [name for name in args.contenders if CONTENDERS[name] is not None or not mesh.settings]
    children = {}
    for name in names:
        settings = CONTENDERS[name]
        if settings is not None:
            settings = {**settings, **mesh.settings, "bucket_bytes": bucket, "group_bytes": bucket}
        rows = max(MICROBATCHES, args.width * args.tokens // args.hidden)
        sizes = {"layers": args.layers, "width": args.width, "rows": rows, "microbatches": MICROBATCHES, "steps": args.steps}
        children[name] = {**sizes, "settings": settings}
    timelines: dict[str, list[Timeline]] = {}
    # In a job of several processes TensorFlow's strategy and tfdist's start their servers differently: each has a job of its own.
    own = [name for name in names if mesh.processes > 1 and CONTENDERS[name] is None]
    for job in (own, [name for name in names if name not in own]):
        timelines |= run_job(args, mesh, machine, {name: children[name] for name in job})
    return {name: timelines[name] for name in names if name in timelines}


def run_job(
    args: argparse.Namespace, mesh: Mesh, machine: running.Machine, children: dict[str, Any]
) -> dict[str, list[Timeline]]:
    """Runs the contenders in one job, and returns the timelines of those that ended well."""
    if not children:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "benchmarks.gpu_timeline_child", json.dumps(children), str(args.pending_kernels or 0)]
        ended = running.run(pathlib.Path(folder), machine, program, mesh.processes, seconds=1800)
    for results in ended.results:
        for name, result in results.items():
            if "error" in result:
                print(f"{name}: {result['error']}", file=sys.stderr)
    if any(ended.codes):
        print(ended.outputs[0][-3000:], file=sys.stderr)
    done = [name for name in children if all("error" not in results.get(name, {"error": "not run"}) for results in ended.results)]
    members = {
        name: [ended.processes.index(process) * mesh.devices + device for process, device in ranks]
        for name, ranks in ended.log.members().items()
    }
    over_data = {name for name, ranks in members.items() if mesh.is_over_data(ranks)}
    log = ended.log.of_process(ended.processes[0])
    found = {}
    for name in done:
        settings = {"model": mesh.model(args.layers, CONTENDERS[name]), "is_chain": mesh.processes > 1}
        found[name] = [timeline_of(log, f"{name} {step}", over_data, **settings) for step in range(args.steps)]
    return found


def timeline_of(log: Log, step: str, over_data: set[str] | None = None, **settings: Any) -> Timeline:
    """Returns that of the first device, in a `log` of one process; messages of communicators not `over_data` are activations.

    `settings` are fields of the timeline.
    """
    records = [record for record in log.between(f"{step} begins", f"{step} ends").records if record.device == 0]
    products = [(record.began, record.ended) for record in records if record.kind == "product"]
    messages: tuple[list[Message], list[Message]] = [], []
    for call in sorted(Log(records).calls(), key=lambda call: call.met):
        is_over_data = over_data is None or call.communicator in over_data
        messages[not is_over_data].append(Message(call.op, (call.met, call.record.ended), call.bytes))
    return Timeline(products, *messages, **settings)


def record_of(
    args: argparse.Namespace, mesh: str, link: str, bucket_layers: int, name: str, timelines: list[Timeline]
) -> dict[str, Any]:
    def median(field: str) -> float:
        return statistics.median(getattr(timeline, field) for timeline in timelines)

    fields = ("step_us", "compute_us", "message_us", "hidden_us", "can_hide_us", "ideal_us", "hidden_share")
    product = product_us(args, link)
    return {
        "mesh": mesh,
        "link": link,
        "contender": name,
        "bucket_layers": bucket_layers,
        "product_us": product,
        "pending_kernels": args.pending_kernels,
        **{field: median(field) for field in fields},
        "best_share": max(timeline.hidden_share for timeline in timelines),
        "waits": statistics.median(timeline.waits(product / 10) for timeline in timelines),
    }


def row_of(record: dict[str, Any]) -> list[Any]:
    times = [f"{record[field] / 1000:.0f}" for field in ("compute_us", "message_us", "hidden_us", "can_hide_us")]
    return [
        record["mesh"],
        record["link"],
        record["contender"],
        record["bucket_layers"],
        *times,
        *(f"{record[field]:.0%}" if record["can_hide_us"] else "" for field in ("hidden_share", "best_share")),
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
    complete = True
    for mesh in args.meshes:
        for link in args.links:
            for bucket_layers in args.bucket_layers:
                found = run(args, MESHES[mesh], link, bucket_layers)
                complete &= len(found) >= sum(CONTENDERS[name] is not None for name in args.contenders)
                for name, timelines in found.items():
                    try:
                        records.append(record_of(args, mesh, link, bucket_layers, name, timelines))
                    except ValueError as error:  # other messages than those whose best order is known
                        print(f"{name}: {error}", file=sys.stderr)
                        complete = False
                    else:
                        print(json.dumps(records[-1]), flush=True)
    if args.picture:
        pictured = {name: sorted(found[name], key=lambda timeline: timeline.step_us) for name in PICTURED if name in found}
        draw({name: steps[0] for name, steps in pictured.items()}, args.links[-1], args.picture)
    head = [
        "mesh",
        "link",
        "strategy",
        "bucket",
        "compute",
        "messages",
        "hidden",
        "can hide",
        "share",
        "best",
        "step ms",
        "/ ideal",
    ]
    print(tabulate([row_of(record) for record in records], [*head, "waits"]))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
