"""Seals: whatever is changed in a file is seen, and a file that has none is read to its end."""

import contextlib
import shutil

import h5py
import numpy as np
import pytest

from tfdist.checkpoint.seal import BLOCK_BYTES, damage, put_seal
from tfdist.checkpoint.unfailing_file import UnfailingStore

VALUES = {f"layers/dense_{index}/vars/{index % 2}": np.full([33, 7], index, "float32") for index in range(9)}


def write(path, is_sealed):
    with contextlib.closing(UnfailingStore(path, is_sealed)) as store:
        for name, value in VALUES.items():
            store.h5_file[name] = value
        store.h5_file.attrs["state"] = "an attribute"
    store.io_file.check(path)
    return path


def values(path):
    with h5py.File(path, "r") as file:
        return {name: file[name][()] for name in VALUES}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    return write(tmp_path_factory.mktemp("seal") / "sealed.h5", is_sealed=True)


def damaged(content, seed):
    """Returns `content` with an end lost, bits flipped, or a block of zeros or of another file in it."""
    rng = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:
        return content[: rng.integers(0, len(content))]
    content = np.frombuffer(content, np.uint8).copy()
    if kind == 1:
        content[rng.integers(0, len(content))] ^= np.uint8(1 << rng.integers(8))
    else:
        begin, size = rng.integers(0, len(content)), rng.integers(1, 2048)
        content[begin : begin + size] = 0 if kind == 2 else rng.integers(0, 256, len(content[begin : begin + size]))
    return content.tobytes()


def test_a_sealed_file_is_read_as_any_other(sealed):
    assert damage(sealed) == ""
    for name, value in values(sealed).items():
        np.testing.assert_array_equal(value, VALUES[name])
    with h5py.File(sealed, "r") as file:
        assert (file.attrs["state"], file.userblock_size) == ("an attribute", BLOCK_BYTES)


def test_all_damage_is_seen(sealed, tmp_path):
    whole = sealed.read_bytes()
    seen = 0
    for seed in range(200):
        path = tmp_path / "damaged.h5"
        path.write_bytes(damaged(whole, seed))
        why = damage(path)
        seen += why == "its bytes are not those that were written"
        # What is not seen has changed nothing: zeros, or the rest of the seal's block.
        assert why or path.read_bytes()[BLOCK_BYTES:] == whole[BLOCK_BYTES:]
    assert seen > 150


def test_a_file_that_lost_its_seal_alone_is_whole(sealed, tmp_path):
    path = shutil.copy(sealed, tmp_path / "unsealed.h5")
    with open(path, "r+b") as file:
        file.write(bytes(BLOCK_BYTES))
    assert damage(path) == ""


def test_a_file_without_a_seal_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "plain.h5", is_sealed=False)
    assert damage(path) == "" and path.read_bytes().startswith(b"\x89HDF")
    whole = path.read_bytes()
    kinds = set()
    for seed in range(200):
        path.write_bytes(damaged(whole, seed))
        kinds.add(damage(path).partition(":")[0])
    # HDF5 notices a part, by errors of more than one kind; none of them is raised.
    assert {"", "OSError", "RuntimeError"} <= kinds
    path.unlink()
    assert damage(path).startswith("FileNotFoundError: ")


def test_a_seal_that_cannot_be_written_is_the_error_of_its_file(tmp_path, monkeypatch):
    """The disk is full when the file is read again for its seal."""
    store = UnfailingStore(tmp_path / "full.h5", is_sealed=True)
    for name, value in VALUES.items():
        store.h5_file[name] = value

    def fail_first(file):
        file._error = OSError(28, "No space left on device")
        put_seal(file)

    monkeypatch.setattr("tfdist.checkpoint.unfailing_file.put_seal", fail_first)
    store.close()
    with pytest.raises(OSError, match="No space left on device: .*model cannot be written"):
        store.io_file.check(str(tmp_path / "model"))
    assert damage(tmp_path / "full.h5") == ""  # its block holds nothing, and HDF5 has written the rest
