"""Convolutions sharded by channels, with normalization, activations and pooling between them, beside one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

import tfdist
from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import assert_as_on_one_device
from tfdist.extensions.tensor.plans import resolve, suggest, suggest_plan

pytestmark = pytest.mark.as_traced

layers = keras.layers
SIDE, CLASSES, ROWS, BATCH = 9, 5, 22, 4  # the last batch has two rows
PLAN = {"_(a|a_norm)$": "column", "_b$": "row", "features": "column", "classes": "row"}


def residual(x, filters, strides, name, synchronized):
    """As in a ResNet: a pair of convolutions, and a shortcut that is convolved where it changes its shape."""
    y = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, name=f"{name}_a")(x)
    y = layers.BatchNormalization(synchronized=synchronized, momentum=0.8, name=f"{name}_a_norm")(y)
    y = layers.ReLU()(y)
    y = layers.Conv2D(6, 3, padding="same", kernel_regularizer="l2", name=f"{name}_b")(y)
    y = layers.BatchNormalization(synchronized=synchronized, name=f"{name}_norm")(y)
    if strides != 1:
        x = layers.Conv2D(6, 1, strides, name=f"{name}_shortcut")(x)
    return layers.ReLU()(layers.Add()([x, y]))


def network(synchronized=True, is_deep=True):
    """Pairs of convolutions with strides, and one from a convolution by way of a pooling to a Dense."""
    images = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(6, 3, padding="same", name="stem")(images)
    x = residual(x, 8, 1, "one", synchronized)
    if is_deep:
        x = residual(x, 4, 2, "two", synchronized)
    x = layers.Conv2D(10, 2, padding="same", dilation_rate=(1, 2), activation="tanh", kernel_regularizer="l2", name="features")(x)
    x = layers.MaxPooling2D(2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(CLASSES, name="classes")(x))


def data():
    rng = np.random.default_rng(2)
    return rng.normal(size=(ROWS, SIDE, SIDE, 3)).astype("float32"), rng.integers(0, CLASSES, ROWS)


def trained(strategy, build=network, plan=PLAN):
    x, y = data()
    with strategy.scope():
        model = build()
        if getattr(strategy, "mesh", None) is not None:
            tfdist.parallelize(model, plan, print_fn=None)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    losses = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[record])
    asked = {"evaluated": model.evaluate(x, y, batch_size=BATCH, verbose=0), "predicted": model.predict(x[:3], verbose=0)}
    return {"losses": losses, **state(model), **asked}


def own_statistics(strategy):
    """Each data rank normalizes by its own examples: as on one device where there is one data rank."""
    return trained(strategy, functools.partial(network, synchronized=False))


@pytest.mark.parametrize(
    ("program", "tensor", "data_ranks", "zero_stage"),
    [
        exhaustive(trained, 2, 2, 3),
        exhaustive(trained, 2, 2, 0),
        exhaustive(trained, 2, 2, 1),
        exhaustive(trained, 2, 2, 2),
        exhaustive(trained, 2, 1, 3),
        exhaustive(own_statistics, 2, 1, 0),
        exhaustive(own_statistics, 2, 1, 3),
    ],
)
def test_it_is_one_device(program, tensor, data_ranks, zero_stage):
    assert_as_on_one_device(program, zero_stage, tensor * data_ranks, tensor_parallel_size=tensor)


def layers_alone(strategy):
    """Whole inputs and whole outputs, in a loop of one's own."""
    images = keras.Input((SIDE, SIDE, 3))

    def built():
        x = layers.Conv2D(4, 3, 2, activation="relu", name="up")(images)
        return keras.Model(images, layers.Dense(CLASSES)(layers.Flatten()(layers.Conv2D(3, 2, name="down")(x))))

    x, y = data()
    with strategy.scope():
        model = built()
        if getattr(strategy, "mesh", None) is not None:
            tfdist.parallelize(model, {"up": "column", "down": "row"}, print_fn=None)
            assert not model.get_layer("up").gather_output and model.get_layer("down").input_is_parallel
            model.get_layer("up").gather_output, model.get_layer("down").input_is_parallel = True, False
        model.optimizer = keras.optimizers.SGD(0.1)
        model.optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def step(features, labels):
        def on_rank(features, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features, training=True)) / BATCH
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(features, labels)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    return {"losses": losses, **state(model)}


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_layers_alone_are_one_device(zero_stage):
    assert_as_on_one_device(layers_alone, zero_stage, 2, tensor_parallel_size=2)


def adapted(strategy, names=("one_a", "one_b"), is_deep=False):
    """LoRA on both of a pair of convolutions."""
    x, y = data()
    rng = np.random.default_rng(8)
    with strategy.scope():
        model = network(is_deep=is_deep)
        if getattr(strategy, "mesh", None) is not None:
            tfdist.parallelize(model, PLAN, print_fn=None)
        for name in names:
            layer = model.get_layer(name)
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(rng.normal(scale=0.3, size=layer.lora_kernel_b.shape))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"history": history.history, **state(model)}


