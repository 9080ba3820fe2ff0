"""A plan as it would run: ranks of its strategy are traced with the others absent, and their graphs are read.

The memory and messages of a plan are arithmetic on a trace of the plain model (`memory`, `sent_bytes`). Here the strategy itself
traces the step: buckets, gathers in flight, what stages of a pipeline keep and the order of everything are those that will run.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from tfdist.tables import size_text
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.lifetimes import Sweep
from tfdist.tools.planning.memory import in_step
from tfdist.tools.planning.operations import tensor_bytes
from tfdist.tools.planning.rank_trace import Job, RankTrace, trace_rank
from tfdist.tools.planning.sent_bytes import sent_of

# What gathers layers, carries gradients and passes between stages is made in scopes with the names of the plan's labels.
_MESSAGES = re.compile(r"(^|/)(unshard|reduce_scatter|all_gather|all_reduce|pipe)/")


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Figures from the graphs of ranks: of one, or of the first rank at each place of a pipeline.

    Attributes:
        memory: what the fullest of these ranks' devices holds.
        sent_bytes: what each of these ranks sends in a step, as `strategy.last_plan` counts it.
        passed_bytes: what each hands to other stages of its process, along edges of the graph.
        planned_bytes: what each sends and hands on by the plan's arithmetic.
        is_lower_bound: whether sizes of tensors are unknown until they are computed, so that a step may take more memory.
        refusal: what the strategy, or a part of the model, has said against the plan; "": nothing.
        failure: why there was no trace that could be read; "": there was.
    """

    memory: DeviceMemory = DeviceMemory(0, 0, 0)
    sent_bytes: tuple[float, ...] = ()
    passed_bytes: tuple[float, ...] = ()
    planned_bytes: tuple[float, ...] = ()
    is_lower_bound: bool = False
    refusal: str = ""
    failure: str = ""

    def confirmed(self, planned: DeviceMemory) -> str:
        """Returns in a sentence what it says of a plan that fits."""
        if self.failure:
            return f"Not confirmed: the dry run has failed, which says nothing of the plan. {self.failure}"
        least = "at least " if self.is_lower_bound else ""
        return (
            f"Confirmed by a dry run: memory {least}{size_text(self.memory.together)} (planned {size_text(planned.together)}), "
            f"{self._sent()}."
        )

    def refuted(self, planned: DeviceMemory, limit: float) -> str:
        """Returns in a sentence what it says against a plan."""
        if self.refusal:
            return f"its strategy refuses it: {self.refusal}"
        largest = self.memory.largest()
        return (
            f"a dry run finds {size_text(self.memory.together)} (planned {size_text(planned.together)}), "
            f"{size_text(self.memory.together - limit)} too much, most of it {largest}."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON can carry."""
        memory = {**self.memory.parts(), "together": self.memory.together}
        return {**dataclasses.asdict(self), "memory": memory}

    def _sent(self) -> str:
        found = zip(self.sent_bytes, self.passed_bytes, self.planned_bytes, strict=True)
        pairs = [(sent + passed, planned) for sent, passed, planned in found]
        sent, planned = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        if sent == planned:
            return f"sent bytes equal ({size_text(max(pair[0] for pair in pairs))} a step)"
        return f"sent bytes {size_text(sent)} a step (planned {size_text(planned)}, {sent - planned:+,.0f} bytes)"


def dry_run_of(job: Job, candidate: Candidate, limit: float = math.inf) -> DryRun:
    """Traces a plan's step on the first rank at each place of the pipeline, without running it, and reads what it takes.

    Once a rank needs more than `limit`, the bytes of a device, the others are left out.
    """
    found: list[tuple[DeviceMemory, int, RankTrace]] = []
    for pipe in range(candidate.pipeline):
        try:
            alone = trace_rank(job, candidate, pipe)
        except (NotImplementedError, ValueError) as error:
            return DryRun(refusal=_first_line(error))
        except Exception as error:  # whatever a user's model raises
            return DryRun(failure=f"{type(error).__name__}: {_first_line(error)}")
        memory, unknown = memory_of_trace(alone, on_gpu=job.kind == "GPU")
        found.append((memory, unknown, alone))
        if memory.together > limit:
            break
    planned = [sent_of(job.traced, candidate, job.batch_size, pipe, job.config) for pipe in range(len(found))]
    return DryRun(
        memory=max((memory for memory, _, _ in found), key=lambda memory: memory.together),
        sent_bytes=tuple(alone.plan.sent_bytes(alone.rank) for _, _, alone in found),
        passed_bytes=tuple(float(alone.passed_bytes) for _, _, alone in found),
        planned_bytes=tuple(sum(axes.values()) for axes in planned),
        is_lower_bound=any(unknown for _, unknown, _ in found),
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def memory_of_trace(alone: RankTrace, *, on_gpu: bool = False) -> tuple[DeviceMemory, int]:
    """Returns what a rank's device holds in a step, in the parts of `memory_of`, and how many tensors have unknown sizes."""
    graph = alone.graph
    sweep = Sweep([graph], [1], [x.name for x in graph.outputs], [one.name for one in graph.control_outputs])
    buffers = sweep.at(1)
    live = buffers.live()
    fullest = int(np.argmax(live))
    is_there = (buffers.births <= fullest) & (buffers.deaths >= fullest)
    makers = [sweep.ops[maker] for maker in buffers.makers]
    is_message = np.array([one.type.startswith("Collective") or bool(_MESSAGES.search(one.name)) for one in makers], bool)
    messages = int(buffers.sizes[is_there & is_message].sum())
    given = sum(tensor_bytes(x) or 0 for x in graph.inputs)  # the batch
    held = DeviceMemory(
        alone.state.parameter_bytes + alone.state.exact_bytes, alone.state.gradient_bytes, alone.state.optimizer_bytes
    )
    return in_step(held, int(live[fullest]), messages, given, on_gpu), sweep.unknown
