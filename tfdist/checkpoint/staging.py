"""Files that appear whole: written beside their place, then moved into it."""

import contextlib
import os
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def staged(path: str | os.PathLike[str], makes_directory: bool = False) -> Iterator[str]:
    """Gives a path to write to; what the block writes there takes the place of `path` when the block ends without an error.

    A process that is killed inside the block leaves the old file as it was. The process also leaves the staging directory, which
    the next `staged` of the same path removes.

        model.keras                                     the old file
        .tfdist-saving-model.keras/model.keras          what the block writes
        .tfdist-saving-model.keras/model_00000.h5       more files that the block may write beside it; they are moved first

    One file is replaced atomically. Several files, or a directory that exists already, are replaced file by file: each file is
    whole, but a kill between two moves leaves new files beside old ones. The disk holds old and new files at the same time.

    Args:
        path: a file or directory on a local file system (also a mounted one).
        makes_directory: whether the directory that it is in is made, if there is none.

    Raises:
        OSError: the directory of `path` does not exist, cannot be written, or has no room.
    """
    target = os.path.abspath(os.fspath(path))
    directory, name = os.path.split(target)
    # The staging directory is beside the file that a link points to: only on the same file system is a move atomic.
    staging = os.path.join(os.path.dirname(os.path.realpath(target)), f".tfdist-saving-{name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        if makes_directory:
            os.makedirs(directory, exist_ok=True)
        os.mkdir(staging)
    except OSError as error:
        raise not_written(target, error) from error
    try:
        yield os.path.join(staging, name)
        try:
            for written in sorted(os.listdir(staging), key=lambda written: (written == name, written)):
                source = os.path.join(staging, written)
                _flush(source)
                _move(source, os.path.realpath(os.path.join(directory, written)))
        except OSError as error:
            raise not_written(target, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file that appears whole; if the disk refuses it, OSError is raised and one that was there is as it was."""
    with _of_size(path, len(content)) as target, open(target, "wb") as file:
        file.write(content)


def copy_file(source: str, path: str) -> None:
    """Copies a file to one that appears whole; raises OSError as `write_bytes`."""
    with _of_size(path, os.path.getsize(source)) as target:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _of_size(path: str, needed: int) -> Iterator[str]:
    """As `staged`, of one file of `needed` bytes."""
    with staged(path) as target:
        try:
            yield target
        except OSError as error:
            raise not_written(path, error, needed) from error


def not_written(path: str | os.PathLike[str], cause: OSError, needed: int | None = None) -> OSError:
    """Returns the error that tells of a file that was to be written to `path`, and needs so many bytes if that is known."""
    path = os.path.abspath(os.fspath(path))
    said = f"{cause.strerror or cause}: {path} cannot be written."
    if needed is not None and os.path.isdir(os.path.dirname(path)):
        said += f" It needs {needed:,} bytes, and {shutil.disk_usage(os.path.dirname(path)).free:,} are free there."
    if os.path.exists(path):
        said += " The file that was there before is kept as it was."
    return OSError(cause.errno, said)


def _flush(path: str) -> None:
    """Forces the files at `path` onto the disk: after a crash of the machine a moved file could else be empty."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            _flush(os.path.join(path, name))
    else:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _move(source: str, destination: str) -> None:
    """Moves a file over another, or all files of a directory over those of another."""
    if os.path.isdir(source) and os.path.isdir(destination):
        for name in sorted(os.listdir(source)):
            _move(os.path.join(source, name), os.path.join(destination, name))
    else:
        os.replace(source, destination)
