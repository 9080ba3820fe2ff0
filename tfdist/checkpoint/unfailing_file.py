"""A file whose writer never hears that a write failed.

The library that writes HDF5 files cannot close one that it could not write to the end: it says "Can't decrement id ref count",
and ends the process by a signal later. And who writes a sharded variable must not stop in the middle, while other workers read
the next one together with it. So what goes wrong on the disk is kept, the rest of what is written is only counted, and the error
is raised when the writer has ended, with the number of bytes that would have been needed.
"""

import io
import os
from typing import Any

import h5py
from keras.src.saving import saving_lib

from tfdist.checkpoint.seal import BLOCK_BYTES, put_seal
from tfdist.checkpoint.staging import not_written


class UnfailingFile(io.RawIOBase):
    """A binary file for reading and writing, new or overwritten, whose `check` raises what its writer was not told."""

    def __init__(self, path: str):
        super().__init__()
        self.name = path
        self._end = 0
        self._error: OSError | None = None
        self._file: Any = io.BytesIO()
        try:
            self._file = open(path, "wb+", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            self._error = error

    def check(self, path: str) -> None:
        """Raises OSError if anything went wrong with the file, which was to be put in its place at `path`."""
        if self._error is not None:
            raise not_written(path, self._error, self._end) from self._error

    def readable(self) -> bool:
        return True

    writable = seekable = readable

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        begin = self._file.tell()
        try:
            written = 0
            while self._error is None and written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._error = error
        self._end = max(self._end, begin + len(data))
        self._file.seek(begin + len(data))
        return len(data)

    def readinto(self, buffer: Any) -> int:
        number = self._file.readinto(buffer)
        missing = min(len(buffer), self._end - self._file.tell() + number) - number
        if self._error is not None and missing > 0:  # what was not kept reads as zeros
            buffer[number : number + missing] = bytes(missing)
            self._file.seek(missing, os.SEEK_CUR)
            number += missing
        return number

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset, whence = self._end + offset, os.SEEK_SET
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        self._end = self._file.tell() if size is None else size
        try:
            return self._file.truncate(self._end)
        except OSError as error:
            self._error = self._error or error
        return self._end

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error
        super().close()


class UnfailingStore(saving_lib.H5IOStore):
    """Keras's store of weights in an HDF5 file, in an `UnfailingFile`: `io_file`. If `is_sealed`, closing it seals it."""

    def __init__(self, path: str, is_sealed: bool = False):
        self._is_sealed = is_sealed
        super().__init__(path, mode="w")

    def _get_h5_file(self, path_or_io: Any, mode: str | None = None) -> h5py.File:
        self.io_file = UnfailingFile(str(path_or_io))
        return h5py.File(self.io_file, "w", userblock_size=BLOCK_BYTES if self._is_sealed else 0)

    def close(self) -> None:
        self.h5_file.close()
        if self._is_sealed:
            put_seal(self.io_file)
        super().close()
