"""How many messages a step sends, and how many bytes: exactly, for every stage, read from the graph that runs."""

import collections
import itertools
import math

import keras
import pytest
import tensorflow as tf
import test_models
from grids import exhaustive
from training import JoinedWeights, strategy_for

from tests.devices import is_on
from tfdist.collectives.transports.transport import Transport
from tfdist.sharding import gradients_in_flight, shard_messages

WIDTHS = [33, 65, 31, 17]  # weights 33x65, 65x31, 31x17 and their biases
LAYERS = len(WIDTHS) - 1
SIZES = [size for n, m in zip(WIDTHS, WIDTHS[1:], strict=False) for size in (n * m, m)]
PRODUCTS = ("MatMul", "Einsum")  # the second where tfdist's kernels are not used: on GPUs
GROUPS = [(n * m, m) for n, m in zip(WIDTHS, WIDTHS[1:], strict=False)]


def build():
    return keras.Sequential([keras.Input((WIDTHS[0],)), *(keras.layers.Dense(m, activation="tanh") for m in WIDTHS[1:])])


def traced_step(strategy, build=build, train=True, **settings):
    """Returns the graph of one step and the strategy's plan of it."""
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
        optimizer.build(model.trainable_variables)

    def rank_step(x):
        if not train:
            return model(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(lambda x: strategy.run(rank_step, args=(x,)))
    graph = step.get_concrete_function(tf.zeros((6, *model.input_shape[1:]))).graph
    return graph, strategy.last_plan


def collectives_of(graph, rank=0):
    """Returns, per collective kind, the elements of each message that `rank` puts into it, in graph order."""
    found = collections.defaultdict(list)
    for operation in graph.get_operations():
        if operation.type.startswith("Collective") and is_on(operation, rank):
            found[operation.type].append(math.prod(operation.inputs[0].shape))
    return dict(found)


def shard(size, devices):
    return -(-size // devices)


def packed(group, devices):
    return sum(shard(size, devices) for size in group)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_stage_0_is_one_all_reduce_of_everything(devices):
    graph, _ = traced_step(strategy_for(devices, 0))
    for rank in range(devices):
        assert collectives_of(graph, rank) == {"CollectiveReduceV2": [sum(SIZES)]}


@pytest.mark.parametrize(
    ("zero_stage", "devices"),
    [(stage, n) if (stage + n) % 2 else exhaustive(stage, n) for stage in (1, 2) for n in (2, 3, 4)],
)
def test_stages_1_and_2_are_one_reduce_scatter_and_one_all_gather(zero_stage, devices):
    graph, plan = traced_step(strategy_for(devices, zero_stage))
    everything = packed(SIZES, devices)
    for rank in range(devices):
        assert collectives_of(graph, rank) == {
            "CollectiveAllToAllV2": [devices * everything],
            "CollectiveGatherV2": [everything],
        }
    # Both halves together move what one all-reduce moves, but for the padding.
    padding = devices * everything - sum(SIZES)
    assert 0 <= padding < devices * len(SIZES)
    assert plan.sent_bytes() == pytest.approx(2 * 4 * (sum(SIZES) + padding) * (devices - 1) / devices)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_buckets_of_about_bucket_bytes(zero_stage):
    """The gradients go last layer first; a bucket is closed before it would pass `bucket_bytes`."""
    bucket_bytes = 4 * 2100
    buckets, filled = [[]], 0
    for size in reversed(SIZES):
        if buckets[-1] and 4 * (filled + size) > bucket_bytes:
            buckets, filled = [*buckets, []], 0
        buckets[-1].append(size)
        filled += size
    assert len(buckets) > 1
    found = collectives_of(traced_step(strategy_for(2, zero_stage, bucket_bytes=bucket_bytes))[0])
    if zero_stage == 0:
        assert found == {"CollectiveReduceV2": [sum(bucket) for bucket in buckets]}
    else:
        assert found == {
            "CollectiveAllToAllV2": [2 * packed(bucket, 2) for bucket in buckets],
            "CollectiveGatherV2": [packed(bucket, 2) for bucket in buckets],
        }


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_stage_2_holds_two_buckets_of_full_gradients(zero_stage):
    """With `zero_stage` 2 a gradient waits until the bucket two before its own is reduced; with 1 nothing waits."""
    _check_waiting(zero_stage, lambda operation: operation.get_attr("transpose_a"))


def test_stage_2_holds_products_whose_results_are_rearranged():
    _check_waiting(2, lambda operation: _sizes(operation) == [19, 19], _deep_projections)


def _check_waiting(zero_stage, is_of_kernel, build=None):
    """Asserts that the products which form a kernel's gradient wait for the reduction of the bucket two before."""
    depth = 6
    graph, _ = traced_step(strategy_for(2, zero_stage, bucket_bytes=4 * (19 * 19 + 19)), lambda: (build or _deep)(depth))
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0)]
    reductions = [op for op in on_rank_0 if op.type == "CollectiveAllToAllV2"]
    of_kernels = [op for op in on_rank_0 if op.type in PRODUCTS and "gradient_tape" in op.name and is_of_kernel(op)]
    assert len(reductions) == depth
    assert len(of_kernels) == depth
    for k, operation in enumerate(of_kernels):
        if k >= 2:
            assert _waits_for(operation, reductions[k - 2]) == (zero_stage == 2)
            assert not _waits_for(operation, reductions[k - 1])


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("clipnorm", [None, 1.0])
def test_stage_2_gathers_parameters_between_the_reductions(zero_stage, clipnorm):
    """Each bucket when the gradients of the next two have been reduced; if the norm of all is wanted, after all, as stage 1."""
    strategy, depth = strategy_for(2, zero_stage, bucket_bytes=4 * (19 * 19 + 19)), 4
    _, plan = traced_step(strategy, lambda: _deep(depth), global_clipnorm=clipnorm)
    reductions, gathers = ([f"{op}/bucket_{k}" for k in range(depth)] for op in ("reduce_scatter", "all_gather"))
    between = [*reductions[:2], *itertools.chain(*zip(reductions[2:], gathers, strict=False)), *gathers[-2:]]
    order = [record.label for record in plan.records[0]]
    if clipnorm is None and zero_stage == 2:
        assert order == between
    else:
        assert order == [*reductions, *["global_norm"] * (clipnorm is not None), *gathers]


