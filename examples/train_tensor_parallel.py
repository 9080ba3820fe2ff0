"""Trains the GPT of `train_gpt.py` on a mesh of data x tensor ranks, and the same GPT on one device, from one seed.

    python examples/train_tensor_parallel.py --devices 4 --tensor-parallel-size 2

                      tensor 0         tensor 1
    data 0            heads 0, 1       heads 2, 3        the first half of the batch
    data 1            heads 0, 1       heads 2, 3        the second half

Three ways, which all start from the same weights and see the same batches:

    one device        plain Keras
    parallel layers   a GPT built of `tfdist.layers`
    parallelize       the plain GPT, cut in place by `tfdist.parallelize` and a plan

Their losses, each as it was in its step, differ by rounding only: of a number of float32, half of 1.2e-7 and up. Where there is
no GPU the CPU is split in `--devices` logical devices.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf

import tfdist
import train_gpt
from tfdist.layers import ColumnParallelDense, ParallelTransformerBlock, VocabParallelCrossentropy, VocabParallelEmbedding

PLAN = {
    r"token_embedding$": "vocab",
    r"attention$": "column",
    r"mlp_in$": "column",
    r"mlp_out$": "row",
    r"logits$": "column",
}
ONE_DEVICE, LAYERS, PARALLELIZE = "one device", "parallel layers", "parallelize"
LOSS_TOLERANCE = 1e-5  # relative, of the first step's loss


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


def copy_weights(weights, model, path_of=lambda path: path):
    """Assigns to each variable of `model` the array that `weights` has under its path, as `path_of` translates it."""
    for variable in model.variables:
        variable.assign(weights[path_of(variable.path)])


def weights_of(model, path_of=lambda path: path):
    return {path_of(variable.path): variable.numpy() for variable in model.variables}


class SummedAdamW(keras.optimizers.AdamW):
    """AdamW that takes an embedding's gradient as one tensor, summed over repeated tokens.

    tfdist always does. Keras on one device squares repeated rows one by one, which would be another optimizer.
    """

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


class StepLosses(train_gpt.Progress):
    """Keeps the loss of every step as it is. The differences of Keras's running mean are coarser than what is compared."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.seconds.append(time.perf_counter())


def train(model, optimizer, loss, train_data, validation, args):
    """Compiles and trains; returns the `StepLosses`: the loss of each step, and the validation loss before and after."""
    model.compile(optimizer, loss=loss)
    progress = StepLosses(args.batch_size * args.seq_len)
    progress.validation.append((0, model.evaluate(validation, verbose=0)))
    model.fit(
        train_data,
        epochs=args.epochs,
        steps_per_epoch=args.steps_per_epoch,
        validation_data=validation,
        shuffle=False,  # the data set shuffles itself, alike in each run
        callbacks=[progress],
        verbose=0,
    )
    return progress


def differences(losses, reference):
    """Returns the relative difference of each step's loss from that of `reference`."""
    return np.abs(np.array(losses) / np.array(reference) - 1)


