"""The work and the messages of a replica of a traced model under a candidate."""

import functools
import math

import keras
import numpy as np

from tfdist.collectives import assign_buckets
from tfdist.sharding import ShardingConfig
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.parts import parts_by_pipe
from tfdist.tools.planning.search import divisors
from tfdist.tools.planning.step_time import Step, StepTime, step_time
from tfdist.tools.planning.traced_model import TracedModel
from tfdist.tools.planning.work import Seconds, work_of

_DEFAULTS = ShardingConfig()


class Estimates:
    """Makes the time of a step of a traced model, for any candidate.

    Args:
        traced: the model.
        batch_size: examples of a step, all devices together.
        hardware: devices and links.
        devices_per_host: how many devices of one host take part.
    """

    def __init__(self, traced: TracedModel, batch_size: int, hardware: Hardware, devices_per_host: int):
        self.traced = traced
        self.batch_size = batch_size
        self.hardware = hardware
        self.devices_per_host = devices_per_host
        self.work = work_of(traced.traces)
        self.assumed: list[str] = []

    def time(self, candidate: Candidate) -> StepTime:
        """Returns how long a step takes."""
        return step_time(self.step(candidate), candidate, self.hardware, self.devices_per_host)

    def step(self, candidate: Candidate) -> Step:
        """Returns what a replica computes and sends."""
        rows = self.batch_size // candidate.data // candidate.microbatches
        shardings = self.traced.layouts.shardings(candidate.tensor)
        moved = self.traced.layouts.moved_bytes(candidate.tensor, 1, 1, 0)
        seconds = self._seconds(rows, candidate.tensor)
        costs = seconds.forward + seconds.backward
        stages = self.traced.calls_of_stages(candidate.stages)
        sizes = candidate.tensor, candidate.pipeline, candidate.stages_per_rank
        size, elements, messages = self._trained(candidate.zero_stage == 3, *sizes)
        forward = float(seconds.forward.sum())
        blocks = float(seconds.again[self.traced.recomputed_calls].sum())
        whole_stages = candidate.pipeline > 1
        shares = [float(costs[stage].sum() / costs.sum()) for stage in stages]
        of_ranks = [shares[pipe :: candidate.pipeline] for pipe in range(candidate.pipeline)]
        return Step(
            forward=forward,
            backward=float(seconds.backward.sum()),
            # On the rank that computes most, of several stages the mean; of devices that share a processor, the mean of all.
            stage_share=1 / len(shares) if self.hardware.is_shared else max(sum(own) / len(own) for own in of_ranks),
            parameter_bytes=size,
            parameters=elements,
            messages=messages,
            tensor_bytes=rows * sum(moved),
            # Of a pair of layers one forward and one backward, of any other two.
            tensor_messages=sum(2 - one.is_paired for one, size in zip(shardings, moved, strict=True) if size),
            border_bytes=max((self.traced.output_bytes(stage[-1], rows) for stage in stages[:-1] if stage), default=0),
            recomputed=(1.0 if whole_stages else blocks / forward if forward else 0.0) if candidate.recompute else 0.0,
        )

    def tensor_sizes(self, most: int) -> list[int]:
        """Returns over how many tensor ranks the model can be sharded: divisors of `most` over which a layer is worth it."""
        try:
            return [size for size in divisors(most) if size == 1 or self.traced.layouts.shardings(size)]
        except ValueError as error:
            self.assumed.append(f"No tensor ranks: {error}")
            return [1]

    @property
    def most_stages(self) -> int:
        """How many stages the model can be cut in."""
        model = self.traced.model
        is_graph = isinstance(model, keras.Sequential) or hasattr(model, "_nodes_by_depth")
        return max(len(self.traced.calls) - 1, 1) if is_graph else 1

    @functools.cached_property
    def flops_per_example(self) -> float:
        """FLOPs of forward and backward of one example."""
        low, high = self.work.batch_sizes
        times = np.bincount(self.work.stands_for, minlength=len(self.work.stands_for))[self.work.calls]
        flops = (self.work.figures[1, 0] - self.work.figures[0, 0]) / (high - low)
        return float((flops * times)[self.work.is_product].sum())

    @functools.cached_property
    def tokens_per_example(self) -> int:
        """The length of the first input of integers, as of tokens; 1 where there is none: an example is a token then."""
        for one in getattr(self.traced.model, "inputs", None) or ():
            if "int" in str(one.dtype) and len(one.shape) == 2:
                return int(one.shape[1] or self.traced.sequence_length or 1)
        return 1

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as the model
    def _seconds(self, rows: int, tensor: int) -> Seconds:
        divided = self.traced.divided_work(tensor) if tensor > 1 else None
        return self.work.seconds(rows, self.hardware, divided=divided, ranks=tensor)

    @functools.cache  # noqa: B019  as long as the model
    def _trained(self, by_layer: bool, *sizes: int) -> tuple[float, float, int]:
        """Returns bytes and elements of what a rank trains, and in how many messages it travels once: `by_layer`, whole layers.

        Of devices that share a processor what counts is what all of them do, here the mean; of others what the fullest does.
        """
        limit = _DEFAULTS.group_bytes if by_layer else _DEFAULTS.bucket_bytes
        found = []
        for rank in parts_by_pipe(self.traced, 1, *sizes):
            together: dict[str, int] = {}
            for place, part in rank.trained.items():
                key = part.weight.path.rpartition("/")[0] if by_layer else str(place)
                together[key] = together.get(key, 0) + part.bytes
            messages = len(assign_buckets(list(together.values()), limit))
            found.append((sum(together.values()), sum(part.local for part in rank.trained.values()), messages))
        size, elements, count = (sum(x) / len(x) if self.hardware.is_shared else max(x) for x in zip(*found, strict=True))
        return size, elements, math.ceil(count)
