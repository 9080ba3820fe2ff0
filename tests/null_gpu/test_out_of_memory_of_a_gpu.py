"""A GPU that runs out of memory: null GPUs compute nothing, but their memory is real, and so is TensorFlow's allocator."""

import pytest

from tests.null_gpu.running import Machine

PROGRAM = """
import keras
import tensorflow as tf
import tfdist
from tests.null_gpu.running import report

strategy = tfdist.ShardedStrategy(zero_stage=1)
with strategy.scope():
    inputs = x = keras.Input((160,))
    for index in range(6):
        block = keras.Sequential([keras.layers.Dense(640, "gelu"), keras.layers.Dense(160)], name=f"block_{index}")
        x = x + block(x)
    model = keras.Model(inputs, keras.layers.Dense(7)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.optimizer.build(model.trainable_variables)
rows = 65536  # 168 MB for each of the widest tensors, of which a block keeps several
x = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([rows, 160]))
y = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([rows], tf.int32))

@tf.function(autograph=False)
def step(x, y):
    return strategy.run(lambda x, y: model.train_step((x, y)), (x, y))

try:
    step(x, y)
except tf.errors.ResourceExhaustedError as error:
    report("message", str(error))
    report("notes", error.__notes__)
"""


@pytest.mark.exhaustive
def test_the_error_says_what_filled_it(null_gpus):
    ended = null_gpus(Machine(2, bytes=1 << 30), ["-c", PROGRAM], 1, 240)
    assert ended.codes == [0] and ended.results[0], ended.outputs[0][-3000:]
    message = ended.results[0]["message"]  # by which operation was the first to find no memory
    assert "OOM when allocating tensor" in message or "failed to allocate memory" in message, message
    (note,) = ended.results[0]["notes"]
    lines = [" ".join(line.split()) for line in note.splitlines()]
    assert lines[0].startswith("tfdist: GPU:") and "It held" in lines[0] and lines[0].endswith(" more.")
    assert lines[1].startswith("activations and buffers") and lines[1].endswith("the most")
    told = [line.partition(" about ")[0] for line in lines if " about " in line]
    assert "half the batch" in told[:2], note
