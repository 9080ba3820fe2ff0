"""Files whose writers never hear that a write failed: on a disk that is full after so many bytes."""

import errno
import io
import os
import zipfile

import h5py
import numpy as np
import pytest

from tfdist.checkpoint.unfailing_file import UnfailingFile


class Disk(io.BytesIO):
    """A file on a disk with room for so many bytes; a write that does not fit is kept in part, as a disk does."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def write(self, data):
        here = self.tell()
        if here >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[: self.room - here])


def write_hdf5(file):
    with h5py.File(file, "w") as opened:
        for index in range(30):
            opened.create_group(f"layers/dense_{index}/vars")["0"] = np.full(700, index, "float32")
        opened.attrs["state"] = "x" * 400


def write_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        for index in range(5):
            archive.writestr(f"{index}.bin", bytes([index]) * 20_000)


@pytest.mark.parametrize("write", [write_hdf5, write_zip])
@pytest.mark.parametrize("room", [0, 1, 600, 5000, 60_000, 10**9])
def test_the_writer_ends_whatever_the_disk_has_room_for(write, room, tmp_path, monkeypatch):
    whole = io.BytesIO()
    write(whole)
    disk = Disk(room)
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: disk)
    file = UnfailingFile(str(tmp_path / "staged"))
    write(file)
    monkeypatch.undo()
    if room > len(whole.getvalue()):
        file.check(str(tmp_path / "model"))
        assert disk.getvalue() == whole.getvalue()
        return
    with pytest.raises(OSError, match="No space left on device: .*model cannot be written. It needs") as raised:
        file.check(str(tmp_path / "model"))
    assert raised.value.errno == errno.ENOSPC
    needed = int(str(raised.value).partition("It needs ")[2].partition(" bytes")[0].replace(",", ""))
    assert needed == pytest.approx(len(whole.getvalue()), abs=3000)
    assert "is kept as it was" not in str(raised.value)
    (tmp_path / "model").write_text("old")
    with pytest.raises(OSError, match="is kept as it was"):
        file.check(str(tmp_path / "model"))


def test_a_file_that_cannot_be_opened_is_written_nowhere(tmp_path):
    with UnfailingFile(str(tmp_path / "none" / "x")) as file:
        write_hdf5(file)
    with pytest.raises(FileNotFoundError, match="No such file or directory: .*none/x cannot be written.$"):
        file.check(str(tmp_path / "none" / "x"))


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "file"
    with UnfailingFile(str(path)) as file:
        assert file.readable() and file.writable() and file.seekable() and file.name == str(path)
        assert file.write(b"0123456789") == 10
        assert file.seek(-4, os.SEEK_END) == 6 and file.read() == b"6789"
        assert file.seek(2) == 2 and file.write(b"ab") == 2 and file.tell() == 4
        assert file.truncate(6) == 6
        file.check(str(path))
    assert path.read_bytes() == b"01ab45"
    file.close()  # twice is once