@pytest.fixture
def as_in_memory(monkeypatch):
    """Gradients wait as large ones do where ranks meet in memory."""
    monkeypatch.setattr(gradients_in_flight, "_LARGE_BYTES", 0)
    monkeypatch.setattr(Transport, "holds_thread", True)


def test_stage_2_holds_one_bucket_of_full_gradients_in_memory(as_in_memory):
    """A gradient waits until the bucket before its own is reduced, and the one before that is updated and gathered."""
    depth = 6
    graph, _ = traced_step(strategy_for(2, 2, bucket_bytes=4 * (19 * 19 + 19)), lambda: _deep(depth))
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0)]
    reductions = [op for op in on_rank_0 if op.type == "CollectiveAllToAllV2"]
    gathers = [op for op in on_rank_0 if op.type == "CollectiveGatherV2"]
    of_kernels = _kernel_gradients(on_rank_0)
    assert len(reductions) == len(gathers) == len(of_kernels) == depth
    for k, operation in enumerate(of_kernels):
        assert not _waits_for(operation, reductions[k])
        assert k < 1 or _waits_for(operation, reductions[k - 1])
        assert k < 2 or _waits_for(operation, gathers[k - 2])
        assert k < 1 or not _waits_for(operation, gathers[k - 1])


def test_stage_3_holds_one_full_gradient_in_memory(as_in_memory):
    depth = 6
    graph, _ = traced_step(strategy_for(2, 3), lambda: _deep(depth))
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0)]
    reductions = [op for op in on_rank_0 if op.type == "CollectiveAllToAllV2"]
    of_kernels = _kernel_gradients(on_rank_0)
    assert len(reductions) == len(of_kernels) == depth
    for k, operation in enumerate(of_kernels):
        assert not _waits_for(operation, reductions[k])
        assert k < 1 or _waits_for(operation, reductions[k - 1])


def test_stage_3_drops_a_layer_before_its_full_gradient_is_made():
    """The product that forms a kernel's gradient waits for the one that reads the kernel."""
    _check_drops(_deep)


def test_stage_3_drops_a_layer_whose_gradient_is_rearranged():
    _check_drops(_deep_projections)


