"""Pipelines of subclassed models, of which only the list of blocks is named, against the model itself on one device."""

import functools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on

import tfdist
from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import on_one_device, run

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

layers, ops = keras.layers, keras.ops
ROWS, BATCH, LENGTH, WIDTH, VOCABULARY = 24, 8, 5, 6, 11


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    def __init__(self, rate=0.0, attends=True, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.norm = layers.MultiHeadAttention(2, 3) if attends else None, layers.LayerNormalization()
        self.dense, self.dropout = layers.Dense(WIDTH, "tanh", activity_regularizer="l2"), layers.Dropout(rate)

    def call(self, x, mask=None, training=None):
        if self.attention is not None:
            x = x + self.attention(x, x, attention_mask=mask)
        return self.norm(x + self.dropout(self.dense(x), training=training))


@keras.saving.register_keras_serializable("tests")
class GPT(keras.Model):
    """Positions that depend on no input, a mask for every block, TensorFlow's own operations, a head that is the embedding."""

    def __init__(self, count=2, attends=True, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(VOCABULARY, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(attends=attends) for _ in range(count)]
        self.norm = layers.LayerNormalization()
        self.count = count

    def call(self, ids, training=None):
        x = self.tokens(ids) + self.positions(tf.range(tf.shape(ids)[1]))
        mask = tf.not_equal(ids, 0)[:, None, :]
        for block in self.blocks:
            x = block(x, mask, training=training)
        return ops.matmul(self.norm(x), ops.transpose(self.tokens.embeddings))

    def get_config(self):
        return {"count": self.count}


class Classifier(keras.Model):
    """Blocks in a Sequential of a layer; losses, statistics and Python that depends on `training` around them; masks by Keras."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, embeddings_regularizer="l2")
        self.encoder = Encoder()
        self.pool, self.norm = layers.GlobalAveragePooling1D(), layers.BatchNormalization(momentum=0.5)
        self.head = layers.Dense(3, activity_regularizer="l2")

    def call(self, ids, training=None):
        x = self.embed(ids)
        if training:
            x = x * 1.1
        x = self.norm(self.pool(self.encoder(x)))
        self.add_loss(ops.mean(x) ** 2)
        return self.head(x)


class Encoder(layers.Layer):
    def __init__(self):
        super().__init__()
        self.stack = keras.Sequential([layers.Dense(WIDTH, "tanh") for _ in range(3)])
        self.supports_masking = True

    def call(self, x):
        return self.stack(x) + 0.5


class Translator(keras.Model):
    """Two lists of blocks, a dictionary of inputs, and something else between the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(VOCABULARY, WIDTH)
        self.encoders, self.decoders = [Block() for _ in range(2)], (CrossBlock(), CrossBlock())
        self.head = layers.Dense(VOCABULARY)

    def call(self, inputs):
        memory = self.embed(inputs["source"])
        for number, block in enumerate(self.encoders):
            memory = block(memory) * (1 + number)
        x = self.embed(inputs["target"])
        for block in self.decoders:
            x = block(x, memory=memory)
        return {"words": self.head(x)}


class CrossBlock(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def call(self, x, memory):
        return x + self.attention(x, memory)


MODELS = {
    "gpt": (GPT, "blocks"),
    "gpt without attention": (functools.partial(GPT, attends=False), "blocks"),
    "longer gpt": (functools.partial(GPT, 3), "blocks"),
    "classifier": (Classifier, "encoder.stack"),
    "translator": (Translator, ["encoders", "decoders"]),
}


def batches(name):
    rng = np.random.default_rng(3)
    x = rng.integers(0, VOCABULARY, (ROWS, LENGTH))
    x[:, 0] = 1
    if name == "classifier":
        return x, rng.integers(0, 3, ROWS)
    if name == "translator":
        return {"source": x, "target": x[::-1].copy()}, {"words": rng.integers(0, VOCABULARY, (ROWS, LENGTH))}
    return x, rng.integers(0, VOCABULARY, (ROWS, LENGTH))


def program(name, infers=True, **settings):
    def fitted(strategy):
        build, blocks = MODELS[name]
        with strategy.scope():
            model = build()
            if settings:
                model = tfdist.PipelineModel(model, blocks=blocks, **settings)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        x, y = batches(name)
        logs = BatchLogs()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[logs])
        losses = [log["loss"] for log in logs.train]
        assert max(losses) > min(losses), "nothing was learnt: an empty comparison"
        found = {"losses": losses, **state(model)}
        if infers:
            few = tf.nest.map_structure(lambda array: array[:6], x)
            found |= {"evaluate": model.evaluate(x, y, verbose=0), "predict": model.predict(few, verbose=0)}
        return found

    fitted.__name__ = name
    return fitted


PLAIN = {(name, infers): program(name, infers) for name in MODELS for infers in (False, True)}
MICROBATCHED = program("classifier", num_microbatches=2)  # BatchNormalization sees microbatches

# (model, pipe size, data size, schedule, recompute, infers)
GRID = [
    ("gpt without attention", 2, 1, "1f1b", False, False),
    exhaustive("gpt", 2, 1, "1f1b", False, True),
    exhaustive("classifier", 2, 1, "1f1b", False, True),
    ("translator", 2, 2, "1f1b", False, True),
    exhaustive("longer gpt", 4, 1, "zero_bubble", False, True),
    exhaustive("longer gpt", 2, 2, "gpipe", True, True),
    exhaustive("classifier", 2, 1, "zero_bubble", True, True),
    exhaustive("translator", 4, 1, "gpipe", False, True),
]


@pytest.mark.parametrize(("name", "pipe", "data", "schedule", "recompute", "infers"), GRID)
def test_it_is_one_device(name, pipe, data, schedule, recompute, infers):
    strategy = strategy_on(pipe * data, pipeline_parallel_size=pipe, zero_stage=1)
    found = run(program(name, infers, num_microbatches=2, schedule=schedule, recompute=recompute), strategy)
    assert_same_tree(found, on_one_device(MICROBATCHED if name == "classifier" else PLAIN[name, infers]), name)


def saved_and_looped(strategy, wraps=True):
    """Saved and loaded, then trained in a loop of one's own that clips."""
    with strategy.scope():
        model = GPT()
        model = tfdist.PipelineModel(model, num_microbatches=2, blocks="blocks") if wraps else model
        x, y = batches("gpt")
        model(x[:2])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/it.keras")
            model = keras.saving.load_model(f"{folder}/it.keras")
        model.optimizer.build(model.trainable_variables)

    def on_rank(x, y):
        if wraps:
            loss, gradients = model.compute_gradients(x, y)
        else:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            gradients = zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        grads, weights = zip(*gradients, strict=True)
        grads, norm = tfdist.clip_by_global_norm(grads, weights, 0.1)
        model.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return loss, norm

    @tf.function
    def step(x, y):
        loss, norm = strategy.run(on_rank, args=(x, y))
        return strategy.reduce("SUM", loss, axis=None), strategy.reduce("MEAN", norm, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    found = [[float(x) for x in step(*batch)] for batch in strategy.experimental_distribute_dataset(dataset)]
    assert max(norm for _, norm in found) > 0.1
    return {"losses and norms": found, **state(model)}


def plain_loop(strategy):
    return saved_and_looped(strategy, wraps=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("devices", "zero_stage"), [(2, 0), (4, 2)])
def test_saving_and_a_loop_of_ones_own(devices, zero_stage):
    strategy = strategy_on(devices, pipeline_parallel_size=2, zero_stage=zero_stage)
    assert_same_tree(run(saved_and_looped, strategy), on_one_device(plain_loop))


@pytest.mark.parametrize("run_eagerly", [exhaustive(True), exhaustive(False)])
def test_without_a_strategy(run_eagerly):
    def trained(wraps):
        keras.utils.set_random_seed(1)
        model = GPT()
        model = tfdist.PipelineModel(model, num_microbatches=2, blocks="blocks") if wraps else model
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=run_eagerly)
        x, y = batches("gpt")
        history = model.fit(x[:14], y[:14], batch_size=BATCH, shuffle=False, verbose=0).history
        return {"history": history, "weights": model.get_weights()}

    assert_same_tree(trained(True), trained(False))


# What is refused


class DrawsTwice(GPT):
    """What is drawn before the blocks is used behind them."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, ids):
        x = start = self.dropout(self.tokens(ids) + self.positions(ops.arange(LENGTH)))
        for block in self.blocks:
            x = block(x)
        return ops.matmul(self.norm(x + start), ops.transpose(self.tokens.embeddings))


class SkipsWhenItTrains(GPT):
    def call(self, ids, training=None):
        x = self.tokens(ids) + self.positions(ops.arange(LENGTH))
        for block in self.blocks[1:] if training else self.blocks:
            x = block(x)
        return ops.matmul(self.norm(x), ops.transpose(self.tokens.embeddings))


class CallsOne(GPT):
    def call(self, ids):
        x = self.blocks[0](self.tokens(ids) + self.positions(ops.arange(LENGTH)))
        return ops.matmul(self.norm(x), ops.transpose(self.tokens.embeddings))


@pytest.mark.parametrize(
    ("build", "blocks", "error", "words"),
    [
        (GPT, None, NotImplementedError, ["graph of layers", 'blocks="blocks"']),
        (GPT, "layers_of_it", ValueError, ["`blocks` must name", "'layers_of_it'", "Lists that it has: 'blocks'"]),
        (GPT, "norm", ValueError, ["`blocks` must name"]),
        (DrawsTwice, "blocks", NotImplementedError, ["drawn at random", "seed_generator_state"]),
        (SkipsWhenItTrains, "blocks", (NotImplementedError, ValueError), ["calls"]),
        (CallsOne, "blocks", ValueError, ["not_called"]),
        (lambda: keras.Sequential([keras.Input((LENGTH,)), layers.Dense(2)]), "blocks", ValueError, ["graph of layers"]),
    ],
)
def test_refused(build, blocks, error, words):
    with strategy_on(2, pipeline_parallel_size=2).scope(), pytest.raises(error) as caught:
        model = tfdist.PipelineModel(build(), num_microbatches=2, blocks=blocks)
        model(np.ones((2, LENGTH), "int32"))
    assert all(word in str(caught.value) for word in words), str(caught.value)
