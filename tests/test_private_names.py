"""The private names of TensorFlow and Keras that tfdist stands on: that they exist and do what is relied upon.

A failure here after an upgrade names what changed; the file that uses it is in the test's name or docstring.
"""

import gc
import inspect
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.remat import RematMode
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.tensorflow import core
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras_owners import TensorFlowTrainer, Trainer
from signatures import parameters
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx, config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.distribute import (
    cross_device_ops,
    distribute_lib,
    mirrored_run,
    mirrored_strategy,
    values,
    values_util,
)
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import autograph_util, concrete_function, polymorphic_function
from tensorflow.python.framework import tensor_conversion_registry
from tensorflow.python.ops import (
    control_flow_util_v2,
    control_flow_v2_func_graphs,
    default_gradient,
    handle_data_util,
    resource_variable_ops,
    script_ops,
    while_v2,
)
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training.saving import saveable_object_util

from tfdist import custom_gradients
from tfdist.collectives.automatic_order import exempt_from_automatic_order
from tfdist.graphs import eager_operations, records, tape
from tfdist.graphs.frames import tokens_here
from tfdist.sharding import keras_scope

pytestmark = pytest.mark.timeout(120)


def in_graph(function, *arguments):
    """Traces `function` and returns the concrete function."""
    return tf.function(function, autograph=False).get_concrete_function(*arguments)


# tfdist/extensions/shared_memory/python_calls.py


def test_what_is_called_as_an_eager_function_is_called_with_arrays_and_returns_them():
    """Of an operation that is not for eager functions; nothing else is done with what it returns."""
    called = []

    class Call(script_ops.EagerFunc):
        def __init__(self):
            """Takes nothing: the base class would convert what is returned."""

        def __call__(self, device, token, arguments):
            called.extend(arguments)
            return [np.full(3, 2.0)]

    call = Call()
    token = script_ops._py_funcs.insert(call)
    assert script_ops._py_funcs.get(token) is call
    run = in_graph(lambda x: tf.raw_ops.PyFuncStateless(input=[x], token=token, Tout=[tf.float64])[0], tf.TensorSpec([2]))
    np.testing.assert_array_equal(run(tf.ones(2)), [2, 2, 2])
    assert [type(argument) for argument in called] == [np.ndarray]
    assert called[0].flags.writeable and not called[0].flags.owndata, "the tensor itself"
    with pytest.raises(tf.errors.OpError, match="Could not find callback"):
        del call, Call
        gc.collect()
        run(tf.ones(2))


# tfdist/collectives/automatic_order.py


def test_what_has_a_control_flow_context_is_not_chained():
    def run(are_unordered):
        for _ in range(2):
            buffer = tf.raw_ops.Empty(shape=[1], dtype=tf.float32)
            if are_unordered:
                exempt_from_automatic_order([buffer.op])

    for are_unordered in (False, True):
        first, second = [op for op in in_graph(run, are_unordered).graph.get_operations() if op.type == "Empty"]
        assert (first in second.control_inputs) == (not are_unordered)


# tfdist/keras_hooks/tensorflow.py


def test_what_calls_the_python_code_of_an_operation_has_its_token():
    """tfdist/graphs/frames.py looks for it among the frames."""
    found = []

    @tf.function
    def function(x):
        return tf.py_function(lambda x: (found.append(tokens_here()), x)[1], [x], tf.float32)

    function(1.0)
    (operation,) = [one for one in function.get_concrete_function(1.0).graph.get_operations() if one.type == "EagerPyFunc"]
    assert found == [{operation.get_attr("token").decode()}] and not tokens_here()


def test_autograph_rules():
    rule = config.DoNotConvert("some_package")
    assert rule.matches("some_package.module")
    assert not rule.matches("other_package")
    assert str(rule) == str(config.DoNotConvert("some_package")) != str(config.DoNotConvert("other_package"))
    assert isinstance(config.CONVERSION_RULES, tuple)
    assert sum(str(known) == str(config.DoNotConvert("tfdist")) for known in config.CONVERSION_RULES) == 1


def test_autograph_reads_the_rules_when_it_converts(monkeypatch):
    """A rule that is put in front wins over later ones."""

    def branching(x):
        if x > 0:
            return x
        return -x

    assert int(tf.function(lambda x: branching(x))(tf.constant(-3))) == 3
    rule = config.DoNotConvert(branching.__module__)
    monkeypatch.setattr(config, "CONVERSION_RULES", (rule, *config.CONVERSION_RULES))
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(lambda x: branching(x))(tf.constant(-3))


def test_autograph_conversion_of_the_rank_function():
    """strategy/extended.py: the function is converted when the code around it is."""

    def branching(x):
        if x > 0:
            return x
        return -x

    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):
        converted = autograph.tf_convert(branching, ag_ctx.control_status_ctx())
    assert int(in_graph(converted, tf.TensorSpec([], tf.int32))(tf.constant(-3))) == 3
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.DISABLED):
        plain = autograph.tf_convert(branching, ag_ctx.control_status_ctx())
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        in_graph(plain, tf.TensorSpec([], tf.int32))


