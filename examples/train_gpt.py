"""Trains a small GPT with its parameters, gradients and optimizer state sharded over the devices (ZeRO).

    python examples/train_gpt.py --devices 2 --zero-stage 3
    python -m tfdist run --workers 4 examples/train_gpt.py      # the same as a job of four processes

The model, the loss, the optimizer and `fit` are plain Keras: what tfdist needs is the strategy around them. Where there
is no GPU the CPU is split in `--devices` logical devices; in a TF_CONFIG job the devices are those of all workers. The
text is the Python documentation that is already on this machine (`stdlib_text.py`), one token per byte; `--dataset` names
any other tensorflow-datasets text instead. At the end the weights are loaded into the same model without a strategy,
which must give the same validation loss.
"""

import argparse
import math
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

import stdlib_text
import tfdist

try:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot
except ImportError:
    pyplot = None

VOCAB_SIZE = 256  # one token per byte
MAX_TOKENS = 32_000_000  # of a larger data set, the first so many
VALIDATION_BATCHES = 20


@keras.saving.register_keras_serializable("train_gpt")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector per position: `Y[b, s] = X[b, s] + P[s]`."""

    def build(self, input_shape):
        _, seq_len, width = input_shape
        self.embeddings = self.add_weight(name="embeddings", shape=(seq_len, width), initializer="uniform")

    def call(self, inputs):
        return inputs + self.embeddings


def build_model(*, width, layers, heads, seq_len):
    """Returns a GPT decoder: tokens `(batch, seq_len)` to logits `(batch, seq_len, VOCAB_SIZE)`.

    Pre-LN blocks: `x = x + attention(norm(x)); x = x + mlp(norm(x))`, with a causal mask.
    """
    tokens = keras.Input((seq_len,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCAB_SIZE, width, name="token_embedding")(tokens)
    x = PositionEmbedding(name="position_embedding")(x)
    for i in range(layers):
        y = keras.layers.LayerNormalization(name=f"block_{i}_attention_norm")(x)
        attention = keras.layers.MultiHeadAttention(heads, width // heads, name=f"block_{i}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization(name=f"block_{i}_mlp_norm")(x)
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"block_{i}_mlp_in")(y)
        x = x + keras.layers.Dense(width, name=f"block_{i}_mlp_out")(y)
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(tokens, keras.layers.Dense(VOCAB_SIZE, name="logits")(x), name="gpt")


def build_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def load_tokens(dataset, data_dir):
    """Reads a tensorflow-datasets text as two streams of byte tokens.

    Args:
        dataset: name of a tensorflow-datasets data set that has a `text` feature.
        data_dir: folder it is prepared in. `None` is tensorflow-datasets' own default.

    Returns:
        `(train, validation)`, two `uint8` arrays: the documents with a zero byte after each.

    Raises:
        ValueError: if the data set has no `text` feature.
    """
    tfds.disable_progress_bar()
    builder = tfds.builder(dataset, data_dir=data_dir)
    if "text" not in builder.info.features:
        raise ValueError(
            f"`--dataset` needs a data set with a `text` feature. Received: --dataset={dataset}, "
            f"whose features are {list(builder.info.features)}."
        )
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    held_out = next((name for name in ("validation", "test") if name in builder.info.splits), None)
    splits = ("train", held_out) if held_out else ("train[:95%]", "train[95%:]")
    return tuple(join_documents(builder.as_dataset(split=split)) for split in splits)


def join_documents(documents):
    """Returns the bytes of the `text` of each document as one `uint8` array, at most `MAX_TOKENS` long."""
    stream = bytearray()
    for document in documents.as_numpy_iterator():
        stream += document["text"] + b"\0"
        if len(stream) >= MAX_TOKENS:
            break
    return np.frombuffer(bytes(stream[:MAX_TOKENS]), np.uint8)


def make_datasets(train_tokens, validation_tokens, *, seq_len, batch_size, seed):
    """Cuts token streams in windows of `seq_len + 1` and batches them as `(inputs, next tokens)`.

    Returns:
        `(train, validation)`: `tf.data.Dataset`s of int32 pairs of shape `(batch_size, seq_len)`. `train` is shuffled
        by the seed and repeats for ever; `validation` has at most `VALIDATION_BATCHES` batches.

    Raises:
        ValueError: if a stream is shorter than one batch.
    """

    def windows(tokens, split):
        count = (len(tokens) - 1) // seq_len
        if count < batch_size:
            raise ValueError(
                f"The {split} text must hold one batch: --batch-size {batch_size} windows of --seq-len {seq_len}. "
                f"Received: {len(tokens)} tokens, which make {count} windows. Lower one of the two."
            )
        starts = np.arange(count)[:, None] * seq_len
        return tf.data.Dataset.from_tensor_slices(tokens[starts + np.arange(seq_len + 1)])

    def batches(dataset):
        dataset = dataset.batch(batch_size, drop_remainder=True)
        return dataset.map(lambda x: (tf.cast(x[:, :-1], tf.int32), tf.cast(x[:, 1:], tf.int32)))

    train = windows(train_tokens, "train")
    train = batches(train.shuffle(train.cardinality(), seed=seed).repeat()).prefetch(2)
    validation = batches(windows(validation_tokens, "validation")).take(VALIDATION_BATCHES).cache()
    return train, validation


class Progress(keras.callbacks.Callback):
    """Keeps the loss of every step, and says perplexity and speed after each epoch.

    Args:
        tokens_per_step: tokens of one global batch.
        say: prints a line.
    """

    def __init__(self, tokens_per_step, say=print):
        super().__init__()
        self.tokens_per_step = tokens_per_step
        self.say = say
        self.losses = []  # one per step
        self.validation = []  # (step, loss)

    def on_epoch_begin(self, epoch, logs=None):
        self.mean = 0.0
        self.seconds = []  # end of each step

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean so far; the difference of two sums is this step's loss.
        self.losses.append(logs["loss"] * (batch + 1) - self.mean * batch)
        self.mean = logs["loss"]
        self.seconds.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        self.validation.append((len(self.losses), logs["val_loss"]))
        line = f"epoch {epoch + 1}: validation loss {logs['val_loss']:.4f}, perplexity {math.exp(logs['val_loss']):.2f}"
        if len(self.seconds) > 1:  # the first step traces
            rate = self.tokens_per_step * (len(self.seconds) - 1) / (self.seconds[-1] - self.seconds[0])
            line += f", {rate:,.0f} tokens/s"
        self.say(f"\n{line}", flush=True)


def plot_history(progress, path):
    """Draws the training loss of every step and the validation loss of every epoch to a PNG at `path`."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(progress.losses) + 1), progress.losses, label="training", linewidth=1)
    axes.plot(*zip(*progress.validation, strict=True), "o", label="validation")
    axes.set(xlabel="step", ylabel="cross-entropy per byte (nats)", title="GPT on byte tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def generate(model, prompt, *, length=200, temperature=0.7, seed=0):
    """Continues `prompt` by `length` bytes, drawn at `temperature`; 0 takes the likeliest byte.

    The window is padded on the right to the model's length, so one shape is traced; the causal mask hides the padding.
    """
    seq_len = model.input_shape[1]
    forward = tf.function(lambda tokens: model(tokens, training=False)[0])
    rng = np.random.default_rng(seed)
    stream = list(prompt.encode())
    for _ in range(length):
        window = stream[-seq_len:]
        padded = np.zeros((1, seq_len), np.int32)
        padded[0, : len(window)] = window
        logits = forward(tf.constant(padded)).numpy()[len(window) - 1].astype(np.float64)
        if temperature == 0:
            stream.append(int(logits.argmax()))
        else:
            weights = np.exp((logits - logits.max()) / temperature)
            stream.append(int(rng.choice(VOCAB_SIZE, p=weights / weights.sum())))
    return bytes(stream).decode("utf-8", "replace")


def build_optimizer(learning_rate, steps):
    """Returns AdamW whose learning rate rises to `learning_rate` in the first tenth of the steps, and then falls to 0."""
    warmup_steps = steps // 10
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup_steps, warmup_target=learning_rate, warmup_steps=warmup_steps
    )
    return keras.optimizers.AdamW(schedule)