def comparison(curves):
    """Returns the curves side by side, with the largest relative difference of a step's loss from the first, as text."""
    reference = curves[ONE_DEVICE].losses
    steps = len(reference)
    shown = sorted({0, *range(9, steps, max(10, steps // 100 * 10)), steps - 1})
    rows = [["step", *curves]]
    rows += [[str(step + 1), *(f"{curve.losses[step]:.6f}" for curve in curves.values())] for step in shown]
    rows += [["validation", *(f"{curve.validation[-1][1]:.6f}" for curve in curves.values())]]
    off = {way: differences(curve.losses, reference) for way, curve in curves.items()}
    rows.append(["off by at most", *("-" if way == ONE_DEVICE else f"{off[way].max():.1e}" for way in curves)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def plot(curves, path):
    """Draws the training loss of every way, and how far each is from one device, to a PNG at `path`."""
    figure, (above, below) = train_gpt.pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    reference = curves[ONE_DEVICE].losses
    steps = range(1, len(reference) + 1)
    for (way, curve), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        above.plot(steps, curve.losses, style, label=way)
        if way != ONE_DEVICE:
            below.semilogy(steps, differences(curve.losses, reference) + 1e-9, style, label=way)
    above.set(ylabel="cross-entropy per byte (nats)", title="GPT on byte tokens: one device and tensor-parallel")
    below.set(xlabel="step", ylabel="relative difference from one device")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    train_gpt.pyplot.close(figure)


def check_same_start(curves):
    """Raises RuntimeError unless the first step's loss is that of one device: the same model, weights and batch."""
    for way, curve in curves.items():
        off = differences(curve.losses[:1], curves[ONE_DEVICE].losses[:1]).max()
        if not off <= LOSS_TOLERANCE:
            raise RuntimeError(f"The first loss of {way!r} is {off:.1e} from that of one device: not the same computation.")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    train_gpt.add_arguments(parser)
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks that share each layer")
    parser.set_defaults(devices=4, zero_stage=2, epochs=1, layers=2, steps_per_epoch=60)
    parser.set_defaults(out=pathlib.Path("out/train_tensor_parallel"))
    args = parser.parse_args(argv)
    train_gpt.check_arguments(parser, args)
    size = args.tensor_parallel_size
    if args.devices % size:
        parser.error(f"argument --devices: {args.devices} must be divisible by --tensor-parallel-size {size}")
    if args.heads % size:
        parser.error(f"argument --heads: {args.heads} must be divisible by --tensor-parallel-size {size}")
    if args.batch_size % (args.devices // size):
        parser.error(f"argument --batch-size: {args.batch_size} must be divisible by {args.devices // size} data ranks")
    return args


def main(argv=None):
    args = parse_args(argv)
    settings = {"tensor_parallel_size": args.tensor_parallel_size, "zero_stage": args.zero_stage}
    strategy = train_gpt.make_strategy(args.devices, **settings)
    args.out.mkdir(parents=True, exist_ok=True)
    in_library = args.dataset == train_gpt.stdlib_text.StdlibText.name
    tokens = train_gpt.load_tokens(args.dataset, args.out / "data" if in_library else None)
    shape = {"width": args.width, "layers": args.layers, "heads": args.heads, "seq_len": args.seq_len}

    def optimizer():
        return train_gpt.build_optimizer(args.learning_rate, args.epochs * args.steps_per_epoch)

    def run(way, model, optimizer, loss):
        data = train_gpt.make_datasets(*tokens, seq_len=args.seq_len, batch_size=args.batch_size, seed=args.seed)
        print(f"\n{way}: {model.count_params():,} parameters", flush=True)
        curves[way] = train(model, optimizer, loss, *data, args)
        return model

    curves = {}
    keras.utils.set_random_seed(args.seed)
    plain = train_gpt.build_model(**shape)
    initial = weights_of(plain)
    mesh = strategy.mesh
    print(f"mesh: {mesh.data_parallel_size} data x {mesh.tensor_parallel_size} tensor ranks, ZeRO stage {args.zero_stage}")
    run(ONE_DEVICE, plain, SummedAdamW.from_config(optimizer().get_config()), train_gpt.build_loss())

    with strategy.scope():
        model = build_parallel_model(**shape)
        copy_weights(initial, model, plain_path)
        made = optimizer()
    parallel = run(LAYERS, model, made, VocabParallelCrossentropy(from_logits=True))
    print(tfdist.memory_report(parallel))

    with strategy.scope():
        model = train_gpt.build_model(**shape)
        copy_weights(initial, model)
        tfdist.parallelize(model, PLAN)
        made = optimizer()
    parallelized = run(PARALLELIZE, model, made, train_gpt.build_loss())
    print(tfdist.memory_report(parallelized))

    print(f"\n{comparison(curves)}\n")
    check_same_start(curves)
    if train_gpt.pyplot is not None:
        plot(curves, args.out / "loss.png")

    # What is saved is whole: the plain model loads it, without a strategy.
    _, validation = train_gpt.make_datasets(*tokens, seq_len=args.seq_len, batch_size=args.batch_size, seed=args.seed)
    parallelized.save_weights(args.out / "parallelize.weights.h5")
    plain.load_weights(args.out / "parallelize.weights.h5")
    train_gpt.check_equal(curves[PARALLELIZE].validation[-1][1], plain.evaluate(validation, verbose=0))
    copy_weights(weights_of(parallel, plain_path), plain)
    train_gpt.check_equal(curves[LAYERS].validation[-1][1], plain.evaluate(validation, verbose=0))
    print(f"weights, loss curves and prepared text are in {args.out}")


if __name__ == "__main__":
    main()
