"""The losses of compressed gradients of an optimizer's variables (`residual`): made, counted in units, and saved.

It is kept in units of gradients without a loss scale, which changes from step to step. A layer of the optimizer has it in Keras's
files, separate from the optimizer's variables, so that these are in a file what they are without it:

    optimizer/vars/...                       as ever
    optimizer/tfdist_residuals/vars/3        the ranks' sum, of the fourth variable

A file without it is of a run that keeps none: nothing is lost yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import errors
from tfdist.extensions.compression.residual import Residual
from tfdist.optimizers.support import is_wrapper
from tfdist.optimizers.target import variable_of
from tfdist.sharding import MeshConfig


class Residuals(keras.layers.Layer):
    """The losses of an optimizer's variables, as Keras saves them, and as TensorFlow finds them.

    Args:
        kept: by the variable's place among those of the optimizer.
    """

    def __init__(self, kept: Mapping[int, Residual]):
        super().__init__(name="tfdist_residuals")
        self._places = tuple(kept)
        for place, residual in kept.items():  # one by one: as attributes TensorFlow tracks them
            setattr(self, f"of_{place}", residual)

    def save_own_variables(self, store: Any) -> None:
        for place in self._places:
            store[str(place)] = getattr(self, f"of_{place}").saved()

    def load_own_variables(self, store: Any) -> None:
        for place in self._places:
            residual, known = getattr(self, f"of_{place}"), str(place) in store
            residual.assign(store[str(place)] if known else np.zeros(residual.shape, np.float32))


def keep_residuals_of(optimizer: Any, variables: Sequence[Any], config: MeshConfig, accumulates_partial_sums: bool) -> None:
    """Makes room for what compressed gradients of `variables`, with which `optimizer` is built, lose.

    A variable has one residual, that of the optimizer that was built last on it.

    Args:
        accumulates_partial_sums: whether gradients are summed when they have been divided by scales.
    """
    if not config.feeds_back:
        return
    values = [variable_of(variable) for variable in variables]
    if is_wrapper(optimizer):  # built when those within it are
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            for residual in (value.residual for value in values):
                if residual is not None and not accumulates_partial_sums:
                    residual.factors.append(optimizer.dynamic_scale)
        return
    kept = {}
    for place, value in enumerate(values):
        codec = config.compressor_of(value.layout).feedback
        if codec is not None:
            kept[place] = value.residual = Residual(value, config, codec)
            if optimizer.loss_scale_factor is not None and not accumulates_partial_sums:
                kept[place].factors.append(optimizer.loss_scale_factor)
    optimizer.tfdist_residuals = Residuals(kept)


def refuse_two_sums(config: MeshConfig) -> None:
    """Raises NotImplementedError where what is summed already would be accumulated, and summed and compressed once more."""
    if config.feeds_back:
        raise errors.not_implemented(
            "Gradients that are read, or changed in an optimizer's own `apply`, before they are accumulated at stages 0 and 1 "
            "are compressed twice, for which there is no error feedback.",
            gradient_compression=config.gradient_compression,
            fix="Use `zero_stage=2`, or leave `error_feedback` out.",
        )