def test_a_number_of_a_class_is_converted_in_the_dtype_of_what_it_meets():
    """keras_hooks/tensorflow.py: its function is asked before that of numbers."""
    asked = []

    class Number(int):
        pass

    def convert(value, dtype, name, as_ref):
        asked.append(dtype)
        return tf.constant(int(value) + 1, dtype)

    tensor_conversion_registry.register_tensor_conversion_function_internal(Number, convert, priority=-1)
    in_graph(lambda x: x / Number(3), tf.TensorSpec([2], tf.float64))
    assert float(in_graph(lambda x: x / Number(3), tf.TensorSpec([]))(tf.constant(8.0))) == 2
    assert asked == [tf.float64, tf.float32]


# tfdist/collectives/program.py


def test_a_resource_variable_is_not_the_strategys(cpus):
    with tf.distribute.MirroredStrategy(cpus[:2]).scope(), tf.device(cpus[1]):
        variable = resource_variable_ops.ResourceVariable(0.0, trainable=False)
    assert not isinstance(variable, values.DistributedVariable)
    assert variable.device.endswith(cpus[1])
    assert variable.handle.dtype == tf.resource


def test_loops_have_graphs_of_their_own():
    seen = {}

    def note(place, result):
        seen[place] = tf.compat.v1.get_default_graph()
        return result

    def loops_and_a_branch(x):
        note("outer", x)
        tf.while_loop(lambda x: note("condition", x < 3), lambda x: (note("body", x + 1),), (x,))
        tf.cond(x > 0, lambda: note("branch", x), lambda: x)
        tf.map_fn(lambda y: note("map", y), tf.stack([x, x]))
        return x

    in_graph(loops_and_a_branch, tf.TensorSpec([], tf.int32))
    loops = (control_flow_v2_func_graphs.WhileBodyFuncGraph, control_flow_v2_func_graphs.WhileCondFuncGraph)
    assert isinstance(seen["condition"], loops[1])
    assert isinstance(seen["body"], loops[0])
    assert isinstance(seen["map"], loops[0])
    assert not isinstance(seen["branch"], loops)
    assert isinstance(seen["branch"], control_flow_v2_func_graphs.CondBranchFuncGraph)
    assert all(seen[place].outer_graph is seen["outer"] for place in ("condition", "body", "branch", "map"))


# tfdist/graphs/tape.py


def test_how_many_tapes_watch():
    watching = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes
    x, y = tf.constant(1.0), tf.constant(2.0)
    assert watching([x]) == 0
    with tf.GradientTape() as tape:
        assert watching([x]) == 0
        tape.watch(x)
        assert watching([x]) == watching([y, x]) == watching([x * 2]) == 1
        assert watching([y]) == 0
        with tf.GradientTape() as inner:
            assert watching([x]) == 1
            inner.watch(x)
            assert watching([x]) == 2
        with record.stop_recording():
            assert watching([x]) == 0
    assert watching([x]) == 0


def test_watching_inside_a_graph():
    counts = []

    def step(x):
        with tf.GradientTape() as tape:
            counts.append(pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([x]))
            tape.watch(x)
            counts.append(pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([x * x]))
        return x

    in_graph(step, tf.TensorSpec([]))
    assert counts == [0, 1]


def test_record_operation_connects_tensors():
    called = []

    def gradient(*upstream):
        called.append(len(upstream))
        return [upstream[0] * 7.0, None]

    def step(x, z):
        with tf.GradientTape() as tape:
            tape.watch([x, z])
            with record.stop_recording():
                y, unused = tf.identity(x), tf.identity(x)
            record.record_operation("Unshard", [y, unused], [x, z], gradient)
            loss = y * 2.0
        return tape.gradient(loss, x)

    assert float(step(tf.constant(1.0), tf.constant(1.0))) == 14.0
    assert float(in_graph(step, tf.TensorSpec([]), tf.TensorSpec([]))(tf.constant(1.0), tf.constant(1.0))) == 14.0
    assert called == [2, 2]


def test_stop_recording():
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with record.stop_recording():
            y = x * 2.0
    assert tape.gradient(y, x) is None


def test_backward_operations_are_named():
    """Those that read something of the forward pass; a sum of several gradients is not named so, and reads none."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.tanh(tf.matmul(x, x)))
        forward = {op.name for op in x.graph.get_operations()}
        gradient = tape.gradient(loss, x)
        backward = [op for op in x.graph.get_operations() if op.name not in forward]
        readers = [op.name for op in backward if any(tensor.op.name in forward for tensor in op.inputs)]
        assert len(readers) >= 3
        assert all("gradient_tape/" in name for name in readers)
        assert not any("gradient_tape/" in name for name in forward)
        return gradient

    in_graph(step, tf.TensorSpec([2, 2]))


def test_update_input_rewires():
    """And the consumers follow; the operation hands out new tensor objects, of the same name."""

    def step(a, b):
        c = tf.add(a, a, name="consumer")
        operation = c.op
        operation._update_input(0, b)
        assert [tensor.name for tensor in operation.inputs] == [b.name, a.name]
        assert operation.name in [consumer.name for consumer in b.consumers()]
        return c

    result = in_graph(step, tf.TensorSpec([]), tf.TensorSpec([]))(tf.constant(1.0), tf.constant(10.0))
    assert float(result) == 11.0


def test_a_tape_is_told_again_of_what_it_has_recorded():
    """graphs/records.py: behind a tape's block, an operation that reads something else, and a function, are recorded anew."""

    def step(x):
        with tf.GradientTape(persistent=True) as tape_of_user:
            tape_of_user.watch(x)
            squared = tf.square(x)
            found = tf.sqrt(squared)
        three_times = tf.stop_gradient(3.0 * x)
        tape.reconnect(found.op, squared, three_times)
        assert records.has_gradient(found.op)
        assert not records.has_gradient(tf.raw_ops.AdjustHue(images=tf.ones([1, 1, 3]) * x, delta=0.1).op)
        with records.recording(tape_of_user):
            assert records.is_recorded(found.op)
            assert not records.is_recorded(three_times.op)
            records.record_function([three_times], [x], lambda upstream: [3.0 * upstream], "Three")
            records.record_again(found.op)
        return found, tape_of_user.gradient(found, x)

    value, slope = in_graph(step, tf.TensorSpec([]))(tf.constant(12.0))
    assert float(value) == 6.0
    assert float(slope) == 3.0 / (2.0 * 6.0)