def _check_drops(build):
    graph, _ = traced_step(strategy_for(2, 3), lambda: build(6))
    on_rank_0 = [op for op in graph.get_operations() if is_on(op, 0)]
    readers = [op for op in on_rank_0 if op.type in PRODUCTS and "gradient_tape" in op.name and _sizes(op) == [6, 19]]
    readers = [op for op in readers if op.outputs[0].consumers()]  # an `Einsum` has both gradients
    of_kernels = [op for op in on_rank_0 if op.type in PRODUCTS and _sizes(op) == [19, 19]]
    assert len(of_kernels) == len(readers) + 1  # the first layer's input needs no gradient
    for reader, operation in zip(readers, of_kernels, strict=False):
        assert reader in operation.control_inputs


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_waiting_closes_no_circle_with_the_collectives_of_layers(as_in_memory, zero_stage):
    """Those of backward stand on the chain before the reductions, and take what gradients are made of."""
    strategy = strategy_for(2, zero_stage, bucket_bytes=4 * 100)

    def build():
        kinds = [keras.layers.Conv1D(5, 3), keras.layers.BatchNormalization(synchronized=True)] * 3
        layers = [type(layer).from_config(layer.get_config() | {"name": f"layer_{k}"}) for k, layer in enumerate(kinds)]
        return keras.Sequential([keras.Input((11, 4)), *layers, keras.layers.Flatten(), keras.layers.Dense(3)])

    graph, _ = traced_step(strategy, build)
    order, waiting = set(), graph.get_operations()
    while waiting:
        free = [op for op in waiting if all(before.name in order for before in _before(op))]
        assert free, f"{len(waiting)} operations wait for each other"
        order.update(op.name for op in free)
        waiting = [op for op in waiting if op.name not in order]


def _sizes(operation):
    """Returns the sizes of the axes of what `operation` makes, but for those of one element."""
    return [size for size in operation.outputs[0].shape if size != 1]


def _before(operation):
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _kernel_gradients(operations):
    """Returns the products that form kernels' gradients, the last layer's first."""
    return [op for op in operations if op.type == "MatMul" and "gradient_tape" in op.name and op.get_attr("transpose_a")]


@pytest.mark.parametrize(
    ("prefetch", "devices"),
    [(at, n) if (at + n) % 3 == 2 else exhaustive(at, n) for at in (0, 1, 2) for n in (2, 3, 4)],
)
def test_stage_3_gathers_each_layer_once_a_direction(devices, prefetch):
    """Forward: every layer. Backward: the kernels that the gradient of the input passes, but for the last layer's.

    The first layer's input needs no gradient, so its kernel is not gathered again; the last layer's is still there; biases are
    never read in backward.
    """
    graph, plan = traced_step(strategy_for(devices, 3, prefetch=prefetch))
    forward = [packed(group, devices) for group in GROUPS]
    backward = [shard(kernel, devices) for kernel, _ in reversed(GROUPS[1:-1])]
    scattered = [devices * packed(group, devices) for group in reversed(GROUPS)]
    for rank in range(devices):
        assert collectives_of(graph, rank) == {
            "CollectiveGatherV2": forward + backward,
            "CollectiveAllToAllV2": scattered,
        }
    gathered = 4 * (sum(forward) + sum(backward)) * (devices - 1)
    assert plan.sent_bytes() == pytest.approx(gathered + 4 * sum(scattered) * (devices - 1) / devices)
    assert plan.sent_bytes() <= 3 * 4 * (sum(SIZES) + devices * len(SIZES)) * (devices - 1) / devices


def test_stage_3_without_reshard_gathers_once():
    found = collectives_of(traced_step(strategy_for(2, 3, reshard_after_forward=False))[0])
    assert found == {
        "CollectiveGatherV2": [packed(group, 2) for group in GROUPS],
        "CollectiveAllToAllV2": [2 * packed(group, 2) for group in reversed(GROUPS)],
    }


