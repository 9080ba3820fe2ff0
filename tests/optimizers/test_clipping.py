"""By what a gradient is clipped, and by which factor: Keras's own on one device, over ranks by shards that count once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import integers, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.clipping import clip, global_factor, kind_of_clipping, norm_of
from tfdist.sharding import Layout, Shard, packing

SHAPES = [(5, 3), (2,), (7,)]  # the first and the last are padded on two ranks


@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_the_kind(kind):
    assert kind_of_clipping(keras.optimizers.SGD(**{kind: 0.5})) == kind
    assert kind_of_clipping(keras.optimizers.SGD(**{kind: 0.0})) is None
    assert kind_of_clipping(keras.optimizers.SGD()) is None


@pytest.mark.parametrize(("norm", "factor"), [(4.0, 0.5), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0), (np.inf, np.nan), (np.nan, np.nan)])
def test_the_global_factor(norm, factor):
    np.testing.assert_equal(float(global_factor(tf.constant(norm), 2)), factor)


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_shards_are_clipped_as_wholes(kind, zero_stage):
    strategy, rng = strategy_on(2, zero_stage=zero_stage), np.random.default_rng(0)
    wholes = [integers(rng, shape) for shape in SHAPES]
    limit = 3.0
    assert all(np.linalg.norm(whole) > limit for whole in wholes)
    data = {"data": Shard()} if zero_stage else {}
    layouts = [Layout(shape, strategy.mesh, **data) for shape in SHAPES]

    def on_rank():
        program = current_program("test")
        grads = [tf.constant(whole) for whole in wholes]
        if zero_stage:
            rank = program.mesh.coordinate(program.rank).data
            grads = [packing.data_shard(x, layout, rank, program.constant) for x, layout in zip(grads, layouts, strict=True)]
        clipped = clip(kind, limit, grads, layouts, strategy.sharding_config, program)
        return [*clipped, norm_of(grads, layouts, strategy.sharding_config, program)]

    expected = keras.optimizers.SGD(**{kind: limit})._clip_gradients([tf.constant(whole) for whole in wholes])
    ranks = run(strategy, on_rank)
    for place, one in enumerate(expected):
        parts = [rank[place].reshape(-1) for rank in ranks]
        found = np.concatenate(parts)[: one.shape.num_elements()] if zero_stage else parts[1]
        np.testing.assert_allclose(found, one.numpy().reshape(-1), rtol=1e-6)
    np.testing.assert_allclose([rank[-1] for rank in ranks], np.sqrt(sum((x**2).sum() for x in wholes)), rtol=1e-6)
    num_norms = (1 if kind == "clipvalue" else 2) if zero_stage else 0
    assert strategy.last_plan.counts().get("all_reduce", 0) == num_norms