def test_an_operation_can_be_made_again():
    def step(a, b):
        operation = tf.transpose(a, [1, 0]).op
        attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
        again = operation.graph._create_op_internal(
            operation.type,
            [b, *operation.inputs[1:]],
            dtypes=[output.dtype for output in operation.outputs],
            attrs=attributes,
            name="again",
        )
        assert again.name == "again"
        return again.outputs[0]

    result = in_graph(step, tf.TensorSpec([2, 3]), tf.TensorSpec([2, 3]))(tf.zeros([2, 3]), tf.reshape(tf.range(6.0), [2, 3]))
    np.testing.assert_array_equal(result, np.arange(6.0).reshape(2, 3).T)


def test_the_body_of_a_while_operation():
    """Inputs and outputs of the operation and of its body stand in the same order."""

    def step(x, weight):
        tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * weight), (0, x))
        (loop,) = [op for op in x.graph.get_operations() if op.type in ("While", "StatelessWhile")]
        body = while_v2._get_graph(loop, "body", "_body_graph")
        place = [tensor.name for tensor in loop.inputs].index(weight.name)
        assert body.outputs[place].op.type in ("Identity", "Placeholder")
        source = body.outputs[place]
        while source.op.type == "Identity":
            source = source.op.inputs[0]
        assert source.name == body.inputs[place].name
        return loop.outputs[place]

    assert float(in_graph(step, tf.TensorSpec([]), tf.TensorSpec([]))(tf.constant(1.0), tf.constant(5.0))) == 5.0


# tfdist/graphs/tape.py


def test_a_vectorized_map_asks_operations_how_they_are_converted():
    seen = []

    def row(x):
        seen.append(tape.in_vectorized_map())
        number = tf.random.uniform([])  # has an effect: a loop would draw once for each row
        tape.same_for_all_rows([number.op])
        return x * 0 + number

    drawn = in_graph(lambda x: tf.vectorized_map(row, x), tf.TensorSpec([4]))(tf.ones(4)).numpy()
    assert (drawn == drawn[0]).all() and drawn[0] > 0
    assert any(seen) and not tape.in_vectorized_map()


def test_nobody_looks_at_a_stand_in():
    def replaced(x):
        stub = tape.stand_in(tf.float32, [3])
        tape.reconnect(stub.op, stub.op.inputs[0], x)
        return stub + 1

    tf.debugging.enable_check_numerics()
    try:
        np.testing.assert_array_equal(in_graph(replaced, tf.TensorSpec([3]))(tf.ones(3)), [2, 2, 2])
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.as_traced
@pytest.mark.parametrize("made", [tf.custom_gradient, custom_gradients.custom_gradient])
def test_a_custom_gradient_passes_its_arguments_on_behind_its_results(made):
    def passed(x):
        stub = tape.stand_in(tf.float32, [3])
        result = made(lambda _: (2 * x, lambda upstream: upstream))(stub)
        read = result + 1
        tape.reconnect(stub.op, stub.op.inputs[0], x)  # whatever is read: the operation needs all that it is given
        return read

    np.testing.assert_array_equal(in_graph(passed, tf.TensorSpec([3]))(tf.ones(3)), [3, 3, 3])


# tfdist/layers/recomputed.py


def test_layers_are_computed_by_their_mode(monkeypatch):
    called = []
    monkeypatch.setattr(core, "remat", lambda f: called.append(f) or f)
    layer = keras.layers.Dense(3)
    assert layer._remat_mode is None
    layer._remat_mode = RematMode(mode="full", output_size_threshold=0, layer_names=())
    layer(np.ones((2, 3), "float32"))
    assert called == [layer.call]
    with keras.RematScope():
        assert type(keras.layers.Dense(3)._remat_mode) is RematMode


def test_handles_of_variables_know_their_shapes():
    """graphs/tape.py: in the graph that reads them, and of another one when they are copied."""
    variable = tf.Variable(tf.zeros([2, 3]))
    (inside,) = in_graph(lambda: variable + 1.0).graph.inputs
    with tf.Graph().as_default():
        other = tf.compat.v1.placeholder(tf.resource, [])
        handle_data_util.copy_handle_data(inside, other)
        for handle in (inside, other):
            assert tf.TensorShape(handle_data_util.get_resource_handle_data(handle).shape_and_type[0].shape) == [2, 3]


