"""A metric that was made outside `strategy.scope()`, and is used under the strategy: it is moved there.

    metric = keras.metrics.AUC()                    made in no scope
    with strategy.scope():
        model = build_model()
    model.compile("adam", loss, metrics=[metric])   moved here; or where a rank first updates it, or asks for its result

Its variables become the strategy's, with what they hold: from then on each rank may have a part of it.
"""

import keras
import tensorflow as tf

from tfdist.sharding.separate_thread import in_separate_thread, made_by, move


def move_metric(metric: keras.metrics.Metric, strategy: tf.distribute.Strategy) -> None:
    """Moves `metric` under `strategy`, if it was made in no scope."""
    plain = [variable for variable in metric.variables if variable._value is not None and made_by(variable) is None]
    if not plain:
        return

    def make_anew() -> None:
        values = [variable.numpy() for variable in plain]
        move(plain, strategy)
        with strategy.scope():
            for variable, value in zip(plain, values, strict=True):
                variable.assign(value)  # each rank has the whole value now, of which it is to have a part

    in_separate_thread(make_anew)