def adapted_with_strides(strategy):
    return adapted(strategy, ("one_a", "two_a", "two_b"), is_deep=True)


@pytest.mark.parametrize(("data_ranks", "zero_stage"), [(1, 0), exhaustive(2, 3)])
@pytest.mark.parametrize("program", [adapted, exhaustive(adapted_with_strides)])
def test_lora_is_one_device(program, data_ranks, zero_stage):
    assert_as_on_one_device(program, zero_stage, 2 * data_ranks, tensor_parallel_size=2)


def test_what_is_suggested(monkeypatch):
    monkeypatch.setattr(suggest, "BREAK_EVEN_VECTORS", 1)
    plan = suggest_plan(network(), 2)
    roles = {x.path: (x.role, x.is_paired) for x in plan.shardings}
    assert roles["one_a"] == roles["one_a_norm"] == ("column", True) and roles["one_b"] == ("row", True)
    assert roles["one_norm"] == ("replicate", False)
    # The shortcut's channels and the normalized ones are added up part by part, on the way to the next convolution.
    assert roles["two_shortcut"] == roles["two_b"] == roles["two_norm"] == ("column", True) and roles["features"] == ("row", True)
    assert "its input is whole, or its output has to be" in str(plan)
    norm = next(x for x in plan.shardings if x.path == "one_a_norm")
    assert (norm.saved_bytes, norm.moved_bytes) == (4 * 4 * 8 // 2, 0)
    resolve(network(), plan, 2)


def test_a_pair_sends_one_all_reduce_each_way():
    strategy = strategy_for(2, 0, tensor_parallel_size=2)
    with strategy.scope():
        model = network(synchronized=False)
        tfdist.parallelize(model, {"one_(a|a_norm)$": "column", "one_b$": "row"}, print_fn=None)
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data()
    model.train_on_batch(x[:BATCH], y[:BATCH])
    sent = [record for record in strategy.last_plan.records[0] if len(record.ranks) == 2 and "regularizer" not in record.label]
    assert [record.op for record in sent] == ["all_reduce", "all_reduce"], sent
    assert {record.shape for record in sent} == {(BATCH, SIDE, SIDE, 6)}


def test_saved_and_loaded(tmp_path):
    strategy = strategy_for(2, 0, tensor_parallel_size=2)
    with strategy.scope():
        model = tfdist.parallelize(network(), PLAN, print_fn=None)
    x = data()[0][:3]
    expected = model.predict(x, verbose=0)
    model.save_weights(tmp_path / "it.weights.h5")
    plain = network()
    plain.load_weights(tmp_path / "it.weights.h5")
    assert_same_tree(plain.predict(x, verbose=0), expected)
    model.save(tmp_path / "it.keras")
    with strategy.scope():
        again = keras.models.load_model(tmp_path / "it.keras")
    assert type(again.get_layer("one_a_norm")) is tfdist.layers.ChannelParallelBatchNormalization
    assert_same_tree(again.predict(x, verbose=0), expected)


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ({"one_norm": "column"}, ValueError, "does not stand between layers sharded by column and by row"),
        ({"one_a$": "column", "one_a_norm": "column"}, ValueError, "does not stand between"),
        ({"one_b": "column"}, None, ""),
        ({"classes": "column"}, ValueError, "must divide the units"),
        ({"grouped": "column"}, NotImplementedError, "its channels are in groups"),
        ({"stem": "row"}, ValueError, "must divide the input channels"),
    ],
)
def test_plans_that_are_refused(plan, error, words):
    model = network()
    grouped = layers.Conv2D(6, 1, groups=3, name="grouped")(model.get_layer("stem").output)
    model = keras.Model(model.inputs, [model.output, grouped])
    if error is None:
        assert resolve(model, plan, 2)
        return
    with pytest.raises(error, match=words):
        resolve(model, plan, 2)


def test_layers_that_are_refused():
    with pytest.raises(NotImplementedError, match="groups=2"):
        tfdist.layers.ColumnParallelConv2D(4, 3, groups=2)
    strategy = strategy_for(2, 0, tensor_parallel_size=2)
    with strategy.scope():
        norm = tfdist.layers.ChannelParallelBatchNormalization()
        norm.build((None, 4))
        with pytest.raises(NotImplementedError, match="renorm=True"):
            tfdist.layers.ChannelParallelBatchNormalization(renorm=True).build((None, 4))
        with pytest.raises(ValueError, match="channels=3"):
            tfdist.layers.ChannelParallelBatchNormalization().build((None, 3))
    with pytest.raises(ValueError, match="2 of 4 channels, one part a tensor rank"):
        strategy.run(tf.function(lambda: norm(tf.ones([2, 4]))))
