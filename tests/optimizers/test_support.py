"""Which optimizers may run on shards: those that are declared, by class; and what is refused."""

import keras
import pytest
import tensorflow as tf

from tfdist.optimizers import support


class OfAdam(keras.optimizers.Adam):
    """A subclass, whose update may be another."""


class Applying(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


class Clipping(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return grads


class Applied(keras.optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(grads, trainable_variables)


@pytest.mark.parametrize("kind", [keras.optimizers.Lamb, keras.optimizers.Muon, keras.optimizers.Adafactor, OfAdam])
def test_what_is_not_declared_runs_whole(kind):
    assert not support.is_elementwise(kind()) and not support.may_share(kind())


def test_a_declaration_is_of_one_class(monkeypatch):
    monkeypatch.setattr(support, "_ELEMENTWISE", set(support._ELEMENTWISE))

    class Child(OfAdam):
        pass

    assert support.elementwise(OfAdam) is OfAdam
    assert support.is_elementwise(OfAdam()) and not support.is_elementwise(Child())
    assert not support.may_share(OfAdam()), "a declared update may look at more of a parameter than its elements"
    assert support.is_elementwise(keras.optimizers.Adam()) and support.may_share(keras.optimizers.Adam())


@pytest.mark.parametrize("given", [keras.layers.Dense, "adam", keras.optimizers.SGD()])
def test_only_classes_of_optimizers_are_declared(given):
    with pytest.raises(ValueError, match="`optimizer_class` must be a subclass"):
        support.elementwise(given)


def test_overrides():
    assert support.changes_gradients(Applying()) and not support.changes_gradients(OfAdam())
    for kind in (Clipping, Applied):
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} overrides"):
            support.check_overrides(kind())
    support.check_overrides(Applying())


def test_variables_that_are_overwritten_with_their_gradient():
    variable = keras.Variable([1.0])
    support.check_no_overwriting(keras.optimizers.SGD(), [variable])
    variable.overwrite_with_gradient = True
    with pytest.raises(NotImplementedError, match="float8"):
        support.check_no_overwriting(keras.optimizers.SGD(), [variable])


def test_the_default_strategy_is_none():
    assert support.is_none(None) and support.is_none(tf.distribute.get_strategy())
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    assert not support.is_none(strategy) and "OneDeviceStrategy at 0x" in support.describe(strategy)