def test_the_branches_of_a_cond_operation():
    """Inputs of the operation, behind the predicate, and of its branches stand in the same order; branches keep their names."""

    def step(x, weight):
        traced = []

        def branch():
            traced.append(tf.compat.v1.get_default_graph())
            return x * weight

        tf.cond(x > 0, branch, lambda: x - weight)
        (cond,) = [op for op in x.graph.get_operations() if op.type in ("If", "StatelessIf")]
        assert cond.inputs[0].op.type == "Greater"
        assert cond.get_attr("then_branch").name == traced[0].name
        assert (cond._true_graph is traced[0], cond._false_graph.outputs[0].op.type) == (True, "Identity")
        place = [tensor.name for tensor in cond.inputs[1:]].index(weight.name)
        for name, kind in (("then_branch", "Mul"), ("else_branch", "Sub")):
            graph = control_flow_util_v2.get_func_graph(
                cond, [tensor.shape for tensor in cond.inputs[1:]], cond.get_attr(name).name
            )
            assert kind in [reader.type for reader in graph.inputs[place].consumers()]
        tf.switch_case(tf.cast(x, tf.int32), [branch, branch])
        (case,) = [op for op in x.graph.get_operations() if op.type in ("Case", "StatelessCase")]
        assert len(case.get_attr("branches")) == 2
        assert [case._branch_graph_0, case._branch_graph_1] == traced[1:]
        return x

    in_graph(step, tf.TensorSpec([]), tf.TensorSpec([]))


# tfdist/sharding/keras_scope.py


def test_keras_knows_the_outermost_layer_that_is_called():
    seen = []

    class Outermost(keras.layers.Layer):
        def call(self, x):
            seen.append(keras_scope.outermost_layer())
            return x

    inner = keras.Sequential([Outermost()])
    outer = keras.Sequential([keras.Input((3,)), inner])
    seen.clear()
    for model in (inner, outer):
        model(np.ones((1, 3)))
    assert seen == [inner, outer]
    assert keras_scope.outermost_layer() is None
    assert {layer.name for layer in keras_scope.layers_within(outer)} >= {outer.name, inner.name, inner.layers[0].name}
    assert keras_scope.layers_within(None) == keras_scope.layers_within(keras.optimizers.SGD()) == []


class Probe(keras.layers.Layer):
    """Notes what Keras says about who is building or calling."""

    def __init__(self, seen):
        super().__init__(name="probe")
        self.seen = seen

    def build(self, shape):
        self.note("build")
        self.weight = self.add_weight(name="w", shape=(3,), initializer=self.initialize)

    def initialize(self, shape, dtype=None):
        self.note("add_weight")
        return tf.zeros(shape, dtype)

    def call(self, x):
        self.note("symbolic call" if in_symbolic_scope() else "call")
        return x * self.weight

    def note(self, place):
        caller = global_state.get_global_attribute("name_scope_stack")[-1].caller
        self.seen(place, caller is self, in_symbolic_scope())


def test_the_name_scope_has_the_layer_as_caller():
    keras.backend.clear_session()
    seen = []
    layer = Probe(lambda *note: seen.append(note))
    layer(tf.ones([2, 3]))
    assert seen == [("build", True, False), ("add_weight", True, False), ("call", True, False)]
    assert not global_state.get_global_attribute("name_scope_stack")
    assert not in_symbolic_scope()


def test_a_compiled_loss_is_a_name_scope():
    """sharding/keras_scope.py"""
    seen = []

    def loss(y, p):
        seen.append([scope.name for scope in global_state.get_global_attribute("name_scope_stack")])
        return tf.reduce_mean(y - p)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss=loss)
    model.compute_loss(y=tf.ones([2, 1]), y_pred=tf.ones([2, 1]))
    assert all("compile_loss" in names for names in seen) and seen


def test_the_symbolic_scope():
    """In `compute_output_spec`: Keras's scratch graph."""
    keras.backend.clear_session()
    seen = []
    layer = Probe(lambda *note: seen.append(note))
    layer.build((None, 3))
    layer(keras.Input((3,)))
    assert [note for note in seen if "call" in note[0]] == [("symbolic call", True, True)]


def test_variables_of_a_layer_itself():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert [variable.path for variable in layer._trainable_variables] == [layer.kernel.path, layer.bias.path]
    assert all(isinstance(variable.value, tf.Variable) for variable in layer._trainable_variables)
    outer = keras.Sequential([layer])
    outer.build((None, 3))
    assert list(outer._trainable_variables) == []


def test_an_optimizer_is_the_caller_while_it_makes_variables():
    """Both its own scalars and its slots."""
    callers = []

    def creator(next_creator, **kwargs):
        callers.append(global_state.get_global_attribute("name_scope_stack")[-1].caller)
        return next_creator(**kwargs)

    variable = keras.Variable(np.zeros((2,), "float32"))
    with tf.variable_creator_scope(creator):
        optimizer = keras.optimizers.Adam()
        optimizer.build([variable])
    assert len(callers) >= 4
    assert all(caller is optimizer for caller in callers)


# tfdist/sharding/variable.py and tfdist/strategy/extended.py


def test_replica_ids(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:3])
    seen = []

    def rank():
        seen.append(values_util.get_current_replica_id_as_int())
        return tf.zeros([])

    in_graph(lambda: strategy.run(rank) and tf.zeros([]))
    assert seen == [0, 1, 2]
    with strategy.scope():
        assert values_util.get_current_replica_id_as_int() is None
        assert distribute_lib.get_update_replica_id() is None
        with distribute_lib.UpdateContext(2):
            assert distribute_lib.get_update_replica_id() == 2
    # Outside the scope the default strategy says 0, which is why reads enter the strategy first.
    assert values_util.get_current_replica_id_as_int() == 0
    with distribute_lib.enter_or_assert_strategy(strategy):
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
    assert not values_util.is_saving_non_distributed()


