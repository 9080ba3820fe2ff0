"""Bad input: an error at the earliest moment, which names the argument, what was received and the fix."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import mlp, strategy_for, vectors

import tfdist


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"zero_stage": 4}, ValueError, ["`zero_stage`", "zero_stage=4"]),
        ({"zero_stage": -1}, ValueError, ["`zero_stage`", "zero_stage=-1"]),
        ({"zero_stage": True}, ValueError, ["`zero_stage`"]),
        ({"zero_stage": "3"}, ValueError, ["`zero_stage`", "zero_stage='3'"]),
        ({"devices": []}, ValueError, ["`devices`", "at least one"]),
        ({"devices": ["CPU:0", "CPU:0"]}, ValueError, ["`devices`", "distinct"]),
        ({"devices": ["CPU:0", "CPU:9"]}, ValueError, ["`devices`", "CPU:9", "use_logical_cpus"]),
        ({"devices": ["GPU:0"]}, ValueError, ["`devices`", "GPU:0"]),
        ({"devices": "CPU:0"}, ValueError, ["`devices`", "list"]),
        ({"tensor_parallel_size": 3}, ValueError, ["`tensor_parallel_size`", "4", "divide"]),
        ({"pipeline_parallel_size": 8}, ValueError, ["`pipeline_parallel_size`", "divide"]),
        ({"tensor_parallel_size": 0}, ValueError, ["`tensor_parallel_size`", "positive"]),
        ({"zero_stag": 3}, TypeError, ["`zero_stag`", "zero_stag=3", "`zero_stage`"]),
        ({"config": {"zero_stage": 3}}, ValueError, ["`config`", "tfdist.ShardingConfig"]),
        ({"bucket_bytes": 0}, ValueError, ["`bucket_bytes`", "bucket_bytes=0"]),
        ({"prefetch": -1}, ValueError, ["`prefetch`", "prefetch=-1"]),
        ({"reshard_after_forward": 1}, ValueError, ["`reshard_after_forward`"]),
        ({"reduce_dtype": "int32"}, ValueError, ["`reduce_dtype`", "int32"]),
        ({"reduce_dtype": "nonsense"}, ValueError, ["`reduce_dtype`", "nonsense"]),
    ],
    ids=str,
)
def test_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        tfdist.ShardedStrategy(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_mixed_devices(monkeypatch):
    pretend = tf.config.LogicalDevice
    devices = [pretend("/device:CPU:0", "CPU"), pretend("/device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: devices)
    with pytest.raises(ValueError, match="one type, not a mix of"):
        tfdist.ShardedStrategy(["CPU:0", "GPU:0"])


def test_defaults_are_all_logical_cpus_and_stage_2():
    strategy = tfdist.ShardedStrategy()
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.zero_stage == 2
    assert strategy.num_replicas_in_sync == 4
    assert strategy.mesh.shape == (4, 1, 1)


def test_elementwise_takes_optimizer_classes():
    with pytest.raises(ValueError, match="`optimizer_class`"):
        tfdist.optimizers.elementwise(keras.optimizers.SGD(0.1))


def test_variables_that_are_overwritten_with_their_gradient():
    with strategy_for(2, 1).scope():
        variable = keras.Variable(np.ones((3,), "float32"), name="amax")
        variable.overwrite_with_gradient = True
        with pytest.raises(NotImplementedError, match="amax.*float8"):
            keras.optimizers.SGD(0.1).build([variable])


@pytest.mark.parametrize("method", ["_clip_gradients", "_backend_apply_gradients"])
def test_optimizers_that_override_what_is_not_called(method):
    kind = type("Mine", (keras.optimizers.SGD,), {method: lambda self, *gradients: gradients[0]})
    with strategy_for(2, 1).scope(), pytest.raises(NotImplementedError, match=f"Mine overrides `{method}`.*Override `apply"):
        kind(0.1).build([keras.Variable(np.ones((3,), "float32"))])


def test_an_optimizer_that_goes_over_gradients_in_its_update_step():
    class Mine(keras.optimizers.SGD):
        def _backend_update_step(self, grads, trainable_variables, learning_rate):
            super()._backend_update_step([grad * 2 for grad in grads], trainable_variables, learning_rate)

    with strategy_for(2, 1).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(Mine(0.1), "mse")
    with pytest.raises(NotImplementedError, match="Mine goes over the gradients.*Override `apply"):
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))


def test_model_built_outside_scope():
    model = mlp()
    with strategy_for(2, 3).scope(), pytest.raises(ValueError, match="built under no strategy.*same `strategy.scope"):
        model.compile(optimizer="sgd", loss="mse")


def test_model_built_under_another_strategy():
    with strategy_for(2, 3).scope():
        model = mlp()
    with strategy_for(2, 3).scope(), pytest.raises(ValueError, match="built under ShardedStrategy"):
        model.compile(optimizer="sgd", loss="mse")


def test_layer_built_outside_scope():
    layer = keras.layers.Dense(4)
    layer.build((None, 15))
    with strategy_for(2, 3).scope():
        model = keras.Sequential([keras.Input((15,)), layer])
        with pytest.raises(ValueError, match="dense.*kernel.*no strategy"):
            model.compile(optimizer="sgd", loss="mse")


def test_optimizer_built_outside_scope():
    """One that is not built yet is moved under the model's strategy: tests/programs/models/test_fine_tuning.py."""
    alone = mlp()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(alone.trainable_variables)
    with strategy_for(2, 3).scope():
        model = mlp()
        with pytest.raises(ValueError, match="optimizer was made under no strategy"):
            model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="optimizer was made under no strategy"):
        model.compile(optimizer=optimizer, loss="mse")


