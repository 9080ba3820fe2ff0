"""What the workers of the tests of data of different length run. One launch runs many cases."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training

Batches = list[list[int]]


def batches(first: int, rows: int, size: int) -> Batches:
    """Batches of `size` rows from row `first` on, of `rows` in all."""
    return [list(range(first, first + rows))[start : start + size] for start in range(0, rows, size)]


# What each part of the data has, by name: batches of one device each. Parts are taken by input pipelines in turn.
PARTS: dict[str, list[Batches]] = {
    "5 and 4": [batches(0, 18, 4), batches(18, 16, 4), batches(34, 3, 4)],
    "4 and 5": [batches(0, 16, 4), batches(16, 18, 4), batches(34, 20, 4)],
    "one is empty": [batches(0, 10, 4), [], batches(10, 4, 4)],
    "of full batches": [batches(0, 12, 4), batches(12, 8, 4), batches(20, 4, 4)],
    "validation": [batches(3, 5, 3), batches(8, 11, 3), batches(19, 1, 3)],
}


def global_batches(name: str, pipelines: int, devices: int) -> Batches:
    """The rows that the steps of a job have together: a device of a worker gets one batch of its part, while there are some."""
    parts = PARTS[name][:pipelines]
    per_step = [[part[step : step + devices] for step in range(0, len(part), devices)] for part in parts]
    return [
        [row for dealt in step for batch in dealt for row in batch] for step in itertools.zip_longest(*per_step, fillvalue=[])
    ]


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = training.vectors(54)
    return x, y, np.linspace(0.2, 1.5, 54).astype("float32")


def dataset_of(data: Batches, *, weighted: bool, known: bool, static: bool = False, sequences: bool = False) -> tf.data.Dataset:
    x, y, weights = rows()
    columns = (x, y, weights) if weighted else (x, y)
    specs = tuple(tf.TensorSpec((4 if static else None, *column.shape[1:]), column.dtype) for column in columns)
    made = tf.data.Dataset.from_generator(
        lambda: (tuple(column[batch] for column in columns) for batch in data), output_signature=specs
    )
    if sequences:
        made = made.map(lambda x, *others: (as_sequence(x), *others))
    return made.apply(tf.data.experimental.assert_cardinality(len(data))) if known else made


def as_sequence(x: tf.Tensor) -> tf.Tensor:
    """Repeats the features in each place of a sequence, whose length is another one in a partial batch."""
    return tf.tile(x[:, tf.newaxis, :], [1, 5 + tf.shape(x)[0], 1])


def of_sequences() -> keras.Model:
    """A model whose first layer bears no sequence of fewer than 5 places."""
    return keras.Sequential(
        [
            keras.Input((None, training.FEATURES)),
            keras.layers.Conv1D(6, 5, activation="tanh"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(training.CLASSES),
        ]
    )


def compiled(strategy: Any, sequences: bool = False, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = of_sequences() if sequences else training.small()
        model.compile(
            keras.optimizers.Adam(0.01),
            training.loss_function(),
            weighted_metrics=["accuracy"],
            metrics=["accuracy"],
            **arguments,
        )
    return model


def ask(strategy: Any, data: Callable[..., Any], case: dict[str, Any]) -> dict[str, Any]:
    """What `fit`, `evaluate` and `predict` make of the data of a case; `data(name, weighted=...)` makes them."""
    name, weighted = case["parts"], case.get("weighted", False)
    model = compiled(strategy, case.get("sequences", False), steps_per_execution=case.get("steps_per_execution", 1))
    found: dict[str, Any] = {}
    fitted = {"validation_data": data("validation", weighted=weighted)} if "fit" in case["asked"] else {}
    if "class_weight" in case:
        fitted["class_weight"] = case["class_weight"]
    if "fit" in case["asked"]:
        found["fit"] = model.fit(data(name, weighted=weighted), epochs=2, verbose=0, **fitted).history
        found["weights"] = model.get_weights()
        found["iterations"] = int(model.optimizer.iterations)
    if "evaluate" in case["asked"]:
        found["evaluate"] = model.evaluate(data(name, weighted=weighted), verbose=0, return_dict=True)
    if "predict" in case["asked"]:
        found["predict"] = model.predict(data(name, weighted=weighted), verbose=0)
    return found


def train_parts(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Goes through cases whose data each worker reads for itself."""
    found = []
    for case in cases:
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=case.get("zero_stage", 3), **case.get("settings", {}))

        def parts(name: str, *, weighted: bool, case: dict[str, Any] = case, strategy: Any = strategy) -> Any:
            def own_part(context: tf.distribute.InputContext) -> tf.data.Dataset:
                own = PARTS[name][context.input_pipeline_id]
                known = context.input_pipeline_id in case.get("known", (0, 1, 2))
                sequences = case.get("sequences", False)
                return dataset_of(own, weighted=weighted, known=known, static=name == "of full batches", sequences=sequences)

            return strategy.distribute_datasets_from_function(own_part)

        found.append(ask(strategy, parts, case))
        gc.freeze()  # as after every test: see conftest.py
    return found