def test_a_replica_context_keeps_attributes(cpus):
    """collectives/program.py hangs the rank's program on it; one context serves the rank's whole trace."""
    strategy = tf.distribute.MirroredStrategy(cpus[:2])

    def rank():
        context = tf.distribute.get_replica_context()
        assert getattr(context, "_tfdist_probe", None) is None
        context._tfdist_probe = context.replica_id_in_sync_group
        found = []
        tf.cond(
            tf.ones([]) > 0,
            lambda: found.append(tf.distribute.get_replica_context()) or tf.zeros([]),
            lambda: tf.zeros([]),
        )
        assert found == [context]
        return tf.zeros([])

    in_graph(lambda: strategy.run(rank) and tf.zeros([]))


def test_distributed_variable(cpus):
    """The methods that `ShardedVariable` overrides, and what it takes from the base class."""
    for name in (
        "_dense_var_to_tensor",
        "_get",
        "_get_cross_replica",
        "_get_on_device_or_primary",
        "_gather_saveables_for_checkpoint",
        "_is_mirrored",
        "_serialize_to_tensors",
        "_update_cross_replica",
        "_update_replica",
        "handle",
        "read_value",
        "value",
    ):
        assert hasattr(values.DistributedVariable, name), name
    assert parameters(values.DistributedVariable.__init__)[:4] == ["self", "strategy", "values", "aggregation"]
    assert parameters(values.DistributedVariable._update_cross_replica) == ["self", "update_fn", "value", "kwargs"]
    assert parameters(values.DistributedVariable._update_replica) == ["self", "update_fn", "value", "kwargs"]
    assert parameters(values.DistributedVariable._dense_var_to_tensor) == ["self", "dtype", "name", "as_ref"]
    with tf.distribute.MirroredStrategy(cpus[:2]).scope():
        variable = tf.Variable([1.0, 2.0])
    assert isinstance(variable, values.DistributedVariable)
    assert [one.device[-5:] for one in variable.values] == cpus[:2]
    assert variable._primary is variable._values[0]
    assert isinstance(variable._common_name, str)
    # By it an optimizer finds the slots of a component.
    assert variable.values[1].handle._distributed_container() is variable
    assert variable._unique_id


def test_tensors_of_checkpoints(tmp_path):
    """One full tensor is written, made when it is, and handed back; also by an old `Saver`."""
    assert trackable.VARIABLE_VALUE_KEY == "VARIABLE_VALUE"
    assert parameters(tensor_callable.Callable.__init__) == ["self", "tensor_callable", "dtype", "device"]
    made, restored = [], []

    class Holder(tf.Module):
        def _serialize_to_tensors(self):
            made_later = tensor_callable.Callable(lambda: made.append(1) or tf.constant([1.0, 2.0]), tf.float32, "CPU:0")
            return {trackable.VARIABLE_VALUE_KEY: made_later}

        def _gather_saveables_for_checkpoint(self):
            return {}

        def _restore_from_tensors(self, restored_tensors):
            restored.append(restored_tensors[trackable.VARIABLE_VALUE_KEY])
            return tf.no_op()

    path = tf.train.Checkpoint(holder=Holder()).write(str(tmp_path / "checkpoint"))
    assert made == [1]
    tf.train.Checkpoint(holder=Holder()).read(path)
    np.testing.assert_array_equal(restored[0], [1.0, 2.0])
    assert made == [1]
    (make,) = saveable_object_util.saveable_objects_from_trackable(Holder(), tf1_saver=True).values()
    np.testing.assert_array_equal(make("holder").specs[0].tensor, [1.0, 2.0])


def test_operations_of_an_eager_thread_are_seen():
    seen = []

    def see(kind, inputs, attributes, outputs, may_replace):
        seen.append((kind, inputs[0], outputs[0]))

    with eager_operations.each_operation_seen_by(see):
        given = tf.constant([1.0, 2.0])
        result = tf.square(given)
        tf.function(lambda x: x + 1, autograph=False).get_concrete_function(given)
    tf.sqrt(given)
    ((_, one, other),) = [found for found in seen if found[0] == "Square"]
    assert one is given
    assert other is result
    assert not any(kind in ("AddV2", "Sqrt") for kind, _, _ in seen)


def test_results_of_eager_operations_can_be_replaced():
    """Also for tapes; not those of operations that run in the slower way, as with a variable that TensorFlow does not know."""
    may = {}

    def see(kind, inputs, attributes, outputs, may_replace):
        may[kind] = may_replace
        if kind == "Sqrt" and not may.get("again"):
            may["again"] = True
            outputs[:] = eager_operations.run_again(kind, [4.0 * inputs[0]], attributes, 1)

    with eager_operations.each_operation_seen_by(see), tf.GradientTape() as recorder:
        given = tf.constant(9.0)
        recorder.watch(given)
        found = 3.0 * tf.sqrt(given)
        tf.strided_slice(tf.zeros(3), [0], [1])
    assert may["Sqrt"] and not may["StridedSlice"]
    np.testing.assert_allclose(found, 18.0)
    np.testing.assert_allclose(recorder.gradient(found, given), 3.0 * 4.0 / 2.0 / 6.0)


