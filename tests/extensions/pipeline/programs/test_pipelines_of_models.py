"""Pipelines of models as they are in the wild, against the plain model on one device: six steps, an evaluation, a prediction."""

import functools
import tempfile

import keras
import numpy as np
import pytest
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import on_one_device, run

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

layers, ops = keras.layers, keras.ops
ROWS, BATCH, LENGTH, WIDTH, VOCABULARY = 40, 8, 5, 6, 11


class Rotated(layers.Layer):
    """Keeps eager tensors: a table of angles, too large to become a constant of a graph, and a number."""

    def build(self, shape):
        angles = np.arange(40)[:, None] / 10.0 ** np.arange(shape[-1])
        self.sines, self.scale = ops.convert_to_tensor(np.sin(angles), "float64"), ops.sqrt(ops.cast(shape[-1], "float64"))
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        table = ops.take(self.sines, ops.arange(ops.shape(x)[1]), axis=0)
        return ops.tanh(ops.matmul(x * table, self.kernel)) * self.scale


class Block(layers.Layer):
    """As in every tutorial: layers made in `__init__`, built when called; arguments by keyword, some no tensors."""

    def __init__(self, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 3)
        self.feed_forward = keras.Sequential([layers.Dense(7, "relu"), layers.Dense(WIDTH)])
        self.first_norm, self.second_norm = layers.LayerNormalization(), layers.LayerNormalization()
        self.dropout = layers.Dropout(rate)

    def call(self, x, memory=None, attention_mask=None, scale=1.0, returns_scores=False, training=None):
        memory = x if memory is None else memory
        made, scores = self.attention(x, memory, attention_mask=attention_mask, return_attention_scores=True, training=training)
        x = self.first_norm(x + self.dropout(made, training=training))
        x = self.second_norm(x + scale * self.feed_forward(x))
        return (x, scores) if returns_scores else x


def rotary():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(3):
        x = Rotated()(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


class Tables(layers.Layer):
    """As DINOv3's rotary embedding: what it returns depends on the length of a row, and has no rows; and a number."""

    def call(self, x):
        angles = ops.arange(x.shape[1], dtype="float32")[:, None] / (1.0 + ops.arange(x.shape[2], dtype="float32"))
        return ops.sin(angles), ops.mean(angles)


def tables():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    sines, size = Tables()(x)
    for _ in range(3):
        x = layers.Dense(WIDTH, "tanh")(x * sines + 0.1 * size)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


def blocks_without_build():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(3):
        x = Block()(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


def keywords_and_several_outputs():
    """As in T5: a tensor of one block is an argument of the next ones, others are None, a mask is a slice of an input."""
    tokens, padding = keras.Input((LENGTH,), dtype="int32", name="tokens"), keras.Input((LENGTH,), dtype="int32", name="padding")
    mask = padding[:, None, :]
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x, scores = Block()(x, memory=None, attention_mask=mask, returns_scores=True)
    for scale in (0.5, 2.0):
        x, scores = Block()(x, attention_mask=mask, scale=scale, returns_scores=True)
    x = layers.Concatenate()([x, ops.mean(scores, axis=1)])
    return keras.Model({"tokens": tokens, "padding": padding}, layers.Dense(VOCABULARY)(x))


def encoder_decoder():
    source, target = keras.Input((LENGTH,), dtype="int32", name="source"), keras.Input((LENGTH,), dtype="int32", name="target")
    table = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)
    memory = table(source)
    for _ in range(2):
        memory = Block()(memory)
    x = table(target)
    for _ in range(2):
        x = Block()(Block()(x), memory=memory)
    return keras.Model({"source": source, "target": target}, layers.Dense(VOCABULARY)(x))


def frozen():
    """Fine-tuning: the first stage has no weight that trains."""
    model = rotary()
    for layer in model.layers[:3]:
        layer.trainable = False
    return model


MODELS = {
    "rotary": rotary,
    "tables": tables,
    "blocks": blocks_without_build,
    "keywords": keywords_and_several_outputs,
    "encoder-decoder": encoder_decoder,
    "frozen": frozen,
}


def batches(inputs):
    rng = np.random.default_rng(3)
    x = {name: rng.integers(1, VOCABULARY, (ROWS, LENGTH)) for name in inputs}
    if "padding" in x:
        x["padding"] = (x["padding"] > 2).astype("int32")
        x["padding"][:, 0] = 1
    return x if len(x) > 1 else x.popitem()[1], rng.integers(0, VOCABULARY, (ROWS, LENGTH))


def optimizer(name):
    if name == "frozen":
        return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)  # every rank takes part in the norm
    return keras.optimizers.SGD(0.1, momentum=0.9)


