"""Signatures of data, which two workers compare: do they read the same data in the same order?

A signature lists the transformations of a dataset from its end to its sources, without running it:

    dataset                        element_spec, cardinality, deterministic     the whole
    BatchDataset                   batch_size, drop_remainder
    RandomUniform in MapDataset    seed, seed2                                  an op that draws, in the function of the map
    MapDataset                     functions, tables, floats                    a checksum of the function's ops, and digests of
                                                                                what it has captured
    ShuffleDataset                 buffer_size, seed, seed2, ...
    TensorSliceDataset             element_spec, cardinality, head, floats      a source, with a checksum of its first values
                                                                                and a digest of all

Note: seeds
    TensorFlow derives two numbers from the global seed (`keras.utils.set_random_seed`) and an op's own `seed` when the op or the
    dataset is *built*. If workers build their ops in the same order after the same `set_random_seed`, these numbers are the same
    on every worker; an extra random op on one worker shifts those of all ops that follow, which the signature shows. With neither
    seed both numbers are 0, and the op asks the operating system when it runs: then no two workers agree.

Note: what is not seen
    A signature does not show Python code (generators, `py_function`); the state of a `tf.random.Generator` or of Keras's random
    layers; integers that a function captures; `interleave(deterministic=False)`; the choices of `choose_from_datasets`, which
    TensorFlow hides in a `VariantDataset`; how often a dataset was iterated before (each iteration moves its reshuffling on);
    random ops in a parallel `map`, which draw in the order in which they happen to run.

The walk through a dataset reads private attributes of TensorFlow's objects: `_inputs`, `_functions` and `_ATTRIBUTES` of
datasets, `_functions` of graphs. Of a dataset that lacks an attribute the signature lists the others, so a name that TensorFlow
changes goes unnoticed here; tests/data/test_signature.py notices.
"""

import itertools
import json
import posixpath
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.data.comparison import Digest, digest_of, is_same
from tfdist.data.tables import digests_of_tables

_Values = dict[str, Any]
# What can be told about the elements of a dataset and their order without running it: the lines of the list above, pairs of a
# name and what is known of it by attribute; as JSON about a kilobyte for ten transformations. Two different ones prove that
# workers read different datasets; two equal ones do not prove equal data.
Signature = list[list[Any]]

# Attributes of dataset objects on which the elements or their order depend, where they are known before the data comes.
_ATTRIBUTES = """
    _seed _seed2 _buffer_size _reshuffle_each_iteration _rerandomize
    _batch_size _batch_sizes _drop_remainder _size _shift _stride
    _count _num_shards _index _start _stop _step
    _cycle_length _block_length _deterministic _stop_on_empty_dataset
""".split()

# Datasets that pass every element on, in order: workers may differ in them.
_TRANSPARENT = {"PrefetchDataset", "OptionsDataset"}

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}  # operations that call it

_HEAD_VALUES = 64  # so many values of a source, or of a constant, are compared


def dataset_signature(dataset: tf.data.Dataset) -> Signature:
    """Lists what the elements of `dataset` and their order depend on; raises ValueError for what is no `tf.data.Dataset`.

    Making a signature takes milliseconds: nothing is iterated, and of data in memory only the first values are read. Of a kind of
    dataset that this module does not know, the signature has the name only.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise errors.value_error("`dataset` must be a `tf.data.Dataset`.", dataset=dataset)
    spec, is_deterministic = str(dataset.element_spec), dataset.options().deterministic
    whole = _known(element_spec=spec, cardinality=dataset.cardinality(), deterministic=is_deterministic)
    return json.loads(json.dumps([("dataset", whole), *_walk(dataset)]))  # with lists, as another worker's or a stored one


def unseeded(signature: Signature) -> list[str]:
    """Returns the parts of a dataset that shuffle or draw at random without any seed, like "ShuffleDataset(buffer_size=1024)".

    They differ on every worker. `keras.utils.set_random_seed(...)` before the dataset is built, or a `seed` argument, seeds them.
    """
    return [
        _text(name, {key: values[key] for key in ("buffer_size",) if key in values})
        for name, values in signature
        if values.get("seed") == values.get("seed2") == 0 and values.get("buffer_size") != 1  # a buffer of 1 keeps the order
    ]


def unordered(signature: Signature) -> list[str]:
    """Returns the parts of a dataset that may yield their elements in another order on each run (`deterministic=False`).

    They look like "ParallelMapDataset(deterministic='false')"; "dataset(...)" stands for `tf.data.Options.deterministic`.
    """
    return [
        _text(name, {"deterministic": values["deterministic"]})
        for name, values in signature
        if values.get("deterministic") in (False, "false")
    ]


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether Python code makes, or computes, elements of `dataset`: a signature does not show what they are."""
    return any(op.type in _PYTHON for node in transformations(dataset) for op in operations_of(node))