def test_threads_of_replicas_share_who_watches_operations():
    """So each has a list of its own: what one rank's operations are told would be told of another's."""
    strategy, told = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), {0: 0, 1: 0}

    def on_rank():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        rank = int(rank)

        def see(*_):
            told[rank] += 1

        with eager_operations.each_operation_seen_by(see):
            tf.distribute.get_replica_context().merge_call(lambda _: None)
            for _ in range(rank + 1):
                tf.square(1.0)

    strategy.run(on_rank)
    assert told == {0: 1, 1: 2}


def test_what_eager_operations_say_of_their_types():
    assert eager_operations.is_pure("Sqrt")
    assert not any(map(eager_operations.is_pure, ("ReadVariableOp", "RandomUniform", "PartitionedCall", "__inference_f_1")))
    assert eager_operations.default_of("OneHot", "axis") == -1
    assert eager_operations.default_of("Squeeze", "squeeze_dims") == []
    with pytest.raises(ValueError, match="no attribute"):
        eager_operations.default_of("OneHot", "mood")


def test_mirrored_extended(cpus):
    """The methods that `ShardedExtendedMixin` overrides, with the parameters it passes on."""
    extended = mirrored_strategy.MirroredExtended
    expected = {
        "__init__": ["self", "container_strategy", "devices", "cross_device_ops"],
        "_create_variable": ["self", "next_creator", "kwargs"],
        "_use_merge_call": ["self"],
        "_call_for_each_replica": ["self", "fn", "args", "kwargs"],
        "_get_cross_device_ops": ["self", "value"],
        "_replica_ctx_all_reduce": ["self", "reduce_op", "value", "options"],
        "_replica_ctx_update": ["self", "var", "fn", "args", "kwargs", "group"],
    }
    for name, names in expected.items():
        assert parameters(getattr(extended, name)) == names, name
    assert parameters(mirrored_run.call_for_each_replica) == ["strategy", "fn", "args", "kwargs"]
    assert isinstance(cross_device_ops.ReductionToOneDevice(), cross_device_ops.CrossDeviceOps)
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    assert strategy.extended._container_strategy() is strategy
    # Two strategies of one process would share collective keys.
    assert isinstance(mirrored_strategy.MirroredStrategy._collective_key_base, int)


def test_variables_come_with_what_tells_their_kind(cpus):
    """Parameters are trainable; slots come with `colocate_with`, the parameter; metrics with ON_READ."""
    keras.backend.clear_session()
    created = []

    class Extended(mirrored_strategy.MirroredExtended):
        def _create_variable(self, next_creator, **kwargs):
            created.append(dict(kwargs))
            return super()._create_variable(next_creator, **kwargs)

    class Strategy(tf.distribute.MirroredStrategy):
        def __init__(self, devices):
            tf.distribute.Strategy.__init__(self, Extended(self, devices=devices))

    with Strategy(cpus[:2]).scope():
        layer = keras.layers.Dense(2, use_bias=False)
        layer.build((None, 3))
        (kernel,) = created
        assert kernel["trainable"] is True
        assert kernel.get("colocate_with") is None
        initial = kernel["initial_value"]
        assert (initial() if callable(initial) else initial).shape == (3, 2)
        created.clear()
        optimizer = keras.optimizers.SGD(momentum=0.9)
        optimizer.build(layer.trainable_variables)
    slots = [kwargs for kwargs in created if kwargs.get("colocate_with") is not None]
    assert [kwargs["colocate_with"] is layer.kernel.value for kwargs in slots] == [True]
    assert all("colocate_with" not in kwargs or kwargs in slots for kwargs in created)


def test_functions_can_be_cloned():
    """A `tf.function` given to `strategy.run` becomes one that runs all ranks."""
    function = tf.function(lambda x: x + 1.0, autograph=False)
    assert isinstance(function, polymorphic_function.Function)
    assert function.python_function(1.0) == 2.0
    clone = function._clone(python_function=lambda x: x + 10.0)
    assert isinstance(clone, polymorphic_function.Function)
    assert float(clone(tf.constant(1.0))) == 11.0
    assert float(function(tf.constant(1.0))) == 2.0
    with_signature = tf.function(lambda x: x, input_signature=[tf.TensorSpec([None])])
    assert with_signature._clone(python_function=lambda x: x * 2.0).input_signature == (tf.TensorSpec([None]),)


# tfdist/keras_hooks/variables.py, tfdist/sharding/keras_scope.py


def test_what_a_function_says_of_itself():
    """What a nested function of a rank is made of; its Python is converted with the function's own settings."""

    class Module(tf.Module):
        @tf.function
        def method(self, x):
            if x > 0:
                x = x + 1.0
            return x

    method = Module().method
    assert (method._autograph, method._jit_compile, method._experimental_autograph_options) == (True, None, None)
    assert method.python_function.__module__ == __name__
    assert (tf.function(abs, autograph=False)._autograph, tf.function(abs, jit_compile=True)._jit_compile) == (False, True)
    converted = autograph_util.py_func_from_autograph(method.python_function, None)

    @tf.autograph.experimental.do_not_convert
    def plain(x):
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, None):
            return converted(x)

    assert float(in_graph(plain, tf.constant(1.0))(tf.constant(1.0))) == 2.0


