"""What `tf.train.Checkpoint` does not find in Keras's objects, and a run that goes on needs.

TensorFlow's checkpoints hold what is `Trackable`. Keras's seed generators are not, so that layers that draw from them would draw
again what they have drawn before; and of the optimizers in a `MultiOptimizer` nothing is seen, so that they would start anew.
"""

from typing import Any

from tfdist.sharding import config_of


def seed_states(layer: Any) -> dict[str, Any]:
    """Returns the states of a layer's own seed generators that a tfdist strategy has made, by names for a checkpoint."""
    generators = enumerate(getattr(layer, "_seed_generators", ()))
    return {f"seed_generator_{number}": generator.state for number, generator in generators if _is_ours(generator.state)}


def inner_optimizers(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers in a `MultiOptimizer`, of variables of a tfdist strategy, by names for a checkpoint."""
    if not any(map(_is_ours, optimizer.variables)):
        return {}
    return {f"optimizer_{number}": inner for number, inner in enumerate(optimizer.optimizers)}


def _is_ours(variable: Any) -> bool:
    return config_of(getattr(variable._value, "distribute_strategy", None)) is not None
