"""Which outputs stay local: all that must be gathered is, and a pair computes what the model does."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from plan_models import GatedMLP, chain, decoder, example_gpt, subclassed, with_raw_ops

from tfdist.extensions.tensor.plans import resolve, sharded_axes


def paired(model, plan, ranks=2):
    """Returns the names of the layers whose output stays local, and of those whose input is local."""
    shardings = resolve(model, plan, ranks)
    local = {sharding.layer.name for sharding in shardings if sharding.role == "column" and not sharding.gather_output}
    return local, {sharding.layer.name for sharding in shardings if sharding.input_is_parallel}


PLAN = {"up": "column", "down": "row"}


def functional(between, features=8, plan=PLAN, **settings):
    """`down(between(up(x), x))`."""
    x = keras.Input((features,))
    y = between(layers.Dense(8, name="up", **settings)(x), x)
    return paired(keras.Model(x, layers.Dense(4, name="down")(y)), plan)


PAIRED = ({"up"}, {"down"})
APART = (set(), set())


@pytest.mark.parametrize(
    "between",
    [
        lambda y, x: y,
        lambda y, x: layers.Activation("gelu")(y),
        lambda y, x: layers.Dropout(0.1)(ops.relu(y)),
        lambda y, x: 0.5 * y * ops.sigmoid(y) + 1.0,
        lambda y, x: y / np.float32(3.0),
        lambda y, x: ops.cast(y, "float32"),
        lambda y, x: layers.Multiply()([y, layers.ReLU()(y)]),
        lambda y, x: keras.activations.silu(y),
    ],
)
def test_elementwise_steps_keep_a_pair(between):
    assert functional(between) == PAIRED


@pytest.mark.parametrize(
    "between",
    [
        lambda y, x: y + x,
        lambda y, x: y * x[:, :1],
        lambda y, x: layers.LayerNormalization()(y),
        lambda y, x: ops.softmax(y),
        lambda y, x: layers.Dense(8, name="other")(y),
        lambda y, x: y * np.arange(8, dtype="float32"),
        lambda y, x: ops.flip(y, axis=1),
        lambda y, x: ops.split(y, 2, axis=-1)[0],
        lambda y, x: ops.reshape(ops.reshape(y, (-1, 2, 4)), (-1, 8)),
        lambda y, x: y + ops.mean(y),
        lambda y, x: layers.Dropout(0.1, noise_shape=(None, 1))(y),
    ],
)
def test_other_steps_part_it(between):
    assert functional(between) == APART


@pytest.mark.parametrize("settings", [{"activation": "softmax"}, {"activity_regularizer": "l2"}])
def test_the_layers_own_activation_counts(settings):
    assert functional(lambda y, x: y, **settings) == APART
    assert functional(lambda y, x: y, activation="gelu") == PAIRED


def test_any_other_use_gathers():
    x = keras.Input((8,))
    y = layers.Dense(8, name="up")(x)
    z = layers.Dense(4, name="down")(y)
    assert paired(keras.Model(x, z), PLAN) == PAIRED
    assert paired(keras.Model(x, [z, y]), PLAN) == APART  # an output of the model
    assert paired(keras.Model(x, [z, layers.Dense(4, name="other")(y)]), PLAN) == APART
    assert paired(keras.Model(x, [z, layers.Dense(4, name="down_too")(y)]), PLAN) == ({"up"}, {"down", "down_too"})


def test_only_roles_that_fit_are_paired():
    model = chain(8, 8, 8, 8)
    column, row = "column", "row"

    def plan(*roles):
        return {f"dense_{i}": role for i, role in enumerate(roles)}

    assert paired(model, plan(column, row, column, row)) == ({"dense_0", "dense_2"}, {"dense_1", "dense_3"})
    assert paired(model, plan(column, column, row, row)) == ({"dense_1"}, {"dense_2"})
    assert paired(model, plan(row, column, column, "replicate")) == APART
    assert paired(model, plan("replicate", column, row, column)) == ({"dense_1"}, {"dense_2"})


def test_gates_and_sums_of_local_outputs():
    x = keras.Input((8,))
    parts = [layers.Dense(8, name=name)(x) for name in ("up", "gate", "third")]
    down = layers.Dense(4, name="down")
    whole = {"up|gate|third": "column", "down": "row"}
    names = {"up", "gate", "third"}
    model = keras.Model(x, down(parts[0] * ops.silu(parts[1]) + parts[2]))
    assert paired(model, whole) == (names, {"down"})
    # One that is whole makes all whole.
    assert paired(model, {"third": "replicate", **whole}) == APART
    assert paired(model, {"third": "row", **whole}) == APART


def test_shared_layers_are_paired_in_all_uses_or_none():
    up, down = layers.Dense(8, name="up"), layers.Dense(8, name="down")
    x = keras.Input((8,))
    once = down(up(x))
    assert paired(keras.Model(x, down(up(once))), PLAN) == PAIRED
    assert paired(keras.Model(x, down(once)), PLAN) == APART  # `down` gets a whole input too
    assert paired(keras.Model(x, up(up(once))), PLAN) == APART  # `up` is read by `up`
    other = layers.Dense(8, name="down_too")
    # `down` is mixed, so `up` is gathered, for `down_too` as well.
    assert paired(keras.Model(x, [down(x), down(up(x)), other(up(x))]), PLAN) == APART


def test_one_layer_gathered_parts_its_gate_from_others():
    """`gate` is needed whole, so the product is whole, so `up` must be gathered too: decided in several rounds."""
    x = keras.Input((8,))
    up, gate = layers.Dense(8, name="up")(x), layers.Dense(8, name="up_gate")(x)
    z = layers.Dense(4, name="down")(up * gate)
    assert paired(keras.Model(x, z), PLAN) == ({"up", "up_gate"}, {"down"})
    assert paired(keras.Model(x, [z, ops.softmax(gate)]), PLAN) == APART


def test_training_and_inference_must_agree():
    def call(made, x, training):
        y = made[0](x)
        return made[1](y if training else ops.softmax(y))

    made = layers.Dense(8, name="up"), layers.Dense(4, name="down")
    assert paired(subclassed(call, *made, example=ops.ones((2, 8)), training=True), PLAN) == APART


def test_cut_axes_must_meet():
    x = keras.Input((5, 8))
    heads = layers.EinsumDense("abc,cde->abde", (None, 4, 6), name="up")(x)
    merged = layers.EinsumDense("abde,def->abf", (None, 3), name="down")(heads)
    assert paired(keras.Model(x, merged), PLAN) == PAIRED
    other_axis = layers.EinsumDense("abde,edf->abf", (None, 3), name="down")(heads)  # shards e, the second of the axes
    assert paired(keras.Model(x, other_axis), PLAN) == APART
    last = layers.Dense(6, name="down")(heads)  # shards the last axis
    assert paired(keras.Model(x, last), PLAN) == APART
    flat = layers.Dense(8, name="up")(x)
    assert paired(keras.Model(x, layers.EinsumDense("...x,xy->...y", 6, name="down")(flat)), PLAN) == PAIRED


def test_models():
    local, parallel = paired(example_gpt(), {"attention$": "column", "mlp_in|logits": "column", "mlp_out": "row"})
    assert local - {"logits"} == {f"block_{i}_{name}" for i in range(2) for name in ("attention", "mlp_in")}
    assert "logits" not in local
    assert parallel == {"block_0_mlp_out", "block_1_mlp_out"}
    assert paired(decoder(), {"gate|up|head": "column", "down": "row"}) == ({"gate", "up"}, {"down"})


def test_what_cannot_be_followed_is_not_paired():
    plan = {"first|up": "column", "second|down": "row"}
    assert paired(with_raw_ops(), plan) == PAIRED  # and not `first` and `second`


# A pair computed in parts, one rank after the other.


def rank_of(layer, x, role, rank, ranks):
    """What one rank computes of a Dense or EinsumDense: its part, before the bias of a row."""
    axes = sharded_axes(layer, role)
    kernel = np.split(np.asarray(layer.kernel), ranks, axes.kernel)[rank]
    equation = layer.equation if isinstance(layer, layers.EinsumDense) else "...x,xy->...y"
    y = ops.einsum(equation, x, kernel)
    if role == "column" and layer.bias is not None:
        bias = np.asarray(layer.bias)
        y = y + (bias if axes.bias is None else np.split(bias, ranks, axes.bias)[rank])
    return y if role == "row" else layer.activation(y)


def in_parts(monkeypatch, model, plan, x, ranks):
    """Calls a model that ends in its only row layer once per rank, and sums."""
    total = 0
    for rank in range(ranks):
        with monkeypatch.context() as patch:
            for sharding in resolve(model, plan, ranks):
                assert not sharding.gather_output and sharding.input_is_parallel == (sharding.role == "row")
                call = lambda x, layer=sharding.layer, role=sharding.role, rank=rank: rank_of(layer, x, role, rank, ranks)  # noqa: E731
                patch.setattr(sharding.layer, "call", call)
                if sharding.role == "row":
                    patch.setattr(sharding.layer, "input_spec", None)  # it pins the whole input
                    last = sharding.layer
            total = total + model(x)
    return np.asarray(total) + np.asarray(last.bias)


def gated():
    x = keras.Input((5, 8))
    return keras.Model(x, GatedMLP(8, 12, name="mlp")(x))


def heads():
    x = keras.Input((5, 8))
    y = layers.EinsumDense("abc,cde->abde", (None, 4, 6), bias_axes="de", activation="gelu", name="up")(x)
    return keras.Model(x, layers.EinsumDense("abde,def->abf", (None, 3), bias_axes="f", name="down")(y * 3.0))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [gated, heads])
def test_the_parts_of_a_pair_sum_to_the_model(monkeypatch, make, ranks):
    model = make()
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    x = rng.normal(size=(3, 5, 8)).astype("float32")
    expected = np.asarray(model(x))
    parts = in_parts(monkeypatch, model, {"gate|up": "column", "down": "row"}, x, ranks)
    np.testing.assert_allclose(parts, expected, rtol=1e-4, atol=1e-4)