def make_strategy(count, logical_gpus=None, **settings):
    """Returns a strategy over all workers of a TF_CONFIG job, else over `count` GPUs or logical CPUs of this machine.

    With `logical_gpus` the first GPU is split in so many, which count as GPUs.
    """
    if os.environ.get("TF_CONFIG"):
        return tfdist.MultiWorkerShardedStrategy(**settings)
    gpus = len(tfdist.use_logical_gpus(logical_gpus) if logical_gpus else tf.config.list_physical_devices("GPU"))
    if gpus >= count:
        return tfdist.ShardedStrategy([f"GPU:{i}" for i in range(count)], **settings)
    if gpus:
        print(f"{gpus} GPU(s) here, fewer than --devices {count}: using logical CPUs. --devices {gpus} uses the GPU(s).")
    return tfdist.ShardedStrategy(tfdist.use_logical_cpus(count), **settings)


def add_arguments(parser):
    """Adds the flags of model, data, training and devices."""
    parser.add_argument("--zero-stage", type=int, default=3, choices=range(4), help="0 shards nothing, 3 everything")
    parser.add_argument("--devices", type=int, default=2, help="GPUs to use, or parts to split the CPU in")
    parser.add_argument("--logical-gpus", type=int, metavar="N", help="split one GPU in N first, to try N ranks on one card")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps-per-epoch", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of one step, over all devices")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens (bytes) of a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest, after a warm-up")
    parser.add_argument("--dataset", default="stdlib_text", help="a tensorflow-datasets data set with a text feature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/train_gpt"), help="folder of the results")


