"""How fast collectives move a payload, by the size of the messages it is cut in.

    python -m tfdist run --workers 2 benchmarks/transport.py
    python -m tfdist run --workers 2 benchmarks/transport.py --ring
    python -m tfdist run --workers 4 benchmarks/transport.py --payload-mib 32 --messages-mib 1 8 32

Every worker of the job runs it; the chief prints. One case is a function that moves the payload in messages of one size, one
after the other, as a training step does. Cases take turns, round after round, so that a machine whose speed drifts slows all of
them; a first round is not counted. Per case: the median time, and the median over rounds of the ratio to the whole payload in one
message.

Workers of one machine meet in memory; with `--ring` they do not. There tfdist cuts large messages itself, so that all sizes come
out alike; `--uncut` sends them as they are, to show why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import tensorflow as tf

import tfdist
from tfdist import collectives

OPS = ("all_reduce", "all_gather", "reduce_scatter")
MIB = 2**20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-mib", type=int, default=64, help="bytes of the whole tensor on a rank (default: 64)")
    parser.add_argument("--messages-mib", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64], help="default: 1 2 4 8 16 64")
    parser.add_argument("--rounds", type=int, default=8, help="turns of every case (default: 8)")
    parser.add_argument("--ring", action="store_true", help="use TensorFlow's ring also where workers share memory")
    parser.add_argument("--uncut", action="store_true", help="send each message of the ring as it is")
    return parser.parse_args()


def mover(strategy: tf.distribute.Strategy, op: str, payload: int, message: int):
    """Returns a function that moves `payload` bytes in messages of `message` bytes; the whole tensor's, not a shard's."""
    size = strategy.mesh.world_size
    elements = message // 4 // size * size
    shape = {"all_gather": elements // size, "all_reduce": elements, "reduce_scatter": elements}[op]

    def on_rank():
        value = tf.fill([shape], 1.0)
        total = tf.zeros([])
        for _ in range(payload // message):
            total += getattr(collectives, op)(value)[0]
        return total

    return tf.function(lambda: strategy.experimental_local_results(strategy.run(on_rank))[0])


def main() -> None:
    args = parse_args()
    way = tf.distribute.experimental.CommunicationImplementation("RING" if args.ring else "AUTO")
    options = tf.distribute.experimental.CommunicationOptions(implementation=way)
    strategy = tfdist.MultiWorkerShardedStrategy(communication_options=options)
    if args.uncut:
        communicator = strategy.extended.communicator
        communicator.transport = communicator.transport.inner
    payload = args.payload_mib * MIB
    cases = [(op, message) for op in OPS for message in args.messages_mib]
    movers = {case: mover(strategy, case[0], payload, case[1] * MIB) for case in cases}
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(args.rounds + 1):
        for case in cases:
            strategy.barrier("turn")
            start = time.perf_counter()
            float(movers[case]())
            if turn:
                seconds[case].append(time.perf_counter() - start)
    if not strategy.cluster.is_chief:
        return
    whole = max(args.messages_mib)
    print(f"{args.payload_mib} MiB, {strategy.mesh.world_size} workers\n{'':16}{'message':>10}{'ms':>10}{'of whole':>10}")
    for op, message in cases:
        ratio = statistics.median(mine / one for mine, one in zip(seconds[op, message], seconds[op, whole], strict=True))
        median = statistics.median(seconds[op, message])
        print(f"{op:16}{message:>6} MiB{1000 * median:>10.1f}{ratio:>10.2f}")
        case = {"benchmark": "transport", "op": op, "workers": strategy.mesh.world_size, "ring": args.ring, "uncut": args.uncut}
        case |= {"payload_mib": args.payload_mib, "message_mib": message}
        print(json.dumps({**case, "milliseconds": round(1000 * median, 2), "of_whole": round(ratio, 3)}))


if __name__ == "__main__":
    main()
