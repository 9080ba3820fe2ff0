"""Trains a GPT on a mesh of data x pipe x tensor ranks, and the same GPT on one device, from one seed.

    python examples/train_3d.py --devices 8 --pipeline-parallel-size 2 --tensor-parallel-size 2

                        stage 0: embeddings, first blocks     stage 1: last blocks, logits
                          tensor 0         tensor 1             tensor 0         tensor 1
    data 0                CPU:0            CPU:1                CPU:2            CPU:3        the first half of the batch
    data 1                CPU:4            CPU:5                CPU:6            CPU:7        the second half

Each rank holds its part of its stage's weights: here about a quarter of the model. Whole activations go from stage to stage,
since the blocks are cut inside only. The losses of the two runs, each as it was in its step, differ by rounding only. Where there
is no GPU the CPU is split in `--devices` logical devices.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras

import tfdist
import train_gpt
import train_pipeline
import train_tensor_parallel
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
from tfdist.layers import VocabParallelCrossentropy

MESH = "data x pipe x tensor"


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    train_gpt.add_arguments(parser)
    train_pipeline.add_arguments(parser)
    train_tensor_parallel.add_arguments(parser)
    parser.set_defaults(devices=8, pipeline_parallel_size=2, microbatches=4, zero_stage=1)
    parser.set_defaults(epochs=1, steps_per_epoch=60, out=pathlib.Path("out/train_3d"))
    args = parser.parse_args(argv)
    train_gpt.check_arguments(parser, args)
    train_tensor_parallel.check_arguments(parser, args)
    train_pipeline.check_arguments(parser, args, peers=args.tensor_parallel_size)
    return args


def main(argv=None):
    args = parse_args(argv)
    strategy = train_gpt.make_strategy(
        args.devices,
        args.logical_gpus,
        pipeline_parallel_size=args.pipeline_parallel_size,
        tensor_parallel_size=args.tensor_parallel_size,
        zero_stage=args.zero_stage,
    )
    tokens = load_tokens(args)
    keras.utils.set_random_seed(args.seed)
    plain = train_gpt.build_model(**shape_of(args))
    initial = weights_of(plain)

    with strategy.scope():
        model = tfdist.PipelineModel(
            train_tensor_parallel.build_parallel_model(**shape_of(args)),
            num_microbatches=args.microbatches,
            schedule=args.schedule,
            stages_per_rank=args.stages_per_rank,
        )
        copy_weights(initial, model, train_tensor_parallel.plain_path)
        optimizer = build_optimizer(args)
    print(train_pipeline.describe(strategy.mesh, model))

    curves = {ONE_DEVICE: train_one_device(plain, tokens, args)}
    curves[MESH] = train(MESH, model, optimizer, VocabParallelCrossentropy(from_logits=True), tokens, args)
    print(tfdist.memory_report(model))
    compare(curves, args.out)

    copy_weights(weights_of(model, train_tensor_parallel.plain_path), plain)  # both are whole from outside
    check_plain(plain, curves[MESH], tokens, args)
    print(f"loss curves and prepared text are in {args.out}")


if __name__ == "__main__":
    main()
