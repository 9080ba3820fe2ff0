"""The units of each sharded, against collectives counted one by one."""

import pytest
from keras import layers

from tfdist.extensions.tensor.plans import LayerSharding
from tfdist.extensions.tensor.plans.layer_uses import LayerUse
from tfdist.extensions.tensor.plans.traffic import moved_units

# A layer that 5 elements enter and 3 leave; both directions ask for a gradient unless said otherwise.
USE = LayerUse(gradient_elements=5, output_elements=3, vectors=1)
FIRST = LayerUse(gradient_elements=0, output_elements=3, vectors=1)


def all_reduce(elements):
    return 2 * elements


def all_gather(elements):
    return elements


CASES = {
    "column, gathered": ("column", True, False, all_gather(3), all_reduce(5)),
    "column, local": ("column", False, False, 0, all_reduce(5)),
    "row, whole input": ("row", False, False, all_reduce(3), all_gather(5)),
    "row, local input": ("row", False, True, all_reduce(3), 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [lambda: layers.Dense(3), lambda: layers.EinsumDense("ab,bc->ac", 3)])
def test_dense(make, case):
    role, gather_output, input_is_parallel, forward, backward = CASES[case]
    sharding = LayerSharding(make(), "", role, gather_output, input_is_parallel)
    assert moved_units(sharding, USE) == forward + backward
    assert moved_units(sharding, FIRST) == forward  # the model's inputs have no gradient


def test_attention_and_embedding():
    attention = LayerSharding(layers.MultiHeadAttention(2, 2), "", "column", False, False)
    assert moved_units(attention, USE) == all_reduce(3) + all_reduce(5)
    embedding = LayerSharding(layers.Embedding(7, 3), "", "vocab", False, False)
    assert moved_units(embedding, USE) == all_reduce(3)
