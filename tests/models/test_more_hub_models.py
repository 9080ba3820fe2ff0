"""More of KerasHub's backbones, sharded by the plan that is suggested, at stage 3 and in pipelines, beside one device.

XLNet is not among them: on one device its outputs depend on the number of examples in a batch.
"""

import functools

import keras
import pytest
from grids import exhaustive
from training import one_device, strategy_for

import tfdist
from tests.models import families, more_families
from tests.models.ways import suggested_where_links_are_fast
from tests.parity.comparison import assert_same_tree, state

WAYS = {
    "stage 3": (2, {"zero_stage": 3}),
    "tensor 2": (2, {"zero_stage": 0, "tensor_parallel_size": 2}),
    "pipeline 2": (2, {"zero_stage": 0, "pipeline_parallel_size": 2}),
}
# Microbatches are normalized one by one: not as one device does, but as one that is fed microbatches (docs/pipeline.md).
NORMALIZED = ("DenseNet", "MobileNet", "ResNet", "Xception")
CASES = [(name, way) for name in more_families.BACKBONES for way in WAYS if way != "pipeline 2" or name not in NORMALIZED]


def train(strategy, name, way=None):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = more_families.data(name)
    with strategy.scope():
        model = more_families.build(name)
        x = more_families.fitting_inputs(model, x)
        if way == "tensor 2":
            tfdist.parallelize(model, suggested_where_links_are_fast(model), print_fn=None)
        if way == "pipeline 2":
            model = tfdist.PipelineModel(model, num_microbatches=2)
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), families.loss())
    losses = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(x, y, batch_size=families.BATCH, shuffle=False, verbose=0, callbacks=[record])
    return {"losses": losses, **state(model)}


@functools.cache
def on_one_device(name):
    return train(one_device(), name)


@pytest.mark.parametrize(("name", "way"), [exhaustive(*case) for case in CASES])
def test_it_is_one_device(name, way):
    devices, settings = WAYS[way]
    # A norm behind a table of small numbers makes much of their rounding.
    assert_same_tree(train(strategy_for(devices, **settings), name, way), on_one_device(name), f"{name}, {way}", rtol=5e-5)
