"""What a pipelined model is from outside, what every rank holds and sends, and what is refused."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import strategy_on
from training import one_device

import tfdist
from tests import forks
from tests.devices import names, of_cpus
from tests.extensions.pipeline.pipeline_models import BATCH, CLASSES, chain, compiled, crossentropy, data, tied, train
from tests.parity.comparison import assert_same_tree
from tfdist.extensions.pipeline import Schedule1F1B, Stage

layers = keras.layers


def pipe(ranks, **settings):
    return strategy_on(ranks, pipeline_parallel_size=settings.pop("pipeline_parallel_size", ranks), zero_stage=0, **settings)


def dense_layers(count=6):
    return [layers.Dense(5, "tanh", name=f"dense_{index}") for index in range(count)]


def stacked(count=6):
    return keras.Sequential([keras.Input((5,)), *dense_layers(count)])


# What exists where


def test_a_weight_is_made_on_the_ranks_of_its_stage_only():
    strategy = pipe(4, pipeline_parallel_size=2)
    with strategy.scope():
        inner = stacked()
        assert all(variable._value is None for variable in inner.variables), "made before its place is known"
        before = inner.get_weights()
        model = tfdist.PipelineModel(inner, num_microbatches=2, stages=["dense_2"])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    for variable, value in zip(model.variables, before, strict=True):
        stage = int(variable.path.split("/")[-2].removeprefix("dense_")) >= 2
        shapes = [tuple(component.shape) for component in variable.value.values]
        assert shapes == [(0,) if rank % 2 != stage else tuple(variable.shape) for rank in range(4)]
        np.testing.assert_array_equal(variable.numpy(), value)
    for slot in model.optimizer._momentums:
        assert [component.shape.rank for component in slot.value.values].count(1) >= 2
    report = tfdist.memory_report(model)
    each = 4 * (5 * 5 + 5)
    assert [device.parameter_bytes for device in report.devices] == [2 * each, 4 * each] * 2
    assert [device.gradient_bytes for device in report.devices] == [2 * each, 4 * each] * 2
    assert "pipeline_parallel_size=2" in str(report)


def test_statistics_and_random_states_live_with_their_layer():
    with pipe(2).scope():
        model = tfdist.PipelineModel(chain(), num_microbatches=2, stages=[4])
    first, second = (layer for layer in model.layers if isinstance(layer, layers.BatchNormalization))
    assert first.moving_mean.value.layout.pipe_owners == (0,)
    assert second.moving_mean.value.layout.pipe_owners == (1,)
    states = [layer.seed_generator.state for layer in model.layers if isinstance(layer, layers.Dropout)]
    assert [state.value.layout.pipe_owners for state in states] == [(0,), (1,)]


def test_a_shared_weight_lives_with_all_its_stages():
    with pipe(2).scope():
        model = tfdist.PipelineModel(tied(), num_microbatches=2)
        table = model.layers[1].embeddings
    assert table.value.layout.pipe_owners == (0, 1)
    assert [tuple(component.shape) for component in table.value.values] == [tuple(table.shape)] * 2


def test_loading_before_wrapping_keeps_the_values():
    with pipe(2).scope():
        inner = stacked()
        wanted = [np.full(weight.shape, index, "float32") for index, weight in enumerate(inner.weights)]
        inner.set_weights(wanted)
        model = tfdist.PipelineModel(inner, num_microbatches=2)
    for variable, value in zip(model.weights, wanted, strict=True):
        assert len(variable.value.layout.pipe_owners) == 1
        np.testing.assert_array_equal(variable.numpy(), value)


# What is sent


def test_messages():
    """One message forward and one back per boundary and microbatch; gradients are reduced once; the loss is one number."""
    strategy = pipe(4, pipeline_parallel_size=2)
    model = compiled(strategy, "branches", num_microbatches=2)
    x, y, _ = data("branches")
    model.fit(x, y, batch_size=16, verbose=0)
    plan = strategy.last_plan
    for rank in range(4):
        assert all(record.op == "all_reduce" for record in plan.records[rank])
        over_data = [record for record in plan.records[rank] if record.label.startswith("all_reduce/bucket")]
        assert len(over_data) == 1 and set(over_data[0].ranks) == {rank, (rank + 2) % 4}
        over_pipe = [record for record in plan.records[rank] if record.label.startswith("pipe")]
        assert [(record.shape, len(record.ranks)) for record in over_pipe] == [((), 2)]
    # Metrics are updated with every microbatch, by the last stage, and read once a step, by all.
    batch = strategy.experimental_distribute_values_from_function(lambda _: tf.nest.map_structure(lambda a: a[:8], (x, y)))
    tf.function(lambda batch: strategy.run(model.train_step, (batch,)), autograph=False)(batch)
    plan = strategy.last_plan
    read = [sum(record.label == "metrics" for record in records) for records in plan.records]
    assert len(set(read)) == 1 and read[0] > 0


# Saving


def test_files_are_those_of_the_model_inside(tmp_path):
    expected = train(one_device(), "tied", infers=False)
    model = compiled(pipe(2), "tied", num_microbatches=2)
    x, y, _ = data("tied")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_tree(model.get_weights(), expected["weights"])
    model.save_weights(tmp_path / "it.weights.h5")
    plain = compiled(one_device(), "tied")
    plain.load_weights(tmp_path / "it.weights.h5")
    assert_same_tree(plain.get_weights(), expected["weights"])
    again = compiled(pipe(2), "tied", num_microbatches=2, schedule="gpipe")
    again.load_weights(tmp_path / "it.weights.h5")
    assert_same_tree(again.get_weights(), expected["weights"])


def test_a_whole_model_is_saved_and_loaded(tmp_path):
    model = compiled(pipe(2), "branches", num_microbatches=2, schedule="zero_bubble")
    x, y, _ = data("branches")
    model.fit(x, y, batch_size=16, verbose=0)
    model.save(tmp_path / "it.keras")
    loaded = keras.saving.load_model(tmp_path / "it.keras")
    assert isinstance(loaded, tfdist.PipelineModel) and loaded.num_microbatches == 2
    few = {key: value[:5] for key, value in x.items()}
    assert_same_tree(loaded.predict(few, verbose=0), model.predict(few, verbose=0))
    assert_same_tree([slot.numpy() for slot in loaded.optimizer.variables], [slot.numpy() for slot in model.optimizer.variables])


def test_it_looks_like_the_model_inside():
    with pipe(2).scope():
        model = tfdist.PipelineModel(stacked(), num_microbatches=2)
    lines = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    assert "dense_5" in "\n".join(lines) and [layer.name for layer in model.layers][-1] == "dense_5"
    assert model.get_layer("dense_3") is model.layers[3]
    assert model.count_params() == 6 * 30
    assert "dense_0" in model.stage_report()
    x = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), atol=1e-6)


# Ways to say the same


def test_stages_by_groups_names_places_and_a_schedule_of_ones_own():
    def weights_per_rank(*args, **settings):
        with pipe(2).scope():
            model = tfdist.PipelineModel(*args, num_microbatches=2, **settings)
            if not model.built:
                model.build((None, 5))
        by_rank = zip(*(variable.value.values for variable in model.weights), strict=True)
        return [sum(0 not in component.shape for component in components) for components in by_rank]

    made = dense_layers()
    assert weights_per_rank([Stage(made[:4]), Stage(made[4:])]) == [8, 4]
    assert weights_per_rank(stacked(), stages=["dense_4"]) == [8, 4]
    assert weights_per_rank(stacked(), stages=[4]) == [8, 4]
    assert weights_per_rank(dense_layers()) == [6, 6], "balanced"
    text = "0F0 0F1 . . 0B1 0B0\n. 1F0 1F1 1B1 1B0 ."
    assert weights_per_rank(stacked(), schedule=text) == [6, 6]


@pytest.mark.as_traced
def test_a_schedule_of_ones_own_trains():
    text = "0F0 0F1 0F2 0F3 .   .   .   0B1 0B0 0B3 0B2\n.   1F0 1F1 1F2 1F3 1B1 1I0 1B3 1W0 1B2 .  "
    found = train(pipe(2), "plain", infers=False, num_microbatches=4, schedule=text)
    assert_same_tree(found, train(one_device(), "plain", infers=False))


@pytest.mark.as_traced
def test_microbatches_in_another_order_keep_their_rows():
    """The last stage takes the second before the first: for predictions, and for a loss that needs all rows."""

    def root(y, p):
        return keras.ops.sqrt(keras.ops.mean((y - p) ** 2))

    schedule = "0F1 0F0 . . 0B1 0B0\n. 1F1 1F0 1B1 1B0 ."
    with pipe(2).scope():
        model = tfdist.PipelineModel(stacked(), num_microbatches=2, schedule=schedule, stages=["dense_3"])
        model.compile("sgd", root)
    x = np.random.default_rng(3).normal(size=(8, 5)).astype("float32")
    alone = stacked()
    alone.set_weights(model.get_weights())
    alone.compile("sgd", root)
    expected = alone.predict(x, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.predict(x, batch_size=8, verbose=0), expected, atol=1e-6)
    y = np.cumsum(x, 0)
    np.testing.assert_allclose(model.evaluate(x, y, 8, verbose=0), alone.evaluate(x, y, 8, verbose=0), rtol=1e-5)


def test_sequences_of_any_length():
    """Sizes that are known at run time only, with a mask, whose loss is called on zeros first."""

    def trained(strategy):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            tokens = keras.Input((None,), dtype="int32")
            x = layers.Embedding(9, 6, mask_zero=True)(tokens)
            x = layers.Dense(6, "tanh")(layers.Dense(6, "tanh")(x))
            model = tfdist.PipelineModel(keras.Model(tokens, layers.Dense(9)(x)), num_microbatches=2)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        x = np.random.default_rng(0).integers(0, 9, (8, 5))
        history = model.fit(x, x, batch_size=4, shuffle=False, verbose=0).history
        return {"loss": history["loss"], "weights": model.get_weights(), "predict": model.predict(x[:3], verbose=0)}

    assert_same_tree(trained(pipe(2)), trained(one_device()))


# What is refused


class Subclassed(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_microbatches": 0}, ValueError, ["`num_microbatches`", "positive", "0"]),
        ({"num_microbatches": True}, ValueError, ["`num_microbatches`"]),
        ({"num_microbatches": 2, "stages_per_rank": 0}, ValueError, ["`stages_per_rank`"]),
        ({"num_microbatches": 2, "schedule": "fastest"}, ValueError, ["`schedule`", "gpipe", "'fastest'"]),
        ({"num_microbatches": 2, "schedule": Schedule1F1B(2, 4)}, ValueError, ["`num_microbatches`", "2", "4"]),
        ({"num_microbatches": 2, "stages": ["dense_9"]}, ValueError, ["dense_9"]),
        ({"num_microbatches": 2, "stages": ["dense_1", "dense_2"]}, ValueError, ["`stages`", "2"]),
    ],
    ids=str,
)
def test_arguments(settings, error, words):
    with pipe(2).scope(), pytest.raises(error) as caught:
        tfdist.PipelineModel(stacked(), **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_stages_than_layers():
    with pipe(4).scope(), pytest.raises(ValueError, match="4.*stages|stages.*4"):
        tfdist.PipelineModel(stacked(3), num_microbatches=4)


def test_what_is_no_graph_of_layers():
    with pipe(2).scope(), pytest.raises(NotImplementedError, match="graph of layers"):
        tfdist.PipelineModel(Subclassed(), num_microbatches=2)


def test_strategies():
    with tf.distribute.MirroredStrategy(names(2)).scope(), pytest.raises(NotImplementedError, match="MirroredStrategy"):
        tfdist.PipelineModel(stacked(), num_microbatches=2)


def test_a_model_that_is_not_wrapped():
    strategy = pipe(2)
    with strategy.scope():
        model = stacked()
        model.compile("sgd", "mse")
    x = np.ones((4, 5))
    for use in (lambda: model.fit(x, x, verbose=0), lambda: model.evaluate(x, x, verbose=0), lambda: model.predict(x, verbose=0)):
        with pytest.raises(ValueError, match="must be a `PipelineModel`"):
            use()
    with pytest.raises(RuntimeError, match="in no pipeline"):
        strategy.run(tf.function(lambda: model(tf.ones([2, 5]))))


def test_eager_steps():
    with pipe(2).scope():
        model = tfdist.PipelineModel(stacked(), num_microbatches=2)
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(NotImplementedError, match="traced step"):
        model.fit(np.ones((4, 5)), np.ones((4, 5)), batch_size=4, verbose=0)


@pytest.mark.as_traced
def test_eager_steps_on_one_device():
    """With a mask that a layer makes: it is computed once more for the stages behind."""

    def losses(**settings):
        model = compiled(one_device(), "masked", num_microbatches=2)
        model.compile("sgd", crossentropy(), **settings)
        x, y, _ = data("masked")
        return model.fit(x[:16], y[:16], batch_size=16, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(run_eagerly=True), losses(), rtol=1e-6)


def test_calling_it_for_training_on_a_rank():
    strategy = pipe(2)
    with strategy.scope():
        model = tfdist.PipelineModel(stacked(), num_microbatches=2)
    with pytest.raises(RuntimeError, match="compute_gradients"):
        strategy.run(tf.function(lambda: model(tf.ones([2, 5]), training=True)))


def test_an_error_shows_where_in_the_schedule():
    class Failing(layers.Layer):
        def call(self, x, training=None):
            if training:
                raise ArithmeticError("failing on purpose")
            return x

    with pipe(2).scope():
        model = tfdist.PipelineModel([keras.Input((5,)), layers.Dense(4), Failing(), layers.Dense(CLASSES)], num_microbatches=2)
        model.compile("sgd", "mse")
    with pytest.raises(ArithmeticError) as caught:
        model.fit(np.ones((4, 5)), np.ones((4, CLASSES)), batch_size=4, verbose=0)
    assert any("0F0" in note and ">" in note for note in caught.value.__notes__)


def test_side_effects_wait_for_their_inputs_only():
    """TensorFlow would run the checks of all stages in the order of tracing, in which ranks wait for each other for ever."""

    class Checking(layers.Layer):
        def call(self, x):
            tf.debugging.assert_less(tf.reduce_max(x), 50.0)
            return x

    strategy = pipe(2)
    with strategy.scope():
        inputs = [keras.Input((5,)), layers.Dense(4, use_bias=False), Checking(), layers.Dense(4), Checking()]
        model = tfdist.PipelineModel(inputs, num_microbatches=4, stages=[2])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 5)), np.ones((8, 4)), batch_size=8, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(np.full((8, 5), 1e6), np.ones((8, 4)), batch_size=8, verbose=0)


def test_a_weight_of_another_stage():
    class Peeking(layers.Layer):
        def __init__(self, other):
            super().__init__()
            self._peeked = [lambda: other.kernel]  # hidden from Keras

        def call(self, x):
            return x + keras.ops.sum(self._peeked[0]())

    inputs = keras.Input((5,))
    with pipe(2).scope():
        first = layers.Dense(5)
        x = layers.Dense(5, name="second")(first(inputs))
        inner = keras.Model(inputs, Peeking(first)(x))
        model = tfdist.PipelineModel(inner, num_microbatches=2, stages=["second"])
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="lives on pipe rank 0, but is used on 1.(.|\\n)*A stage can use its own"):
        model.fit(np.ones((4, 5)), np.ones((4, 5)), batch_size=4, verbose=0)


def train_with_and_without_a_pipeline():
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 3, size=(16, 5)), rng.normal(size=(16, 5, 2)).astype("float32")
    losses = []
    for wrap in (lambda module: module, lambda module: tfdist.PipelineModel(module, num_microbatches=4)):
        keras.utils.set_random_seed(3)
        embedding = layers.Embedding(3, 4, mask_zero=True)
        hidden = layers.Dense(7, "tanh", kernel_regularizer="l2")
        last = layers.Dense(2, activity_regularizer="l2")
        model = wrap(keras.Sequential([keras.Input((5,)), embedding, hidden, last]))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        losses.append([float(model.train_on_batch(x, y)) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@of_cpus("it starts a process")
def test_a_program_without_a_strategy(tmp_path):
    """One device feeds itself microbatches, in a process in which nothing else changes Keras: masks count as for the batch."""
    output, environment = tmp_path / "output.txt", dict(os.environ)
    process = forks.start(train_with_and_without_a_pipeline, environment=environment, folder=tmp_path, output=output)
    try:
        assert process.wait(100) == 0, output.read_text()
    finally:
        process.kill()
