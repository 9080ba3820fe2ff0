"""Whether each technique gives on these devices what one of them alone gives: a small model, the same weights and batches.

Compared are the losses, how far each weight has moved, and each variable of the optimizer. SGD with momentum is linear in the
gradient, so that a gradient which is wrong by a factor is wrong here by the same factor (Adam would hide it).

The tolerance is that of the dtype in which products are taken. On CPUs deviations of 1e-6 (float32), 1e-3 (float16) and
2e-2 (bfloat16) were seen; a lost or doubled part of a gradient is an error of at least a half.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.extensions.pipeline import PipelineModel
from tfdist.extensions.tensor.plans import parallelize
from tfdist.mesh.device_details import details_of, tensor_float_32, tensor_float_32_is_on
from tfdist.tools.doctor.check import Check, Finding, LeftOutError
from tfdist.tools.doctor.session import Session

# Of what is compared, in units of its largest element.
TOLERANCES = {"float32": 2e-5, "tensor_float_32": 2e-2, "mixed_float16": 2e-2, "mixed_bfloat16": 0.15}

_FEATURES, _HIDDEN, _CLASSES = 33, 48, 7
_STEPS = 4
ROWS_PER_RANK = 4
_FIRST_WITH_TENSOR_FLOAT_32 = (8, 0)


_OVER_TENSOR_RANKS = functools.partial(parallelize, plan={"up": "column", "down": "row"}, print_fn=None)


@dataclasses.dataclass(frozen=True)
class Technique:
    """One way to train."""

    settings: dict[str, Any]  # of the strategy
    dtype: str = "float32"  # a name of `TOLERANCES`: a dtype policy of Keras, or "tensor_float_32"
    prepare: Callable[[keras.Model], keras.Model] = lambda model: model  # done with the Keras model in the strategy's scope
    divisor: int = 1  # what must divide the number of devices
    # Makes the optimizer, on one device too.
    optimizer: Callable[[], keras.optimizers.Optimizer] = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    first_weight: float = 1.0  # of the first example's loss; a large one lets gradients of float16 overflow in the first step


TECHNIQUES = {
    **{f"zero_stage_{stage}": Technique({"zero_stage": stage}) for stage in range(4)},
    "tensor_parallel_2": Technique({"tensor_parallel_size": 2}, prepare=_OVER_TENSOR_RANKS, divisor=2),
    "pipeline_2": Technique(
        {"pipeline_parallel_size": 2}, prepare=functools.partial(PipelineModel, num_microbatches=2), divisor=2
    ),
    "mixed_float16": Technique({"zero_stage": 2}, "mixed_float16"),
    "mixed_bfloat16": Technique({"zero_stage": 2}, "mixed_bfloat16"),
    "tensor_float_32": Technique({"zero_stage": 2}, "tensor_float_32"),
}


# What training leaves behind, each with its name in words: the loss of each step, of each weight its last value minus its first,
# and the optimizer's variables.
Trained = list[tuple[str, np.ndarray]]
_CHANGE = "the change of "


def parity_checks() -> list[Check]:
    """Returns a check for each technique."""
    # Every technique on one device once in a process, by dtype.
    references: dict[str, Trained] = {}
    return [Check(f"parity/{name}", functools.partial(_compare, name, references)) for name in TECHNIQUES]


def _compare(name: str, references: dict[str, Trained], session: Session) -> Finding:
    technique = TECHNIQUES[name]
    if technique.divisor > 1:
        session.needs_several(name, technique.divisor)
    if technique.dtype == "tensor_float_32":
        _check_tensor_float_32(session)
    rows = ROWS_PER_RANK * session.world_size
    with tensor_float_32(technique.dtype == "tensor_float_32"):
        if technique.dtype not in references:
            references[technique.dtype] = train_alone(technique, rows)
        found = train(session.strategy(**technique.settings), technique, rows)
    return compared(found, references[technique.dtype], TOLERANCES[technique.dtype])


def _check_tensor_float_32(session: Session) -> None:
    """Raises LeftOutError where the chief's devices do not use it: all workers must decide alike."""
    capabilities = [details.compute_capability for details in details_of(session.local_devices)]
    reason = "" if tensor_float_32_is_on() else "TensorFloat-32 is switched off"
    if not all(capability and capability >= _FIRST_WITH_TENSOR_FLOAT_32 for capability in capabilities):
        reason = "these devices have no TensorFloat-32"
    if reason := session.base.share("doctor: why not TensorFloat-32", reason):
        raise LeftOutError(reason)


