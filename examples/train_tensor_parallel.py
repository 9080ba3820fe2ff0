"""Trains the GPT of `train_gpt.py` on a mesh of data x tensor ranks, and the same GPT on one device, from one seed.

    python examples/train_tensor_parallel.py --devices 4 --tensor-parallel-size 2

                      tensor 0         tensor 1
    data 0            heads 0, 1       heads 2, 3        the first half of the batch
    data 1            heads 0, 1       heads 2, 3        the second half

Three ways, which all start from the same weights and see the same batches:

    one device        plain Keras
    parallel layers   a GPT built of `tfdist.layers`
    parallelize       the plain GPT, cut in place by `tfdist.parallelize` and a plan

Their losses, each as it was in its step, differ by rounding only. Where there is no GPU the CPU is split in `--devices` logical
devices.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras

import tfdist
import train_gpt
from loss_curves import (
    ONE_DEVICE,
    build_optimizer,
    check_plain,
    compare,
    copy_weights,
    load_tokens,
    shape_of,
    train,
    train_one_device,
    weights_of,
)
from tfdist.layers import ColumnParallelDense, ParallelTransformerBlock, VocabParallelCrossentropy, VocabParallelEmbedding

PLAN = {
    r"token_embedding$": "vocab",
    r"attention$": "column",
    r"mlp_in$": "column",
    r"mlp_out$": "row",
    r"logits$": "column",
}
LAYERS, PARALLELIZE = "parallel layers", "parallelize"


def build_parallel_model(*, width, layers, heads, seq_len):
    """Returns the GPT of `train_gpt.build_model`, made of parallel layers; without a strategy they are Keras's."""
    tokens = keras.Input((seq_len,), dtype="int32", name="tokens")
    x = VocabParallelEmbedding(train_gpt.VOCAB_SIZE, width, name="token_embedding")(tokens)
    x = train_gpt.PositionEmbedding(name="position_embedding")(x)
    for i in range(layers):
        x = ParallelTransformerBlock(heads, 4 * width, epsilon=1e-3, name=f"block_{i}")(x)  # Keras's epsilon of a norm
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    # Each rank keeps the logits of its part of the vocabulary: the loss is computed on them as they are.
    logits = ColumnParallelDense(train_gpt.VOCAB_SIZE, gather_output=False, name="logits")(x)
    return keras.Model(tokens, logits, name="parallel_gpt")


def plain_path(path):
    """Returns the path in the plain GPT of a weight of the parallel one.

    block_0/attention/query/kernel    block_0_attention/query/kernel
    block_0/mlp/up/kernel             block_0_mlp_in/kernel
    """
    for theirs, ours in (("/mlp/up/", "_mlp_in/"), ("/mlp/down/", "_mlp_out/"), ("/attention", "_attention"), ("/mlp_", "_mlp_")):
        if path.startswith("block_"):
            path = path.replace(theirs, ours, 1)
    return path


def add_arguments(parser):
    """Adds the flag of tensor parallelism."""
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks that share each layer")


def check_arguments(parser, args):
    """Ends the program, with the reason, where the sizes do not fit."""
    size = args.tensor_parallel_size
    if args.devices % size:
        parser.error(f"argument --devices: {args.devices} must be divisible by --tensor-parallel-size {size}")
    if args.heads % size:
        parser.error(f"argument --heads: {args.heads} must be divisible by --tensor-parallel-size {size}")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    train_gpt.add_arguments(parser)
    add_arguments(parser)
    parser.set_defaults(devices=4, zero_stage=2, epochs=1, layers=2, steps_per_epoch=60)
    parser.set_defaults(out=pathlib.Path("out/train_tensor_parallel"))
    args = parser.parse_args(argv)
    train_gpt.check_arguments(parser, args)
    check_arguments(parser, args)
    data_ranks = args.devices // args.tensor_parallel_size
    if args.batch_size % data_ranks:
        parser.error(f"argument --batch-size: {args.batch_size} must be divisible by {data_ranks} data ranks")
    return args


def main(argv=None):
    args = parse_args(argv)
    settings = {"tensor_parallel_size": args.tensor_parallel_size, "zero_stage": args.zero_stage}
    strategy = train_gpt.make_strategy(args.devices, args.logical_gpus, **settings)
    tokens = load_tokens(args)
    curves = {}
    keras.utils.set_random_seed(args.seed)
    plain = train_gpt.build_model(**shape_of(args))
    initial = weights_of(plain)
    mesh = strategy.mesh
    print(f"mesh: {mesh.data_parallel_size} data x {mesh.tensor_parallel_size} tensor ranks, ZeRO stage {args.zero_stage}")
    curves[ONE_DEVICE] = train_one_device(plain, tokens, args)

    with strategy.scope():
        parallel = build_parallel_model(**shape_of(args))
        copy_weights(initial, parallel, plain_path)
        optimizer = build_optimizer(args)
    curves[LAYERS] = train(LAYERS, parallel, optimizer, VocabParallelCrossentropy(from_logits=True), tokens, args)
    print(tfdist.memory_report(parallel))

    with strategy.scope():
        parallelized = train_gpt.build_model(**shape_of(args))
        copy_weights(initial, parallelized)
        tfdist.parallelize(parallelized, PLAN)
        optimizer = build_optimizer(args)
    curves[PARALLELIZE] = train(PARALLELIZE, parallelized, optimizer, train_gpt.build_loss(), tokens, args)
    print(tfdist.memory_report(parallelized))

    compare(curves, args.out)

    # What is saved is whole: the plain model loads it, without a strategy.
    parallelized.save_weights(args.out / "parallelize.weights.h5")
    plain.load_weights(args.out / "parallelize.weights.h5")
    check_plain(plain, curves[PARALLELIZE], tokens, args)
    copy_weights(weights_of(parallel, plain_path), plain)
    check_plain(plain, curves[LAYERS], tokens, args)
    print(f"weights, loss curves and prepared text are in {args.out}")


if __name__ == "__main__":
    main()