def check_arguments(parser, args):
    """Ends the program, with the reason, where a flag is out of range."""
    for name, value in vars(args).items():
        if name not in ("zero_stage", "seed") and isinstance(value, (int, float)) and value <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: must be positive. Received: {value}")
    if args.logical_gpus and args.logical_gpus < args.devices:
        parser.error(f"argument --logical-gpus: must be at least --devices {args.devices}. Received: {args.logical_gpus}")
    if args.width % args.heads:
        parser.error(f"argument --width: {args.width} must be divisible by --heads {args.heads}")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    if args.batch_size % args.devices:
        parser.error(f"argument --batch-size: {args.batch_size} must be divisible by --devices {args.devices}")
    if pyplot is None:
        parser.error("the loss plot needs matplotlib: pip install 'tfdist[examples]'")
    return args


def main(argv=None):
    args = parse_args(argv)
    # First: a worker must join its job before anything else.
    strategy = make_strategy(args.devices, args.logical_gpus, zero_stage=args.zero_stage)
    cluster = getattr(strategy, "cluster", None)  # None on one machine
    is_chief = cluster is None or cluster.is_chief
    say = print if is_chief else lambda *_, **__: None
    args.out.mkdir(parents=True, exist_ok=True)

    def load():
        return load_tokens(args.dataset, args.out / "data" if args.dataset == stdlib_text.StdlibText.name else None)

    tokens = load() if is_chief else None
    if cluster:
        strategy.barrier("the data set is prepared")  # by the chief alone
    train, validation = make_datasets(*(tokens or load()), seq_len=args.seq_len, batch_size=args.batch_size, seed=args.seed)
    shape = dict(width=args.width, layers=args.layers, heads=args.heads, seq_len=args.seq_len)

    keras.utils.set_random_seed(args.seed)  # after the data: preparing it draws random numbers
    with strategy.scope():
        model = build_model(**shape)
        model.compile(build_optimizer(args.learning_rate, args.epochs * args.steps_per_epoch), loss=build_loss())
    where = f"{strategy.mesh.world_size} devices" + (f" of {cluster.num_workers} workers" if cluster else "")
    say(f"{model.count_params():,} parameters, {where}, ZeRO stage {args.zero_stage}", flush=True)

    progress = Progress(args.batch_size * args.seq_len, say)
    callbacks = [progress]
    if cluster:  # a job that is started again goes on from here
        callbacks.append(keras.callbacks.BackupAndRestore(args.out / "backup"))
    loss = model.evaluate(validation, verbose=0)
    progress.validation.append((0, loss))
    say(f"before training: validation loss {loss:.4f}, perplexity {math.exp(loss):.2f}", flush=True)
    model.fit(
        train,
        epochs=args.epochs,
        steps_per_epoch=args.steps_per_epoch,
        validation_data=validation,
        shuffle=False,  # the data set shuffles itself
        callbacks=callbacks,
        verbose="auto" if is_chief else 0,
    )
    say(f"\n{tfdist.memory_report(model)}\n")  # its last row: what MirroredStrategy would hold
    model.save_weights(args.out / "gpt.weights.h5")  # on every worker: all hold a part, the chief writes
    if not is_chief:
        return
    plot_history(progress, args.out / "loss.png")

    plain = build_model(**shape)  # outside the scope: whole weights on one device
    plain.load_weights(args.out / "gpt.weights.h5")
    plain.compile(loss=build_loss())
    check_equal(progress.validation[-1][1], plain.evaluate(validation, verbose=0))
    print(f"\n{generate(plain, 'The class ', seed=args.seed)}\n")
    print(f"weights, loss plot and prepared text are in {args.out}")


def check_equal(sharded_loss, plain_loss):
    """Prints both validation losses; raises RuntimeError unless they agree to 1e-5."""
    print(f"validation loss: {sharded_loss:.7f} sharded, {plain_loss:.7f} loaded without a strategy", end=": ")
    if not math.isclose(sharded_loss, plain_loss, rel_tol=1e-5):
        print("different")
        raise RuntimeError("The saved weights do not give the validation loss of the sharded model.")
    print("equal")


if __name__ == "__main__":
    main()