def program(name, **settings):
    """Returns a program that fits a model, wrapped where `settings` are given."""

    def fitted(strategy):
        with strategy.scope():
            model = MODELS[name]()
            if settings:
                model = tfdist.PipelineModel(model, **settings)
            model.compile(optimizer(name), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        x, y = batches([tensor.name for tensor in (model.module if settings else model).inputs])
        logs = BatchLogs()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[logs])
        losses = [log["loss"] for log in logs.train]
        assert max(losses) > min(losses), "nothing was learnt: an empty comparison"
        return {"losses": losses, **state(model), "evaluate": model.evaluate(x, y, batch_size=12, verbose=0)}

    fitted.__name__ = name
    return fitted


PLAIN = {name: program(name) for name in MODELS}

# (model, pipe size, data size, microbatches, schedule)
GRID = [
    exhaustive("rotary", 2, 1, 2, "1f1b"),  # "frozen" is one
    exhaustive("tables", 2, 1, 2, "1f1b"),
    exhaustive("blocks", 2, 2, 2, "1f1b"),
    exhaustive("keywords", 2, 1, 2, "zero_bubble"),
    exhaustive("encoder-decoder", 4, 1, 2, "1f1b"),
    ("frozen", 2, 1, 2, "1f1b"),
    *(exhaustive(name, 2, 2, 2, "gpipe") for name in MODELS),
    *(exhaustive(name, 4, 1, 4, "zero_bubble") for name in MODELS),
]


@pytest.mark.parametrize(("name", "pipe", "data", "num_microbatches", "schedule"), GRID)
def test_it_is_one_device(name, pipe, data, num_microbatches, schedule):
    strategy = strategy_on(pipe * data, pipeline_parallel_size=pipe, zero_stage=1)
    found = run(program(name, num_microbatches=num_microbatches, schedule=schedule), strategy)
    assert_same_tree(found, on_one_device(PLAIN[name]), name)


@keras.saving.register_keras_serializable("tests")
class Task(keras.Model):
    """It compiles itself, as KerasHub's tasks do."""

    def __init__(self, **kwargs):
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = Rotated()(layers.Embedding(VOCABULARY, WIDTH)(tokens))
        super().__init__(tokens, layers.Dense(VOCABULARY)(x), **kwargs)
        self.compile(optimizer("task"), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


def task(strategy, wraps=True):
    """Trains, saves, loads, and trains on."""
    with strategy.scope():
        model = tfdist.PipelineModel(Task(), num_microbatches=2) if wraps else Task()
    x, y = batches(["tokens"])
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/it.keras")
        with strategy.scope():
            model = keras.saving.load_model(f"{folder}/it.keras")
    history = [history, model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history]
    return {"history": history, **state(model)}


def plain_task(strategy):
    return task(strategy, wraps=False)


def test_a_model_that_compiles_itself():
    assert_same_tree(run(task, strategy_on(2, pipeline_parallel_size=2, zero_stage=1)), on_one_device(plain_task))


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Preprocesses(keras.Model):
    preprocessor = staticmethod(str.lower)

    def preprocess_samples(self, x):
        return self.preprocessor(x)


def test_a_task_that_preprocesses_is_refused():
    tokens = keras.Input((LENGTH,))
    with strategy_on(2, pipeline_parallel_size=2).scope(), pytest.raises(NotImplementedError, match="`preprocessor=None`"):
        tfdist.PipelineModel(Preprocesses(tokens, layers.Dense(2)(layers.Dense(2)(tokens))), num_microbatches=2)


def test_steps_of_the_models_own_are_refused():
    tokens = keras.Input((LENGTH,))
    with strategy_on(2, pipeline_parallel_size=2).scope(), pytest.raises(NotImplementedError) as caught:
        tfdist.PipelineModel(OwnStep(tokens, layers.Dense(2)(layers.Dense(2)(tokens))), num_microbatches=2)
    assert all(word in str(caught.value) for word in ("'train_step', 'compute_loss'", "subclass of `tfdist.PipelineModel`"))


def between_parallel_layers(strategy, wraps=True):
    """A pipeline is split behind a layer that hands on its part only: each tensor rank sends its part to its own neighbour."""
    with strategy.scope():
        first = tfdist.layers.ColumnParallelDense(8, activation="tanh", gather_output=False, name="first")
        second = tfdist.layers.RowParallelDense(6, input_is_parallel=True, name="second")
        last = tfdist.layers.ColumnParallelDense(4, gather_output=False, name="last")
        model = keras.Sequential([keras.Input((5,)), layers.Dense(7), first, second, last])
        model = tfdist.PipelineModel(model, num_microbatches=2, stages=["second"]) if wraps else model
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 5)), rng.normal(size=(30, 4))
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history  # the last batch has 6 rows
    return {"history": history, **state(model), "predict": model.predict(x[:3], verbose=0)}


