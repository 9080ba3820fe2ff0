"""Files that appear whole."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tfdist.checkpoint import staging
from tfdist.checkpoint.staging import staged


def write(path, text):
    pathlib.Path(path).write_text(text)


def contents(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("before", [{}, {"a.txt": "old", "b.txt": "other"}])
def test_the_old_file_stays_until_the_end(before, tmp_path):
    for name, text in before.items():
        write(tmp_path / name, text)
    with staged(tmp_path / "a.txt") as path:
        assert os.path.basename(path) == "a.txt", "what writes it may look at the name"
        write(path, "new")
        visible = {name: text for name, text in contents(tmp_path).items() if not name.startswith(".tfdist")}
        assert visible == before
    assert contents(tmp_path) == before | {"a.txt": "new"}
    assert sorted(os.listdir(tmp_path)) == sorted(before | {"a.txt": ""})


def test_an_error_keeps_the_old_file(tmp_path):
    write(tmp_path / "a.txt", "old")
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "a.txt") as path:
        write(path, "half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"a.txt": "old"}
    assert os.listdir(tmp_path) == ["a.txt"]


def test_kill_9_keeps_the_old_file_and_the_next_save_tidies_up(tmp_path):
    write(tmp_path / "a.txt", "old")
    program = f"""
        import importlib.util, os, signal
        spec = importlib.util.spec_from_file_location("staging", {staging.__file__!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with module.staged({str(tmp_path / "a.txt")!r}) as path:
            open(path, "w").write("half")
            open(path + ".more", "w").write("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    with staged(tmp_path / "a.txt") as path:
        write(path, "new")
    assert contents(tmp_path) == {"a.txt": "new"}
    assert os.listdir(tmp_path) == ["a.txt"]


def test_several_files_the_named_one_last(tmp_path, monkeypatch):
    """An index appears when all that it lists is there."""
    moved = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (moved.append(os.path.basename(paths[1])), replace(*paths)))
    with staged(tmp_path / "a.json") as path:
        write(path, "index")
        for name in ("z_1.h5", "a_0.h5"):
            write(os.path.join(os.path.dirname(path), name), name)
    assert moved == ["a_0.h5", "z_1.h5", "a.json"]
    assert contents(tmp_path) == {"a.json": "index", "a_0.h5": "a_0.h5", "z_1.h5": "z_1.h5"}


def test_directories(tmp_path):
    """A new one in one move; into one that exists file by file, and what else is there stays."""
    for text in ("first", "second"):
        with staged(f"{tmp_path}/model/") as path:
            os.makedirs(os.path.join(path, "assets", text))
            write(os.path.join(path, "config.json"), text)
            write(os.path.join(path, "assets", "table"), text)
            write(os.path.join(path, "assets", text, "table"), text)
        write(tmp_path / "model" / "notes", "mine")
    assert contents(tmp_path / "model") == {
        "config.json": "second",
        "notes": "mine",
        "assets/table": "second",
        "assets/first/table": "first",
        "assets/second/table": "second",
    }


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest.txt").symlink_to(tmp_path / "runs" / "3.txt")
    with staged(tmp_path / "latest.txt") as path:
        write(path, "new")
    assert (tmp_path / "latest.txt").is_symlink()
    assert contents(tmp_path / "runs") == {"3.txt": "new"}


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with staged("a.txt") as path:
        write(path, "new")
    assert contents(tmp_path) == {"a.txt": "new"}


def test_what_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError), staged(tmp_path / "nowhere" / "a.txt"):
        raise AssertionError("the block ran")
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError), staged(tmp_path / "directory") as path:
        write(path, "a file")
    assert os.listdir(tmp_path) == ["directory"]


def test_what_is_written_or_copied_appears_whole(tmp_path, monkeypatch):
    path, copied = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    staging.write_bytes(path, b"first")
    staging.copy_file(path, copied)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(staging, "open", full, raising=False)
    for write in (lambda: staging.write_bytes(path, b"second"), lambda: staging.copy_file(path, copied)):
        with pytest.raises(OSError, match="No space left on device: .*json cannot be written. It needs . bytes, and .* free"):
            write()
    assert contents(tmp_path) == {"a.json": "first", "b.json": "first"}
