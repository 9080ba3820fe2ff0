"""One process: what is read from it, and when its id is given up."""

import os
import select
import signal
import sys

import pytest

from tfdist.runtime import Task
from tfdist.tools.launch.output import Output
from tfdist.tools.launch.worker import Worker

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def start():
    def worker(source):
        return Worker(Task("worker", 0, "localhost:1"), [sys.executable, "-c", source], os.environ, Output("worker 0"))

    return worker


def wait_for_end(worker):
    select.select([worker.pidfd], [], [])


def test_what_was_not_read_yet_is_not_lost(start, capsys):
    with start("import os; os.write(1, b'one\\ntwo'); os.write(2, b'three\\n')") as worker:
        wait_for_end(worker)
    assert capsys.readouterr() == ("[worker 0] one\n[worker 0] two\n", "[worker 0] three\n")


def test_its_id_is_kept_until_it_is_left(start):
    with start("raise SystemExit(3)") as worker:
        wait_for_end(worker)
        assert worker.exit_code is None
        worker.note_end()
        assert worker.exit_code == 3
        worker.signal(signal.SIGKILL)
        os.kill(worker.pid, 0)  # it exists
        assert worker.exit_code == 3
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_leaving_ends_it(start):
    with start("import signal; signal.pause()") as worker:
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_process_that_left_the_group_does_not_keep_the_launcher(start, capsys, tmp_path):
    """It holds the pipes: they never come to their end."""
    path = tmp_path / "pid"
    source = f"""if True:
        import subprocess, sys
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(path)!r}, "w").write(str(daemon.pid))
        print("not ended", end="")
    """
    try:
        with start(source) as worker:
            wait_for_end(worker)
        assert capsys.readouterr().out == "[worker 0] not ended\n"
        os.kill(int(path.read_text()), 0)  # it lives
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)