def test_stage_3_order_of_messages():
    """The way back interleaves: a layer is gathered before the gradient of the one after it is reduced."""
    plan = traced_step(strategy_for(2, 3, prefetch=1), lambda: _deep(5))[1]
    order = [record.label for record in plan.records[0]]
    assert order == [
        *(f"unshard/layer_{k}" for k in range(5)),
        "unshard/layer_3/backward",
        "reduce_scatter/layer_4",
        "unshard/layer_2/backward",
        "reduce_scatter/layer_3",
        "unshard/layer_1/backward",
        "reduce_scatter/layer_2",
        "reduce_scatter/layer_1",
        "reduce_scatter/layer_0",
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_holds_at_most_prefetch_plus_1_layers(prefetch):
    """Every gather waits for the readers of the layer `prefetch + 1` gathers before it, in both directions."""
    depth = 8
    graph, _ = traced_step(strategy_for(2, 3, prefetch=prefetch), lambda: _deep(depth))
    gathers = [op for op in graph.get_operations() if op.type == "CollectiveGatherV2" and is_on(op, 0)]
    forward, backward = gathers[:depth], gathers[depth:]
    assert len(backward) == depth - 2
    products = [op for op in graph.get_operations() if op.type == "MatMul" and is_on(op, 0)]
    forward_products = [op for op in products if "gradient_tape" not in op.name]
    for k in range(prefetch + 1, depth):
        assert _waits_for(forward[k], forward_products[k - prefetch - 1]), k
    # Backward gathers layers depth-2, ..., 1; the last layer is kept and takes the first place.
    input_products = [op for op in products if "gradient_tape" in op.name and op.get_attr("transpose_b")]
    assert len(input_products) == depth - 1
    for i in range(len(backward)):
        released = i - prefetch  # place i + 1 waits for place i - prefetch
        if released >= 0:
            assert _waits_for(backward[i], input_products[released]), i
        assert _waits_for(backward[i], forward_products[-1]), i


@pytest.mark.parametrize(
    ("group_bytes", "groups"),
    [
        (0, [[0], [1], [2]]),
        (4 * sum(GROUPS[1] + GROUPS[2]), [[0], [1, 2]]),  # as large as two layers, and exactly full
        (4 * sum(GROUPS[0] + GROUPS[1]), [[0, 1], [2]]),
        (2**20, [[0, 1, 2]]),
    ],
)
def test_small_layers_are_gathered_together(group_bytes, groups):
    """In the order in which they were made, up to `group_bytes`; the last group is kept, the first needs kernel 1 alone again."""
    found = collectives_of(traced_step(strategy_for(2, 3, group_bytes=group_bytes))[0])
    forward = [sum(packed(GROUPS[layer], 2) for layer in group) for group in groups]
    again = [[layer for layer in group if layer > 0] for group in reversed(groups[:-1])]
    backward = [sum(shard(GROUPS[layer][0], 2) for layer in layers) for layers in again if layers]
    assert found == {"CollectiveGatherV2": forward + backward, "CollectiveAllToAllV2": [2 * size for size in reversed(forward)]}


def test_large_variables_travel_alone(monkeypatch):
    """Here each kernel but the last; biases, and a kernel that is small, are packed."""
    monkeypatch.setattr(shard_messages, "LARGE_BYTES", 4 * GROUPS[1][0])
    found = collectives_of(traced_step(strategy_for(2, 3, group_bytes=4 * sum(GROUPS[1] + GROUPS[2])))[0])
    (kernel_0, bias_0), (kernel_1, bias_1), (kernel_2, bias_2) = GROUPS
    first, second = [[kernel_0], [bias_0]], [[kernel_1], [bias_1, kernel_2, bias_2]]
    assert found["CollectiveGatherV2"] == [packed(message, 2) for message in first + second]
    assert found["CollectiveAllToAllV2"] == [2 * packed(message, 2) for message in reversed(first + second)]


def test_layers_of_other_dtypes_are_gathered_apart():
    """A group is gathered once for each dtype that its layers compute in: they are all of one."""
    layers = [keras.layers.Dense(19, dtype=dtype) for dtype in ("float32", "float32", "mixed_float16", "float32")]
    plan = traced_step(strategy_for(2, 3, group_bytes=2**20), lambda: keras.Sequential([keras.Input((19,)), *layers]))[1]
    gathers = [record for record in plan.records[0] if record.op == "all_gather" and "backward" not in record.label]
    sizes = [(record.dtype, math.prod(record.shape)) for record in gathers]
    layer = packed([19 * 19, 19], 2)
    assert sizes == [("float32", 2 * layer), ("float16", layer), ("float32", layer)]


def test_stage_3_leaves_no_forward_copy_to_backward():
    graph, _ = traced_step(strategy_for(2, 3), lambda: _deep(6))
    names = [f"layer_{k}" for k in range(5)]
    for operation in graph.get_operations():
        if operation.type == "MatMul" and "gradient_tape" in operation.name and operation.get_attr("transpose_b"):
            source = operation.inputs[1].op.name
            if any(f"/{name}/" in source for name in names):
                assert "backward" in source, (operation.name, source)


def test_frozen_layers_are_gathered_and_not_reduced():
    def build_frozen():
        model = build()
        model.layers[0].trainable = False
        return model

    found = collectives_of(traced_step(strategy_for(2, 3), build_frozen)[0])
    assert found["CollectiveAllToAllV2"] == [2 * packed(group, 2) for group in reversed(GROUPS[1:])]


def test_inference_gathers_each_layer_once():
    for zero_stage in (0, 1, 2):
        assert collectives_of(traced_step(strategy_for(2, zero_stage), train=False)[0]) == {}
    found = collectives_of(traced_step(strategy_for(2, 3), train=False)[0])
    assert found == {"CollectiveGatherV2": [packed(group, 2) for group in GROUPS]}


def test_reduce_dtype_halves_the_reduced_bytes():
    graph, plan = traced_step(strategy_for(2, 2, reduce_dtype="float16"))
    assert collectives_of(graph) == collectives_of(traced_step(strategy_for(2, 2))[0])
    dtypes = {record.op: record.dtype for record in plan.records[0]}
    assert dtypes == {"reduce_scatter": "float16", "all_gather": "float32"}


def _deep(depth):
    layers = [keras.layers.Dense(19, activation="tanh", name=f"layer_{k}") for k in range(depth)]
    return keras.Sequential([keras.Input((19,)), *layers])


def _deep_projections(depth=6):
    """As `_deep`, of layers whose kernels have a third axis: their gradients are products whose shape is changed."""
    layers = [[keras.layers.EinsumDense("ab,bcd->acd", (1, 19), "tanh", "cd"), keras.layers.Flatten()] for _ in range(depth)]
    return keras.Sequential([keras.Input((19,)), *itertools.chain(*layers)])


def _waits_for(operation, other):
    """Whether `operation` can only run after `other`, by data or control dependencies."""
    seen, open_ = set(), [operation]
    while open_:
        here = open_.pop()
        if here.name == other.name:
            return True
        if here.name in seen:
            continue
        seen.add(here.name)
        open_ += _before(here)
    return False


def _collectives_in_functions(graph):
    """Returns the collective operations in the bodies of loops, branches and nested functions."""
    functions = graph.as_graph_def().library.function
    return [node.op for function in functions for node in function.node_def if node.op.startswith("Collective")]


def test_every_normalisation_is_gathered_again():
    """Each has a gradient function of our own, which reads its scale, but for the first, whose input is not trained, and the
    last, which is kept."""
    norms = [layer for _ in range(4) for layer in (keras.layers.LayerNormalization(), keras.layers.Dense(15))]
    graph, plan = traced_step(strategy_for(2, 3), lambda: keras.Sequential([keras.Input((15,)), *norms]))
    assert plan.counts() == {"all_gather": 8 + 6, "reduce_scatter": 8}


def test_kernels_change_no_message():
    build = test_models.MODELS["attention"]
    found = [collectives_of(traced_step(strategy_for(2, 3, use_kernels=use), build)[0]) for use in (True, False)]
    assert found[0] == found[1]
    assert len(found[0]["CollectiveGatherV2"]) == 8 + 6


def test_weights_read_in_loops_are_gathered_once_outside():
    """Two recurrent layers and a head: gathered once forward, and once backward but for the head, which is still there."""
    model = [keras.layers.LSTM(13, return_sequences=True), keras.layers.GRU(11), keras.layers.Dense(7)]
    graph, plan = traced_step(strategy_for(2, 3), lambda: keras.Sequential([keras.Input((7, 15)), *model]))
    assert plan.counts() == {"all_gather": 5, "reduce_scatter": 3}
    assert sum(op.type == "CollectiveGatherV2" for op in graph.get_operations()) == 2 * 5
    assert _collectives_in_functions(graph) == []


def test_weights_that_a_layer_joins_are_gathered_again():
    """As Keras joins those of LSTM and GRU for cuDNN. The first layer's are read for its inner product, the last's are kept."""
    layers = [JoinedWeights(), JoinedWeights(), JoinedWeights()]
    graph, plan = traced_step(strategy_for(2, 3), lambda: keras.Sequential([keras.Input((15,)), *layers]))
    assert plan.counts() == {"all_gather": 3 + 2, "reduce_scatter": 3}
    products = [op for op in graph.get_operations() if op.type == "MatMul" and "gradient_tape" in op.name]
    read = [x for op in products for x in op.inputs if x.shape == (15, 15)]
    assert len(read) == 2 * 5 and sum("_again" in x.op.name for x in read) == 2 * 3


def test_reshaped_and_transposed_weights_are_gathered_again():
    """Normalisation and attention reshape their weights before use: what backward holds is a view, and no forward copy.

    The block is 7 groups (two normalisations, query, key, value, output, dense). Of 8 groups with the head, the first needs no
    gradient of its input and the last is kept.
    """
    graph, plan = traced_step(strategy_for(2, 3), test_models.MODELS["attention"])
    assert plan.counts() == {"all_gather": 8 + 6, "reduce_scatter": 8}
    assert _collectives_in_functions(graph) == []