def transformations(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields `dataset`, its last transformation, and all that it reads from: each dataset before its inputs, these in order.

    One dataset that is used twice, as in `zip((a, a))`, comes twice, and what it reads from once.
    """
    seen: set[int] = set()
    waiting = [dataset]  # a stack of our own: datasets built in a loop are deeper than Python's
    while waiting:
        node, _ = unwrapped(waiting.pop())
        yield node
        if id(node) not in seen:
            seen.add(id(node))
            waiting += reversed(inputs_of(node))


def difference(mine: Signature, theirs: Signature) -> str | None:
    """Returns the first difference of two signatures in words ("here" is `mine`, "there" is `theirs`), None if they are equal."""
    for one, other in itertools.zip_longest(mine, theirs):
        if one == other:
            continue
        if one is None or other is None or one[0] != other[0]:
            here, there = (_text(*entry) if entry else "nothing more" for entry in (one, other))
            return f"{here} here, {there} there"
        name, mine_, theirs_ = one[0], one[1], other[1]
        for key in dict.fromkeys([*mine_, *theirs_]):
            here, there = mine_.get(key), theirs_.get(key)
            may_be_same = key == "floats" and (here is None or there is None or is_same(here, there))
            if here != there and not may_be_same:
                return f"{name}: {key}={here!r} here, {key}={there!r} there"
    return None


def _text(name: str, values: _Values) -> str:
    inside = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return f"{name}({inside})" if inside else name


def _walk(dataset: tf.data.Dataset) -> Iterator[tuple[str, _Values]]:
    seen: set[int] = set()
    for node in transformations(dataset):
        inputs, name = inputs_of(node), unwrapped(node)[1]
        if id(node) in seen:
            yield name, {"again": True}
            continue
        seen.add(id(node))
        if name in _TRANSPARENT:
            continue
        operations = operations_of(node)
        for op in operations:
            seeds = _seeds(op)
            if seeds is not None:
                yield f"{op.type} in {name}", _known(**seeds)
        values = {attribute.lstrip("_"): getattr(node, attribute, None) for attribute in _ATTRIBUTES}
        if operations:
            values["functions"] = _checksum(sorted(map(_description, operations)))
            values |= _captured(node)
        if len(inputs) > 1:
            values["num_inputs"] = len(inputs)
        if not inputs:
            values |= {"element_spec": str(node.element_spec), "cardinality": node.cardinality(), **_values_of(node)}
        yield name, _known(**values)


def unwrapped(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, str]:
    """Returns the last transformation of a dataset, and its name."""
    while isinstance(dataset, tf.compat.v1.data.Dataset) and hasattr(dataset, "_dataset"):
        dataset = dataset._dataset  # the v1 face of a dataset
    return dataset, type(dataset).__name__.lstrip("_")


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns what one transformation reads from."""
    inputs = list(dataset._inputs())
    files = getattr(dataset, "_filenames", None)
    if not inputs and isinstance(files, tf.data.Dataset):  # some readers keep them apart
        return [files]
    return inputs


def operations_of(dataset: tf.data.Dataset) -> list[tf.Operation]:
    """Returns the operations of the functions that one transformation applies."""
    return [op for function in dataset._functions() for op in _operations(function.function)]


def _known(**values: Any) -> _Values:
    """Returns the values as Python's own, without those that are None or known at run time only."""
    plain = {}
    for name, value in values.items():
        if tf.is_tensor(value):
            value = tf.get_static_value(value)
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if value is not None:
            plain[name] = value
    return plain


def _values_of(source: tf.data.Dataset) -> _Values:
    """Returns a checksum of the first values of a source in memory, and a digest of its floats; None where there are none.

    The checksum is of integers and strings, the file names, labels and tokens, which are equal bit for bit when they are equal;
    floats may differ in the last bit between machines. Of paths the last part counts: folders may be mounted elsewhere.
    """
    head: list[Any] = []
    floats: Digest = []
    for tensor in (x for x in getattr(source, "_tensors", ())[:_HEAD_VALUES] if hasattr(x, "numpy")):
        with tf.init_scope(), tf.device(tensor.device):  # whatever scope is around: read now, copy nothing to a device
            if tensor.dtype.is_floating:
                floats += digest_of([tensor])
            elif tensor.dtype.is_integer or tensor.dtype == tf.string:
                head += tf.reshape(tensor, [-1])[: _HEAD_VALUES - len(head)].numpy().tolist()
    head = [posixpath.basename(value) if isinstance(value, bytes) else value for value in head]
    return {"head": _checksum(head) if head else None, "floats": floats or None}


def _captured(dataset: tf.data.Dataset) -> _Values:
    """Returns what is known of the tables and constants that the functions of one transformation have captured."""
    graphs = [function.function.graph for function in dataset._functions() if hasattr(function.function, "graph")]
    arrays = [
        x for graph in graphs for x, _ in getattr(graph, "captures", ()) if isinstance(x, tf.Tensor) and hasattr(x, "numpy")
    ]
    return {
        "tables": [digest for graph in graphs for digest in digests_of_tables(graph)] or None,
        "floats": digest_of([x for x in arrays if x.dtype.is_floating]) or None,
    }


def _checksum(values: list[Any]) -> int:
    return zlib.crc32(repr(values).encode())


def _operations(function: Any) -> Iterator[tf.Operation]:
    """Yields the ops of a traced function and of the functions that it calls."""
    seen: set[str] = set()
    waiting = [function]
    while waiting:
        function = waiting.pop()
        graph = getattr(function, "graph", None)
        if graph is None or function.name in seen:
            continue
        seen.add(function.name)
        yield from graph.get_operations()
        waiting += reversed(graph._functions.values())


def _description(op: tf.Operation) -> str:
    """Returns the type of `op`, and its value if it is a small integer constant: sizes, seeds, indices."""
    if op.type == "Const":
        (constant,) = op.outputs
        size = constant.shape.num_elements()
        if constant.dtype.is_integer and size is not None and size <= _HEAD_VALUES:
            return f"Const {tf.get_static_value(constant).tolist()}"
    if op.type == "Bucketize":
        return f"Bucketize {[f'{boundary:.3g}' for boundary in op.get_attr('boundaries')]}"
    return op.type


def _seeds(op: tf.Operation) -> _Values | None:
    """Returns `seed` and `seed2` of an op that has both; None for others, such as the stateless random ops."""
    definition = op.op_def
    if {"seed", "seed2"} <= {attribute.name for attribute in definition.attr}:
        return {name: op.get_attr(name) for name in ("seed", "seed2")}
    arguments = [argument.name for argument in definition.input_arg]
    if {"seed", "seed2"} <= set(arguments) and len(arguments) == len(op.inputs):  # datasets inside a function
        return {name: op.inputs[arguments.index(name)] for name in ("seed", "seed2")}
    return None
