"""The names under which weights are saved: those of the Keras layers that parallel layers are.

In a `.weights.h5` or `.keras` file Keras names the weights of a model's layers by their classes: "dense_1". Under the name
"column_parallel_dense_1" a model without parallel layers would not find them. So a parallel layer takes the name of the
layer that it is outside replicas, and files are exchanged between the two.
"""

from keras.src.utils import naming

SAVED_AS: dict[str, str] = {}  # by the name that a layer's class gives it


def save_as(parallel_class: type, layer_class: type) -> None:
    """Declares that layers of `parallel_class` are saved under the name of `layer_class`."""
    SAVED_AS[naming.to_snake_case(parallel_class.__name__)] = naming.to_snake_case(layer_class.__name__)
