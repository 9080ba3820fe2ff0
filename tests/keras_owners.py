"""Where the installed Keras has the modules and classes that it has moved between the versions that tfdist supports."""

from tfdist.keras_hooks.table import BACKEND_NN, BACKEND_NUMPY, TENSORFLOW_TRAINER, TRAINER, resolve


def _installed(owners):
    return next(found for owner in owners if (found := resolve(owner)) is not None)


nn, numpy = _installed(BACKEND_NN), _installed(BACKEND_NUMPY)
Trainer, TensorFlowTrainer = _installed(TRAINER), _installed(TENSORFLOW_TRAINER)
