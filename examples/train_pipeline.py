"""Trains the GPT of `train_gpt.py` in a pipeline, each device with some of its layers, and on one device, from one seed.

    python examples/train_pipeline.py --devices 4 --schedule 1f1b --microbatches 8

    CPU:0  stage 0: embeddings, first blocks ─> CPU:1  stage 1 ─> CPU:2  stage 2 ─> CPU:3  stage 3: last blocks, logits

With more devices than `--pipeline-parallel-size` there are several pipelines, and each trains on its part of the batch. The
losses of the two runs, each as it was in its step, differ by rounding only. Where there is no GPU the CPU is split in `--devices`
logical devices.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras

import tfdist
import train_gpt
from loss_curves import ONE_DEVICE, build_optimizer, check_plain, compare, load_tokens, shape_of, train, train_one_device

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
PIPELINE = "pipeline"


def add_arguments(parser):
    """Adds the flags of a pipeline."""
    parser.add_argument("--pipeline-parallel-size", type=int, help="ranks of a pipeline; all devices unless given")
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    parser.add_argument("--microbatches", type=int, default=8, help="parts that each pipeline's batch is cut in")
    parser.add_argument("--stages-per-rank", type=int, default=1, help="2 or more for the interleaved schedule")


def check_arguments(parser, args, peers=1):
    """Ends the program, with the reason, where the sizes do not fit; `peers`: ranks that share a stage."""
    replica = peers * args.pipeline_parallel_size
    if args.devices % replica:
        parser.error(f"argument --devices: {args.devices} must be divisible by {replica}, the ranks of a replica")
    replicas = args.devices // replica
    if args.batch_size % (args.microbatches * replicas):
        parser.error(
            f"argument --batch-size: {args.batch_size} must be divisible by {args.microbatches * replicas}: "
            f"--microbatches {args.microbatches} of {replicas} data ranks"
        )


def describe(mesh, model):
    """Returns the sizes of a mesh, a model's stages, and the grid of its schedule with what it costs, as text."""
    simulation = tfdist.pipeline.simulate(model.schedule)
    held = ", ".join(f"{simulation.peak_microbatches(rank):g}" for rank in range(model.schedule.num_ranks))
    return (
        f"mesh: {mesh.data_parallel_size} data x {mesh.pipeline_parallel_size} pipe x {mesh.tensor_parallel_size} tensor ranks\n"
        f"{model.stage_report()}\n"
        f"{model.schedule}\n"
        f"idle / busy time: {simulation.bubble_fraction:.1%}; microbatches whose activations each rank holds: {held}"
    )


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    train_gpt.add_arguments(parser)
    add_arguments(parser)
    parser.set_defaults(devices=4, zero_stage=2, epochs=1, steps_per_epoch=60, out=pathlib.Path("out/train_pipeline"))
    args = parser.parse_args(argv)
    if args.pipeline_parallel_size is None:
        args.pipeline_parallel_size = args.devices
    train_gpt.check_arguments(parser, args)
    check_arguments(parser, args)
    return args


def main(argv=None):
    args = parse_args(argv)
    settings = {"pipeline_parallel_size": args.pipeline_parallel_size, "zero_stage": args.zero_stage}
    strategy = train_gpt.make_strategy(args.devices, args.logical_gpus, **settings)
    tokens = load_tokens(args)

    keras.utils.set_random_seed(args.seed)  # after the data: preparing it draws random numbers
    with strategy.scope():
        model = tfdist.PipelineModel(
            train_gpt.build_model(**shape_of(args)),
            num_microbatches=args.microbatches,
            schedule=args.schedule,
            stages_per_rank=args.stages_per_rank,
        )
        optimizer = build_optimizer(args)
    print(describe(strategy.mesh, model))

    keras.utils.set_random_seed(args.seed)  # the same initial weights
    plain = train_gpt.build_model(**shape_of(args))
    curves = {ONE_DEVICE: train_one_device(plain, tokens, args)}
    curves[PIPELINE] = train(PIPELINE, model, optimizer, train_gpt.build_loss(), tokens, args)
    print(tfdist.memory_report(model))
    compare(curves, args.out)

    model.save_weights(args.out / "gpt.weights.h5")  # the file of the model inside: the plain one loads it
    plain = train_gpt.build_model(**shape_of(args))
    plain.load_weights(args.out / "gpt.weights.h5")
    check_plain(plain, curves[PIPELINE], tokens, args)
    print(f"weights, loss curves and prepared text are in {args.out}")


if __name__ == "__main__":
    main()