# Data that every worker is given whole, and that ends early on the second.


def ends_early(is_second: bool, batches: int = 5, short: int = 3) -> Callable[[], Iterator[Any]]:
    x, y = training.vectors(8)

    def batch() -> Iterator[Any]:
        for _ in range(short if is_second else batches):
            yield x, y

    return batch


def from_generator(generator: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
    specs = (tf.TensorSpec((None, training.FEATURES)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(generator, output_signature=specs)


class Sequence(keras.utils.PyDataset):
    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return training.vectors(8)


def run_out(names: dict[str, Any], zero_stage: int) -> dict[str, str]:
    """Returns the message of the error of each way of giving data that end early on the second worker."""
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=zero_stage)
    is_second = strategy.cluster.worker_index == 1
    early = ends_early(is_second)
    whole = from_generator(ends_early(False))
    model = compiled(strategy)
    several = compiled(strategy, steps_per_execution=2)

    @tf.function
    def sums(batch: Any) -> Any:
        return strategy.run(lambda x, y: tf.reduce_sum(x), args=batch)

    def loop() -> None:
        for batch in strategy.experimental_distribute_dataset(from_generator(early)):
            sums(batch)

    def by_next() -> None:
        iterator = iter(strategy.experimental_distribute_dataset(from_generator(early)))
        for _ in range(5):
            sums(next(iterator))

    @tf.function
    def in_graph(data: Any) -> Any:
        total = tf.constant(0.0)
        for batch in data:
            total += strategy.reduce("SUM", strategy.run(lambda x, y: tf.reduce_sum(x), args=batch), axis=None)
        return total

    ways = {
        "fit": lambda: model.fit(from_generator(early), verbose=0),
        "the second epoch": lambda: model.fit(from_generator(short_in_epoch(2, is_second)), epochs=3, verbose=0),
        "generator": lambda: model.fit(early(), verbose=0),
        "steps": lambda: model.fit(early(), steps_per_epoch=5, verbose=0),
        "several steps": lambda: several.fit(from_generator(early), verbose=0),
        "evaluate": lambda: model.evaluate(from_generator(early), verbose=0),
        "predict": lambda: model.predict(from_generator(early), verbose=0),
        "several predictions": lambda: several.predict(from_generator(early), verbose=0),
        "validation": lambda: model.fit(whole, validation_data=from_generator(early), verbose=0),
        "empty": lambda: model.fit(from_generator(ends_early(is_second, short=0)), verbose=0),
        "sequence": lambda: model.fit(Sequence(3 if is_second else 5), verbose=0),
        "steps_per_epoch": lambda: model.fit(whole, steps_per_epoch=2 if is_second else 3, verbose=0),
        "loop": loop,
        "next": by_next,
        "in a graph": lambda: in_graph(strategy.experimental_distribute_dataset(from_generator(early))),
    }
    found = {}
    for name in names:
        try:
            ways[name]()
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"
    # What all workers have to the end is trained on, after all this.
    found["afterwards"] = str(round(model.fit(whole, verbose=0).history["loss"][0], 5))
    return found


def short_in_epoch(epoch: int, is_second: bool) -> Callable[[], Iterator[Any]]:
    """A generator that ends early on the second worker when it is begun for the time `epoch` (the first is 1)."""
    begun = itertools.count(1)

    def batch() -> Iterator[Any]:
        yield from ends_early(is_second and next(begun) == epoch)()

    return batch