def test_jit_compile_is_refused():
    with strategy_for(2, 3).scope():
        model = mlp()
        with pytest.raises(NotImplementedError, match="`jit_compile=True`"):
            model.compile(optimizer="sgd", loss="mse", jit_compile=True)
        model.compile(optimizer="sgd", loss="mse")  # "auto"
    assert model.jit_compile is False


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_step_inside_a_loop_is_refused(zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = mlp()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    x = vectors()[0][:4]

    @tf.function
    def run():
        def step():
            for _ in tf.range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(x))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(step)

    with pytest.raises((RuntimeError, NotImplementedError), match="in(side)? a loop"):
        run()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_compiled_functions_around_ranks(zero_stage):
    """A model is called in one where its weights are whole; what takes several devices is refused."""
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", "mse")
    x = np.ones([4, *model.input_shape[1:]], "float32")
    compiled = functools.partial(tf.function, jit_compile=True)
    calls = {
        "run": compiled(lambda: strategy.run(lambda: model(x))),
        "run of": lambda: strategy.run(compiled(lambda: model(x))),
        "apply": compiled(lambda: model.optimizer.apply([tf.ones(w.shape) for w in model.trainable_variables])),
        "forward": compiled(lambda: model(x)),
    }
    model.optimizer.build(model.trainable_variables)
    if zero_stage == 0:
        np.testing.assert_allclose(calls.pop("forward")(), model(x), rtol=1e-5, atol=1e-6)
    model.jit_compile = True
    for call in (*calls.values(), lambda: model.fit(x, np.ones([4, model.output_shape[1]]), verbose=0)):
        with pytest.raises(NotImplementedError, match="XLA compiles .*Leave out `jit_compile=True`"):
            call()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_gradient_in_a_compiled_function_is_refused(zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = mlp()

    @tf.function(jit_compile=True)
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    x = tf.zeros([4, *model.input_shape[1:]])
    with pytest.raises(NotImplementedError, match="compiled .*Leave out `jit_compile=True`"):
        tf.function(lambda: strategy.run(lambda: sum(map(tf.norm, gradients(x)))))()


def test_python_collects_garbage_again_after_a_trace_that_fails():
    strategy, seen = strategy_for(2, 0), []

    def step():
        seen.append(gc.isenabled())
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        tf.function(lambda: strategy.run(step), autograph=False)()
    assert seen == [False] and gc.isenabled()
    with pytest.raises(ArithmeticError):  # an eager step has tensors of its own to give back
        strategy.run(step)
    assert seen[1] and gc.isenabled()


def test_wrong_shape_assigned():
    with strategy_for(2, 3).scope():
        variable = tf.Variable(np.zeros((3, 5), "float32"))
        with pytest.raises(ValueError, match=r"shape \(3, 5\).*shape=\(5, 3\)"):
            variable.assign(np.zeros((5, 3), "float32"))


def test_scatter_updates_are_refused():
    with strategy_for(2, 3).scope():
        variable = tf.Variable(np.zeros((3, 5), "float32"))
        with pytest.raises(NotImplementedError, match="Scatter updates"):
            variable.scatter_add(tf.IndexedSlices(tf.zeros((1, 5)), [0]))
