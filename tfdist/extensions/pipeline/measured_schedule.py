"""When each action of a schedule really runs, measured; `simulate` computes the same from durations."""

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import all_reduce
from tfdist.extensions.pipeline.action_clock import ActionClock
from tfdist.extensions.pipeline.model import PipelineModel
from tfdist.extensions.pipeline.schedules.actions import Action
from tfdist.extensions.pipeline.schedules.simulation import Simulation, Span
from tfdist.extensions.pipeline.step import Step


def measure(model: PipelineModel, x: Any, y: Any = None, sample_weight: Any = None, *, runs: int = 3) -> Simulation:
    """Runs the schedule of `model` on one batch, forward and backward, and says when each rank did what.

    An action starts when the action before it on its rank has ended and the messages that it needs have arrived. An action ends
    when all its results exist, and sends each result as soon as that exists. So the time between two actions is waiting,
    transfers and, with `recompute`, the forward that is computed again. Weights do not change; metrics are updated, and so are
    random generators and the running statistics of BatchNormalization.

    Logical CPUs share the cores of the machine: with more ranks than cores an action also takes the time in which it waits for a
    core. In a TF_CONFIG job all workers call `measure` together; their clocks must agree, as they do on one machine.

        draw(measure(model, x, y).spans, "step.png")

    Args:
        model: a compiled model.
        x: one global batch, as for `fit`: arrays or nested arrays, (batch, ...).
        y: its targets.
        sample_weight: its weights.
        runs: how often the schedule runs, after a first run that is not counted. The shortest run is returned.

    Returns:
        The schedule and the measured times of its actions, in seconds from the first start, of the ranks of this process's
        pipeline.

    Raises:
        ValueError: `runs` is no positive integer.
    """
    errors.check_integer("runs", runs, least=1)
    strategy, schedules = model.distribute_strategy, [model.schedule]

    def actions() -> list[Action]:
        return [action for rank in range(schedules[-1].num_ranks) for action in schedules[-1].actions(rank)]

    @tf.function(autograph=False)
    def step(begin: tf.Tensor, data: Any) -> Any:
        def on_rank(*data: Any) -> tuple[tf.Tensor, tf.Tensor]:
            clock = ActionClock(begin)
            step = Step(model, keras.utils.unpack_x_y_sample_weight(data), training=True, has_loss=True, clock=clock)
            schedules.append(step.schedule)
            step.run()
            times = tf.stack([tf.stack(clock.times.get(action, [tf.zeros([], tf.float64)] * 2)) for action in actions()])
            # Each action has one rank.
            times = times if step.schedule.num_ranks == 1 else all_reduce(times, "pipe", label="pipe/times")
            # Gradients are read because TensorFlow drops what nobody reads.
            read = [tf.reduce_sum(tf.cast(gradient, tf.float32)) for gradient, _ in step.gradients() if gradient is not None]
            return times, tf.add_n([tf.zeros([]), *read])

        return strategy.run(on_rank, args=data)

    data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    data = data if isinstance(data, tuple) else (data,)
    rows = len(tf.nest.flatten(data)[0])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(rows))
    batch = next(iter(dataset))

    def run() -> np.ndarray:  # (action, start and end)
        times, _ = step(tf.constant(time.time(), tf.float64), batch)
        return strategy.experimental_local_results(times)[0].numpy()

    found = [run() for _ in range(1 + runs)]
    times = min(found[1:], key=np.ptp)
    times -= times.min()
    spans = [
        Span(schedules[-1].rank_of(action.stage_index), action, float(start), float(end))
        for action, (start, end) in zip(actions(), times, strict=True)
    ]
    return Simulation(schedules[-1], sorted(spans, key=lambda span: (span.start, span.rank)))