def test_keras_casts_by_the_overridden_method():
    original = AutocastScope.maybe_cast._tfdist_original
    assert parameters(original) == ["self", "value"]
    variable = keras.Variable(np.ones((2,), "float32"))
    pinned = keras.Variable(np.ones((2,), "float32"), autocast=False)
    assert (variable._autocast, pinned._autocast) == (True, False)
    assert get_autocast_scope() is None
    with AutocastScope("bfloat16") as _:
        assert get_autocast_scope().dtype == "bfloat16"
        assert variable.value.dtype == tf.bfloat16
        assert variable._value.dtype == pinned.value.dtype == tf.float32


# tfdist/keras_hooks/optimizers.py, trainer.py

OVERRIDDEN = {
    (TFOptimizer, "build"): ["self", "variables"],
    (keras.optimizers.Nadam, "build"): ["self", "var_list"],
    (TFOptimizer, "add_variable_from_reference"): ["self", "reference_variable", "name", "initializer"],
    (BaseOptimizer, "apply"): ["self", "grads", "trainable_variables"],
    (TFOptimizer, "_overwrite_model_variables_with_average_value"): ["self", "trainable_variables"],
    (keras.callbacks.SwapEMAWeights, "_tf_swap_variables"): ["self", "optimizer"],
    (keras.callbacks.SwapEMAWeights, "_tf_finalize_ema_values"): ["self", "optimizer"],
    (keras.optimizers.LossScaleOptimizer, "_tf_apply"): ["self", "grads", "trainable_variables"],
    (TFOptimizer, "_apply_weight_decay"): ["self", "variables"],
    (TFOptimizer, "_backend_update_step"): ["self", "grads", "trainable_variables", "learning_rate"],
    (TensorFlowTrainer, "_maybe_symbolic_build"): ["self", "iterator", "data_batch"],
    (TensorFlowTrainer, "predict_on_batch"): ["self", "x"],
    (tensorflow_trainer, "_multi_worker_concat"): ["v", "strategy"],
}


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=lambda value: getattr(value, "__name__", value))
def test_methods_that_the_seam_overrides(owner, name):
    method = getattr(owner, name)
    original = method._tfdist_original
    assert original.__module__.startswith("keras.src.")
    assert not hasattr(original, "_tfdist_original"), "overridden twice"
    assert parameters(original) == OVERRIDDEN[owner, name]


def test_compile_is_overridden():
    original = Trainer.compile._tfdist_original
    assert {"optimizer", "loss", "metrics", "run_eagerly", "jit_compile"} <= set(parameters(original))


def test_the_seam_is_where_keras_calls_it():
    """Every optimizer is a `TFOptimizer`, every model a `TensorFlowTrainer`; `apply` calls the overridden methods."""
    assert issubclass(keras.optimizers.Adam, TFOptimizer)
    assert issubclass(keras.Model, TensorFlowTrainer)
    assert keras.Model.compile is Trainer.compile
    own_apply = {cls for cls in optimizer_classes() if "apply" in vars(cls)}
    assert own_apply == {keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer}, "bypass the overridden one"
    assert {cls for cls in optimizer_classes() if "_backend_update_step" in vars(cls)} == {keras.optimizers.Nadam}
    assert {cls for cls in optimizer_classes() if "_apply_weight_decay" in vars(cls)} == {keras.optimizers.Muon}
    calls = []

    class Noting(keras.optimizers.SGD):
        def _backend_update_step(self, *args):
            calls.append("_backend_update_step")
            return super()._backend_update_step(*args)

        def _apply_weight_decay(self, *args):
            calls.append("_apply_weight_decay")
            return super()._apply_weight_decay(*args)

        def update_step(self, gradient, variable, learning_rate):
            calls.append("update_step")
            return super().update_step(gradient, variable, learning_rate)

    variable = keras.Variable(np.ones((2,), "float32"))
    Noting(0.5, weight_decay=0.5).apply([tf.ones([2])], [variable])
    assert calls == ["_apply_weight_decay", "_backend_update_step", "update_step"]
    np.testing.assert_allclose(variable.numpy(), 1 - 0.5 * 0.5 - 0.5)


def optimizer_classes():
    found = [value for value in vars(keras.optimizers).values() if inspect.isclass(value)]
    return [cls for cls in found if issubclass(cls, keras.optimizers.Optimizer) and cls is not keras.optimizers.Optimizer]