def _model() -> keras.Model:
    inputs = keras.Input((_FEATURES,))
    hidden = keras.layers.Dense(_HIDDEN, activation="gelu", name="up")(inputs)
    hidden = keras.layers.Dense(_FEATURES, name="down")(hidden)
    x = keras.layers.LayerNormalization(name="norm")(keras.layers.add([inputs, hidden]))
    return keras.Model(inputs, keras.layers.Dense(_CLASSES, dtype="float32", name="head")(x))


def train_alone(technique: Technique, rows: int) -> Trained:
    """Trains the model as it is on one device, the first GPU where there is one."""
    return train(tf.distribute.get_strategy(), dataclasses.replace(technique, prepare=Technique.prepare), rows)


def train(strategy: Any, technique: Technique, rows: int) -> Trained:
    """Trains for some steps with `fit`, with the same weights, on the same batches of `rows` examples."""
    dtype = technique.dtype
    rng = np.random.default_rng(7)
    x = rng.normal(size=(_STEPS * rows, _FEATURES)).astype("float32")
    y = rng.integers(0, _CLASSES, size=len(x))
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype if dtype.startswith("mixed") else "float32")
    try:
        with strategy.scope():
            model = technique.prepare(_model())
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            # What XLA makes of a step on one device is another question: strategies do not compile steps.
            model.compile(technique.optimizer(), loss, jit_compile=False)
            model.optimizer.build(model.trainable_variables)
    finally:
        keras.config.set_dtype_policy(policy)
    before = model.get_weights()
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    weights = np.where(np.arange(len(x)) == 0, np.float32(technique.first_weight), np.float32(1))
    is_weighted = technique.first_weight != 1
    model.fit(x, y, batch_size=rows, sample_weight=weights if is_weighted else None, shuffle=False, verbose=0, callbacks=[record])
    moves = zip(model.weights, model.get_weights(), before, strict=True)
    return [
        ("losses", np.asarray(losses, np.float64)),
        *((f"{_CHANGE}{variable.path}", np.float64(last) - first) for variable, last, first in moves),
        *((f"the optimizer's {one.path}", np.asarray(one.numpy(), np.float64)) for one in model.optimizer.variables),
    ]


def compared(found: Trained, expected: Trained, tolerance: float) -> Finding:
    """Returns how far `found` is from `expected`, and in what. Raises RuntimeError when one device has learnt nothing."""
    if not all(np.abs(move).max() > 0 for name, move in expected if name.startswith(_CHANGE)):
        raise RuntimeError("one device has not changed every weight in these steps: there is nothing to compare")
    deviations = [_deviation(mine, theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=True)]
    worst = int(np.argmax(deviations))
    data = {"deviation": deviations[worst], "tolerance": tolerance, "in": expected[worst][0]}
    summary = "deviation {deviation:.1e} of at most {tolerance:.1e}, in {in}".format_map(data)
    return Finding(summary, data, deviations[worst] <= tolerance)


def _deviation(mine: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference, in units of the largest element of `theirs`; infinity where one is not finite."""
    if mine.shape != theirs.shape or not np.isfinite(mine).all():
        return math.inf
    scale = float(np.abs(theirs).max(initial=0.0))
    return float(np.abs(mine - theirs).max(initial=0.0)) / (scale or 1.0)
