"""Arrays beside Keras's weights, in the same file."""

import h5py
import ml_dtypes
import numpy as np
from saved_models import sequential

from tfdist.checkpoint.backup_file import put_state, take_state

STATE = {
    "model/3": np.array([7, 2], "uint32"),
    "metrics/0/summands": np.arange(6, dtype="float32").reshape(3, 2),
    "scalar": np.float64(0.5),
    "empty": np.zeros([0, 4], "float32"),
    "half": np.array([1.5], ml_dtypes.bfloat16),
    "narrow": np.array([[0.5, -2.0]], ml_dtypes.float8_e4m3fn),
    "flag": np.array([True, False]),
}


def test_what_is_put_is_taken_and_keras_reads_the_file(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model, other = sequential(), sequential()
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        put_state(file, "extra", STATE)
        put_state(file, "none", {})
    with h5py.File(path, "r") as file:
        taken = take_state(file, "extra")
        assert take_state(file, "none") == take_state(file, "metrics") == {}
    assert taken.keys() == STATE.keys()
    for name, value in STATE.items():
        assert taken[name].dtype == value.dtype and taken[name].shape == value.shape
        assert taken[name].tobytes() == value.tobytes(), name
    other.load_weights(path)
    for mine, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
