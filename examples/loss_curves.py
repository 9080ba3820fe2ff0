"""Trains one GPT on one device and in other ways, and says how far their losses are apart: what several examples share.

Every way starts from the same weights and sees the same batches, so losses differ by rounding only: of a number of float32,
half of 1.2e-7 and up.
"""

import time

import keras
import numpy as np
import tensorflow as tf

import train_gpt

ONE_DEVICE = "one device"
LOSS_TOLERANCE = 1e-5  # relative, of the first step's loss


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


def shape_of(args):
    """Returns the arguments of `train_gpt.build_model`."""
    return {"width": args.width, "layers": args.layers, "heads": args.heads, "seq_len": args.seq_len}


def load_tokens(args):
    """Makes the folder of the results, and returns the training and the validation text."""
    args.out.mkdir(parents=True, exist_ok=True)
    in_library = args.dataset == train_gpt.stdlib_text.StdlibText.name
    return train_gpt.load_tokens(args.dataset, args.out / "data" if in_library else None)


def make_datasets(tokens, args):
    return train_gpt.make_datasets(*tokens, seq_len=args.seq_len, batch_size=args.batch_size, seed=args.seed)


def build_optimizer(args):
    return train_gpt.build_optimizer(args.learning_rate, args.epochs * args.steps_per_epoch)


def copy_weights(weights, model, path_of=lambda path: path):
    """Assigns to each variable of `model` the array that `weights` has under its path, as `path_of` translates it."""
    for variable in model.variables:
        variable.assign(weights[path_of(variable.path)])


def weights_of(model, path_of=lambda path: path):
    return {path_of(variable.path): variable.numpy() for variable in model.variables}


def train(way, model, optimizer, loss, tokens, args):
    """Compiles and trains; returns the `StepLosses`: the loss of each step, and the validation loss before and after."""
    train_data, validation = make_datasets(tokens, args)
    print(f"\n{way}: {model.count_params():,} parameters", flush=True)
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


def train_one_device(model, tokens, args):
    """Trains a model that was built without a strategy."""
    optimizer = SummedAdamW.from_config(build_optimizer(args).get_config())
    optimizer.build(model.trainable_variables)  # or the first step, which would make slots, would be traced twice
    return train(ONE_DEVICE, model, optimizer, train_gpt.build_loss(), tokens, args)


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
    for (way, curve), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        above.plot(steps, curve.losses, style, label=way)
        if way != ONE_DEVICE:
            below.semilogy(steps, differences(curve.losses, reference) + 1e-9, style, label=way)
    above.set(ylabel="cross-entropy per byte (nats)", title=f"GPT on byte tokens: {', '.join(curves)}")
    below.set(xlabel="step", ylabel="relative difference from one device")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    train_gpt.pyplot.close(figure)


def compare(curves, out):
    """Prints the curves side by side and draws them to `loss.png` in `out`.

    Raises RuntimeError unless the first step's loss is that of one device: the same model, weights and batch.
    """
    print(f"\n{comparison(curves)}\n")
    for way, curve in curves.items():
        off = differences(curve.losses[:1], curves[ONE_DEVICE].losses[:1]).max()
        if not off <= LOSS_TOLERANCE:
            raise RuntimeError(f"The first loss of {way!r} is {off:.1e} from that of one device: not the same computation.")
    if train_gpt.pyplot is not None:
        plot(curves, out / "loss.png")


def check_plain(plain, curve, tokens, args):
    """Raises RuntimeError unless `plain`, which has been given the weights of the trained model, has its validation loss."""
    plain.compile(loss=train_gpt.build_loss())
    train_gpt.check_equal(curve.validation[-1][1], plain.evaluate(make_datasets(tokens, args)[1], verbose=0))
