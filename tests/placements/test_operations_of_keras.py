"""What Keras emits is in the table, and what its layers and losses make of rows is known: an `Unknown` would be a false alarm."""

import pytest
import tensorflow as tf

from tests.placements import keras_programs
from tests.placements.keras_programs import Facts
from tfdist.placements.kinds import How, Partial, Shard, Unknown, Why
from tfdist.placements.table import RULES, Kind, Linear, is_elementwise, row_of

# Operations without a rule, and who looks at them.
ELSEWHERE = {
    **dict.fromkeys(
        "Case If IdentityN PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While".split(),
        "control flow: the interpreter looks inside",
    ),
    **dict.fromkeys("Placeholder PlaceholderWithDefault ReadVariableOp VarHandleOp".split(), "leaves, known by identity"),
    "Const": "of no inputs",
}
LAYERS = keras_programs.layer_cases()
# Layers whose results depend on all rows of a device.
OF_ALL_ROWS = {"BatchNormalization": Why.GOES_BACK, "synchronized BatchNormalization": Why.FUNCTION}
# Losses that decide by all labels whether these are -1 and 1 or 0 and 1; whose numbers are sums over the batch; of all pairs.
LOSSES_OF_ALL_ROWS = {
    "Hinge": Why.FUNCTION,
    "SquaredHinge": Why.FUNCTION,
    "Dice": Why.MIXED,
    "Tversky": Why.MIXED,
    "Circle": Why.MEET,
}


def unknown_types(graph):
    return {op.type for op in keras_programs.operations_of(graph)} - RULES.keys() - ELSEWHERE.keys()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_a_layer_are_rows(name):
    """Also backward, where its operations are in the table."""
    graph = keras_programs.of_layer(LAYERS[name])
    assert not unknown_types(graph)
    found = Facts(graph).of(graph.outputs[0])
    if name in OF_ALL_ROWS:
        assert isinstance(found, Unknown) and found.why is OF_ALL_ROWS[name]
    else:
        assert found == Shard(0, found.rows) and found.rows


# Loops whose state is zeros at first, which no rule can tell from zeros that are the same on all ranks.
_LOOPS = ("GRU", "LSTM", "RNN", "Masking", "Bidirectional", "Embedding under a mask")
OF_ZERO_STATES = {name for name in LAYERS if any(part in name for part in _LOOPS)}
SIZED = [name for number, name in enumerate(LAYERS) if number % 2 or name in ("Dropout", "MultiHeadAttention")]


@pytest.mark.parametrize("name", [name for name in SIZED if name not in OF_ALL_ROWS.keys() | OF_ZERO_STATES])
def test_so_are_they_where_their_number_is_known(name):
    graph = keras_programs.of_layer(LAYERS[name], rows=6, gradients=False)
    found = Facts(graph).of(graph.outputs[0])
    assert found == Shard(0, found.rows) and found.rows


def test_activations():
    for name, function in keras_programs.activations().items():
        for shape in ((4,), (3, 4)):
            graph = keras_programs.traced(keras_programs.with_gradients(function), shape)
            assert not unknown_types(graph), name
            assert isinstance(Facts(graph).of(graph.outputs[0]), Shard), name


@pytest.mark.parametrize("name", keras_programs.losses())
def test_a_loss(name):
    kind, _, reduction = name.partition(" ")
    loss, activation, row = keras_programs.losses()[name]
    for weighted in (False, True):
        graph = keras_programs.of_loss(loss, activation, row, weighted=weighted)
        assert not unknown_types(graph)
        found = Facts(graph).of(graph.outputs[0])
        if kind in LOSSES_OF_ALL_ROWS or (reduction == "mean_with_sample_weight" and weighted):
            assert isinstance(found, Unknown) and found.why is LOSSES_OF_ALL_ROWS.get(kind, Why.FUNCTION)
        elif reduction == "None":
            assert isinstance(found, Shard) and found.axis == 0 and found.is_even
        else:
            assert found == Partial(How.SUM if reduction == "sum" else How.MEAN)


def test_metrics():
    """What a metric adds to a state is a sum over rows."""
    for metric, predictions, targets in keras_programs.metrics():
        graph = keras_programs.of_metric(metric, predictions, targets, weighted=predictions.ndim > 1)
        assert not unknown_types(graph), metric.name
        facts = Facts(graph)
        added = [op.inputs[1].op for op in graph.get_operations() if op.type == "AssignVariableOp"]
        added = [op for op in added if op.type in ("Add", "AddV2") and not any(x.dtype == tf.resource for x in op.inputs)]
        found = [facts.of(op.inputs[1]) for op in added]
        if "hinge" not in metric.name and metric.name not in OTHER_METRICS:
            assert found and all(isinstance(x, Partial) and x.is_sum for x in found), (metric.name, found)


OTHER_METRICS = {
    "mean_squared_error",
    "root_mean_squared_error",
}  # of predictions that are one vector: of a number that is a mean


def test_optimizers():
    for optimizer in keras_programs.optimizers():
        assert not unknown_types(keras_programs.of_optimizer(optimizer)), optimizer.name


def test_who_asks_for_a_kind():
    assert is_elementwise("Tanh") and is_elementwise("AddV2") and not is_elementwise("MatMul") and not is_elementwise("Nothing")
    assert row_of("Nothing").kind is Kind.MEETING and row_of("Sum").kind is Kind.REDUCTION
    assert row_of("Nothing").linear is None and row_of("Tanh").linear is None and row_of("MatMul").linear is Linear.ONE
    wanted = {Linear.TOGETHER: "11", Linear.ONE: "01 10", Linear.FIRST: "10", Linear.SECOND: "01", Linear.BUT_LAST: "10"}
    for linear, holding in wanted.items():
        for found in ("00", "01", "10", "11"):
            assert linear.holds([x == "1" for x in found]) == (found in holding.split()), (linear, found)


def test_pointwise_functions_of_tensorflow_are_in_the_table():
    """Unary and binary ones of `tf.math`, as far as they are one operation."""
    missing = set()
    for name in (name for name in dir(tf.math) if not name.startswith("_") and callable(getattr(tf.math, name))):
        for number in (1, 2):
            try:
                graph = keras_programs.traced(lambda *x, name=name: getattr(tf.math, name)(*x), *[(3,)] * number)
            except (TypeError, ValueError, AttributeError, tf.errors.OpError, NotImplementedError, StopIteration):
                continue
            missing |= unknown_types(graph)
    assert not missing - {"ApproxTopK"}
