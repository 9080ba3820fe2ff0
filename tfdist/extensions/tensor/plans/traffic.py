"""The traffic of a sharded layer between the t tensor ranks, forward and backward, in units of (t - 1)/t elements.

A ring all-reduce of S elements moves 2 S (t - 1)/t through each rank, an all-gather or a reduce-scatter S (t - 1)/t.
For `Y = X A`, X of I elements and Y of O, of which a gradient flows back to G of X's I (all, or none of the model's own inputs):

| sharded | input | output | forward | backward | units |
|---|---|---|---|---|---|
| column, gathered | whole | whole | all-gather Y | all-reduce dX | O + 2 G |
| column, local | whole | local | nothing | all-reduce dX | 2 G |
| row | whole | whole | all-reduce Y | all-gather dX | 2 O + G |
| row, parallel | local | whole | all-reduce Y | nothing | 2 O |
| attention by heads | whole | whole | all-reduce Y | all-reduce dX | 2 O + 2 G |
| vocab, rows looked up | whole | whole | all-reduce Y | nothing | 2 O |
| vocab, in reverse, for logits | whole | whole | all-gather Y | all-reduce dX | O + 2 G |

A normalization between two such layers moves nothing. The gradient of a gathered output is the same on every rank, so each takes
its own part of it: nothing is moved.
"""

import keras

from tfdist.extensions.tensor.plans.layer_kinds import COLUMN, ROW, is_attention
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding
from tfdist.extensions.tensor.plans.layer_uses import LayerUse


def moved_units(sharding: LayerSharding, use: LayerUse) -> float:
    """Returns the units of one call and one example: elements, to be multiplied by (t - 1)/t."""
    inputs, outputs = use.gradient_elements, use.output_elements
    if isinstance(sharding.layer, keras.layers.BatchNormalization):
        return 0
    if is_attention(sharding.layer):
        return 2 * outputs + 2 * inputs
    if sharding.role == COLUMN:
        return (outputs if sharding.gather_output else 0) + 2 * inputs
    if sharding.role == ROW:
        return 2 * outputs + (0 if sharding.input_is_parallel else inputs)
    # Indices that are looked up have no gradient.
    is_reverse = inputs and isinstance(sharding.layer, keras.layers.ReversibleEmbedding)
    return outputs + 2 * inputs if is_reverse else 2 * outputs