def parallel_layers_alone(strategy):
    return between_parallel_layers(strategy, wraps=False)


@pytest.mark.parametrize("zero_stage", [0, exhaustive(1)])
def test_behind_a_layer_that_does_not_gather_its_output(zero_stage):
    strategy = strategy_on(4, pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=zero_stage)
    assert_same_tree(run(between_parallel_layers, strategy), on_one_device(parallel_layers_alone))


def sharded_by_a_plan(strategy, wraps=True, attends=False):
    """Keras layers, sharded over tensor ranks before the model is in a pipeline: attention, an MLP, tables, one of them tied."""
    with strategy.scope():
        tokens = keras.Input((LENGTH,), dtype="int32")
        embedding = layers.ReversibleEmbedding(12, WIDTH, name="embedding")
        x = embedding(tokens)
        if attends:
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3, name="attention")(x, x))
        hidden = layers.Dense(8, "tanh", kernel_regularizer="l2", name="up")(x)
        x = x + layers.Dense(WIDTH, name="down")(hidden)
        model = keras.Model(tokens, embedding(x, reverse=True))
        if wraps:
            plan = {"up": "column", "down": "row", "embedding": "vocab"}
            tfdist.parallelize(model, plan | ({"attention": "column"} if attends else {}))
            model = tfdist.PipelineModel(model, num_microbatches=2)
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 12, (30, LENGTH)) for _ in range(2))
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2).history  # the last batch has 6 rows
    return {"history": history, **state(model), "predict": model.predict(x[:3], verbose=0) if attends else None}


@pytest.mark.parametrize(("zero_stage", "attends"), [(0, False), exhaustive(0, True), exhaustive(3, True)])
def test_a_model_that_a_plan_shards_before_it_is_in_a_pipeline(zero_stage, attends):
    strategy = strategy_on(4, pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=zero_stage)
    found = run(functools.partial(sharded_by_a_plan, attends=attends), strategy)
    assert_same_tree(found, run(functools.partial(sharded_by_a_plan, wraps=False, attends=attends), one_device()))


class OwnLoss:
    """A plain mean, a penalty of weights, and the loss that the model is compiled with."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        compiled = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        penalty = ops.sum(ops.square(self.get_layer("last").kernel))
        return compiled + ops.mean(ops.square(y_pred)) + 0.01 * penalty


class OneDevice(OwnLoss, keras.Model):
    pass


class Pipelined(OwnLoss, tfdist.PipelineModel):
    pass


class OfTheBatch(OwnLoss):
    """A loss and a metric that are no means over rows, and so none of what microbatches have."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return mean + ops.sqrt(ops.mean(ops.square(y_pred - y)))

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        object.__setattr__(self, "tracker", keras.metrics.Mean(name="root"))  # a model in a pipeline is built, and takes none

    @property
    def metrics(self):
        return [*super().metrics, self.tracker]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.tracker.update_state(ops.sqrt(ops.mean(ops.square(y_pred - y))), sample_weight=ops.shape(y)[0])
        return super().compute_metrics(x, y, y_pred, sample_weight)


class OneDeviceOfTheBatch(OfTheBatch, keras.Model):
    pass


class PipelinedOfTheBatch(OfTheBatch, tfdist.PipelineModel):
    pass


def own_loss(strategy, wraps=True, kinds=(OneDevice, Pipelined)):
    """`compute_loss` overridden in a subclass, with batches of uneven microbatches and sample weights."""
    one_device, pipelined = kinds
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = layers.Dense(6, "tanh", kernel_regularizer="l2")(inputs)
        outputs = layers.Dense(4, name="last")(hidden)
        model = pipelined(keras.Model(inputs, outputs), num_microbatches=3) if wraps else one_device(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 5)), rng.normal(size=(30, 4))
    weights = rng.random(30)
    history = model.fit(x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0, epochs=2).history
    return {"history": history, **state(model), "evaluate": model.evaluate(x, y, batch_size=11, verbose=0)}


def own_loss_alone(strategy):
    return own_loss(strategy, wraps=False)


def of_the_batch(strategy, wraps=True):
    return own_loss(strategy, wraps, (OneDeviceOfTheBatch, PipelinedOfTheBatch))


def of_the_batch_alone(strategy):
    return of_the_batch(strategy, wraps=False)


@pytest.mark.parametrize(
    ("data", "program", "alone"),
    [
        (1, own_loss, own_loss_alone),
        exhaustive(2, own_loss, own_loss_alone),
        exhaustive(1, of_the_batch, of_the_batch_alone),
        (2, of_the_batch, of_the_batch_alone),
    ],
)
def test_a_loss_of_ones_own(data, program, alone):
    strategy = strategy_on(2 * data, pipeline_parallel_size=2, zero_stage=0)
    assert_same_tree(run(program, strategy), on_one_device(alone))