def test_what_the_sharded_step_reads_of_an_optimizer():
    """tfdist/optimizers: step.py, after_update.py, slots.py."""
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2)
    variables = [keras.Variable(np.ones((2,), "float32"), name="weight") for _ in range(3)]
    optimizer.build(variables)
    assert list(optimizer._trainable_variables) == variables
    assert [variable.name for variable in optimizer._accumulated_gradients] == ["weight_gradient_accumulator"] * 3
    assert [variable.name for variable in optimizer._model_variables_moving_average] == ["weight_average"] * 3
    assert optimizer._get_variable_index(variables[1]) == 1
    assert {"_momentums", "_velocities", "_variables", "_trainable_variables"} <= set(vars(optimizer))
    assert optimizer._iterations is optimizer.variables[0]
    slot, stand_in = optimizer._momentums[1], tf.Variable([3.0, 4.0])
    assert slot._value is slot.value
    slot._value = stand_in
    optimizer.assign_add(slot, keras.ops.square(slot))
    np.testing.assert_array_equal(stand_in, [12.0, 20.0])
    assert optimizer._filter_empty_gradients([None, 1.0], variables[:2]) == ([1.0], [variables[1]])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer._check_variables_are_known([keras.Variable(0.0)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    scaled.build(variables)
    assert {"step_counter", "dynamic_scale", "dynamic_growth_steps", "inner_optimizer"} <= set(vars(scaled))


def test_what_the_seam_reads_of_optimizers_and_models(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, weight_decay=0.5)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    assert optimizer._distribution_strategy is strategy
    assert model._distribute_strategy is strategy
    assert model.jit_compile is False
    assert model.run_eagerly is False
    kernel = model.trainable_variables[0].value
    # By the container of a component an optimizer finds its slots.
    assert optimizer._var_key(kernel.values[1]) == optimizer._var_key(kernel) == optimizer._var_key(model.weights[0])
    assert optimizer._use_weight_decay(kernel)
    optimizer.exclude_from_weight_decay(var_list=[model.trainable_variables[0]])
    assert not optimizer._use_weight_decay(kernel.values[0])
    for argument in (
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "gradient_accumulation_steps",
        "loss_scale_factor",
    ):
        assert hasattr(optimizer, argument), argument


def test_operations_can_be_made_to_wait():
    graph = tf.Graph()
    with graph.as_default():
        first, second = tf.constant(1).op, tf.constant(2).op
        first._add_control_inputs([second])
    assert [op.name for op in first.control_inputs] == [second.name]


def test_every_call_of_a_function_comes_by_one_method(monkeypatch):
    """graphs/calls.py: also of a function that another one calls; of loops and branches none does."""
    called = []
    original = concrete_function.ConcreteFunction._call_flat

    def noted(self, *args, **kwargs):
        called.append((self.graph.marked, tf.executing_eagerly()))
        return original(self, *args, **kwargs)

    @tf.function
    def inner():
        tf.compat.v1.get_default_graph().marked = "inner"
        return tf.constant(1)

    @tf.function
    def outer():
        tf.compat.v1.get_default_graph().marked = "outer"
        return inner() + 1

    monkeypatch.setattr(concrete_function.ConcreteFunction, "_call_flat", noted)
    inner(), inner(), outer(), outer(), outer.get_concrete_function()()
    assert called == [("inner", True)] * 2 + [("inner", False)] + [("outer", True)] * 3
    kinds = control_flow_v2_func_graphs
    assert issubclass(kinds.WhileBodyFuncGraph, kinds.ControlFlowFuncGraph)
    assert issubclass(kinds.CondBranchFuncGraph, kinds.ControlFlowFuncGraph)


def test_a_mutex_is_held_until_it_is_consumed():
    """collectives/exclusion.py: eagerly as long as the lock is known; a thread that TensorFlow has made is a dummy to Python."""
    mutex = tf.raw_ops.MutexV2(container="", shared_name="of a test")
    seen = []

    @tf.function(autograph=False)
    def note(number):
        lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock.op]):
            noted = tf.py_function(lambda x: seen.append(int(x)), [number], [])
        with tf.control_dependencies([noted]):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    note(0), note(1)
    lock = tf.raw_ops.MutexLock(mutex=mutex)
    thread = threading.Thread(target=note, args=(2,))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and seen == [0, 1]
    del lock
    thread.join(60)
    assert seen == [0, 1, 2]
    data = tf.data.Dataset.from_generator(lambda: iter([type(threading.current_thread()).__name__]), tf.string)
    assert next(iter(data)).numpy() == b"_DummyThread"


def test_a_variable_without_a_value_stands_for_another(cpus):
    """graphs/tape.py: tapes know it by its handle, which has a shape."""
    stands = resource_variable_ops.UninitializedVariable(trainable=True, shape=(2, 3), dtype=tf.float32, name="whole")
    assert default_gradient.supports_default_grad(stands.handle)
    shape, dtype = default_gradient.shape_and_dtype(stands.handle)
    assert (tuple(shape), dtype) == ((2, 3), tf.float32)
    with tf.GradientTape() as tape:
        assert record.could_possibly_record()
        resource_variable_ops.variable_accessed(stands)
        read = tf.ones((2, 3))
        record.record_operation("Read", [read], [stands.handle], lambda upstream: [upstream], lambda tangent: [tangent])
        loss = tf.reduce_sum(read * 2.0)
    assert tape.watched_variables() == (stands,)
    assert tape.gradient(loss, stands).numpy().tolist() == [[2.0] * 3] * 2


def test_shards_are_known_by_their_handles(cpus):
    """sharding/weight_cache.py: a component knows its container, and its class can be one that tells of assignments."""
    with tf.distribute.MirroredStrategy(cpus[:2]).scope():
        variable = tf.Variable(1.0)
    component = variable.values[1]
    assert component.handle._distributed_container() is variable
    for name in ("assign", "assign_add", "assign_sub", "scatter_update", "batch_scatter_update", "_strided_slice_assign"):
        assert callable(getattr(component, name)), name


def test_ragged_tensors_keep_where_their_rows_begin():
    rows = tf.ragged.constant([[1, 2], [], [3]])
    assert rows._row_partition._row_splits.numpy().tolist() == [0, 2, 2, 3]
