"""Trains on data of which every worker reads only its own part: even splits of a tensorflow-datasets data set.

    python -m tfdist run --workers 2 examples/split_input.py

`fit` on an ordinary dataset reads all of it on every worker and trains on each worker's rows, which is exact and simple. Where
reading is what takes the time, each worker can read its part instead. The parts may differ in length: a worker that has run
out takes part with empty batches until the last one is through, and the loss is that of all rows together.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras
import tensorflow as tf
import tensorflow_datasets as tfds

import stdlib_text
import tfdist
from train_gpt import build_loss, build_model


def windows_of(documents, *, seq_len, batch_size):
    """Cuts documents in windows of `seq_len + 1` bytes and batches them as `(inputs, next tokens)`, each `(batch, seq_len)`."""
    tokens = documents.flat_map(lambda d: tf.data.Dataset.from_tensor_slices(tf.io.decode_raw(d["text"], tf.uint8)))
    windows = tokens.batch(seq_len + 1, drop_remainder=True).batch(batch_size)
    return windows.map(lambda x: (tf.cast(x[:, :-1], tf.int32), tf.cast(x[:, 1:], tf.int32))).prefetch(2)


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--zero-stage", type=int, default=3, choices=range(4))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--documents", type=int, default=300, help="of the training split, over all workers")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of one step, over all workers")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/split_input"), help="folder of the data")
    args = parser.parse_args(argv)
    for name in ("epochs", "documents", "batch_size", "seq_len", "width"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be positive. Received: {getattr(args, name)}")
    return args


def main(argv=None):
    args = parse_args(argv)
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=args.zero_stage)
    is_chief = strategy.cluster is None or strategy.cluster.is_chief
    per_replica = args.batch_size // strategy.num_replicas_in_sync
    if per_replica * strategy.num_replicas_in_sync != args.batch_size:
        raise SystemExit(f"--batch-size {args.batch_size} must be divisible by {strategy.num_replicas_in_sync} devices")

    tfds.disable_progress_bar()
    builder = tfds.builder(stdlib_text.StdlibText.name, data_dir=args.out / "data")
    if is_chief:
        builder.download_and_prepare()
    strategy.barrier("the data set is prepared")
    builder = tfds.builder(stdlib_text.StdlibText.name, data_dir=args.out / "data")

    def own_part(context):
        """Called once on each worker; returns batches for one device of it."""
        parts = tfds.even_splits(f"train[:{args.documents}]", n=context.num_input_pipelines)
        part = parts[context.input_pipeline_id]
        print(f"worker {context.input_pipeline_id} of {context.num_input_pipelines} reads {part}", flush=True)
        return windows_of(builder.as_dataset(split=part), seq_len=args.seq_len, batch_size=per_replica)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(width=args.width, layers=2, heads=2, seq_len=args.seq_len)
        model.compile(keras.optimizers.AdamW(3e-3), loss=build_loss())
    data = strategy.distribute_datasets_from_function(own_part)
    history = model.fit(data, epochs=args.epochs, verbose="auto" if is_chief else 0)
    if is_chief:
        print(f"\nloss {history.history['loss'][-1]:.4f} after {model.optimizer.iterations.numpy()} steps")


if __name__ == "__main__":
    main()
