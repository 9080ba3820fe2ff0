"""Results of a metric on a rank are those of the sums; what a step returns besides is averaged by the ranks' rows."""

import keras
import numpy as np
import tensorflow as tf
from ranks import local, per_rank, run, strategy_on

from tfdist.collectives import current_program
from tfdist.metrics.global_results import _weighted_means, naming_the_model, reduce_logs
from tfdist.metrics.updates import RankMetrics

ROWS = [np.array([1.0, 2.0, 6.0], np.float32), np.array([11.0], np.float32)]


def mean_under(strategy):
    with strategy.scope():
        return keras.metrics.Mean()


def test_in_a_rank_it_is_of_all_rows_unless_keras_computes_it_after_the_step():
    for has_own, expected in ((False, [5, 5]), (True, [3, 11])):
        strategy = strategy_on(2)
        metric = mean_under(strategy)

        def on_rank(x, metric=metric, has_own=has_own):
            metric.update_state(x)
            current_program("test").part(RankMetrics).has_own_results = has_own
            return metric.result()

        assert run(strategy, on_rank, ROWS) == expected
        assert bool(strategy.last_plan.counts()) is not has_own
        assert float(metric.result()) == 5


def test_means_count_the_weights():
    """A rank without rows counts nothing, whatever it has; what is no floating number of each rank is left as it is."""
    strategy = strategy_on(2)
    logs = {
        "loss": per_rank(strategy, [np.float32(2), np.float32(6)]),
        "half": per_rank(strategy, [np.float16(1), np.float16(3)]),
        "count": per_rank(strategy, [np.int32(3), np.int32(5)]),
        "rows": per_rank(strategy, [np.zeros(3, np.float32), np.ones(3, np.float32)]),
        "all": tf.constant(7.0),
    }
    found = _weighted_means(logs, per_rank(strategy, [np.float64(0.25), np.float64(0.75)]), strategy)
    assert (float(found["loss"]), float(found["half"]), found["half"].dtype, float(found["all"])) == (5, 2.5, tf.float16, 7)
    assert local(strategy, found["count"]) == [3, 5] and [x.shape for x in local(strategy, found["rows"])] == [(3,)] * 2
    nothing = per_rank(strategy, [np.float32(np.nan), np.float32(6)])
    assert float(_weighted_means(nothing, per_rank(strategy, [np.float64(0), np.float64(1)]), strategy)) == 6


def test_a_step_says_whose_its_logs_are():
    """What else a step returns goes to `reduce` as it is."""
    strategy = strategy_on(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
        model.build((None, 1))
    for is_after, expected in ((True, "model"), (False, None)):
        logs, owner, weight = naming_the_model(model, lambda data: data, lambda step: step, lambda is_after=is_after: is_after)(
            "x"
        )
        assert (logs, weight) == ("x", None) and owner.model is (model if expected else None)
    assert reduce_logs({"loss": 3.0}, strategy, lambda x: ("reduced", x)) == ("reduced", {"loss": 3.0})
