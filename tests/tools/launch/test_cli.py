"""The command line, and the launcher as a process of its own."""

import signal

import pytest

import tfdist
from tfdist.tools.launch.cli import main

pytestmark = pytest.mark.timeout(120)

WAITING = """
try:
    print("waiting")
    wait_for_signal()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "argument --workers: must be a positive integer. Received: 0"),
        (["--workers", "two"], "argument --workers: must be a positive integer. Received: two"),
        (["--workers", "2.0"], "argument --workers: must be a positive integer. Received: 2.0"),
        ([], "the following arguments are required: --workers"),
        (["--worker", "2"], "the following arguments are required: --workers"),
        (["--workers", "1", "--max-restarts", "-1"], "argument --max-restarts: must be an integer of at least 0. Received: -1"),
        (["--workers", "1", "--devices-per-worker", "0"], "argument --devices-per-worker: must be a positive integer. Rec"),
        (["--workers", "1", "--grace-seconds", "-1"], "argument --grace-seconds: must be a number of seconds from 0 to 86400"),
        (["--workers", "1", "--grace-seconds", "nan"], "argument --grace-seconds: must be a number of seconds from 0 to 86400"),
        (["--workers", "1", "--log-dir", __file__], "argument --log-dir: must be a directory, or not exist yet. Received: /"),
    ],
)
def test_wrong_options(options, message, script, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", *options, str(script(""))])
    assert error.value.code == 2
    assert f"python -m tfdist run: error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "pid_0_0").exists()


def test_a_missing_script(capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", "--workers", "2", "nowhere/train.py"])
    assert error.value.code == 2
    assert "error: argument train.py: must be a script that exists. Received: nowhere/train.py" in capsys.readouterr().err


def test_too_few_gpus(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit) as error:
        main(["run", "--workers", "4", str(script(""))])
    assert error.value.code == 2
    assert "error: argument --workers: every worker needs a GPU of its own, and there are 2. Rec" in capsys.readouterr().err
    assert not (tmp_path / "pid_0_0").exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m tfdist run --workers 4 --max-restarts 3 train.py --epochs 10" in text
    options = "--workers --chief --devices-per-worker --cpu --max-restarts --grace-seconds --log-dir -m".split()
    assert all(f"\n  {option}" in text for option in options)


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_what_follows_the_script_is_its_own(run):
    args = ["--workers", "5", "-m", "--help", "--", "a b"]
    ended = run("print(sys.argv[1:])", "--workers", "1", args=args)
    assert ended.out == [f"[worker 0] {args}"]
    assert ended.own[0].endswith("/train.py --workers 5 -m --help -- 'a b'")


def test_a_module(script, tmp_path, monkeypatch, capsys):
    script("print(__name__, sys.argv[1:])", name="training.py")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--workers", "1", "-m", "training", "--epochs", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "[worker 0] __main__ ['--epochs', '2']\n"
    assert ", python -m training --epochs 2\n" in captured.err


def test_ctrl_c(start, pids, gone, tmp_path):
    launcher = start(WAITING, "--workers", "2", "--max-restarts", "2", launcher="real")
    for _ in range(2):
        assert launcher.stdout.readline().endswith("] waiting\n")
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate()
    assert launcher.returncode == 130
    assert sorted(out.splitlines()) == ["[worker 0] interrupted", "[worker 1] interrupted"]
    assert "stopped by SIGINT" in err and "restarting" not in err
    gone(pids(2))


@pytest.mark.parametrize("kind", ["imported", "light"])
def test_workers_die_with_the_launcher(start, start_in_fork, pids, gone, kind):
    """With and without TensorFlow imported in the launcher."""
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(f'ready_{rank}_0', os.getpid()); wait_for_signal()"
    launcher = {"imported": start_in_fork, "light": start}[kind](source, "--workers", "2")
    started = pids(2, name="ready")
    launcher.kill()
    launcher.wait()
    gone(started)


def test_sigterm(start, pids, gone):
    source = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))" + WAITING
    launcher = start(source, "--workers", "2", "--max-restarts", "2")
    for _ in range(2):
        assert launcher.stdout.readline().endswith("] waiting\n")
    launcher.terminate()
    _, err = launcher.communicate()
    assert launcher.returncode == 143
    assert {"[worker 0] terminated", "[worker 1] terminated"} <= set(err.splitlines())
    assert err.endswith(": stopped by SIGTERM\n")
    gone(pids(2))


def test_the_reader_of_the_output_goes(start, pids, gone):
    source = """
        while True:
            wait_for("pid_0_0"), wait_for("pid_1_0")
            print("more")
            time.sleep(0.001)
    """
    launcher = start(source, "--workers", "2")
    assert launcher.stdout.readline().endswith("] more\n")
    launcher.stdout.close()
    err = launcher.stderr.read()
    assert launcher.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in err and "Exception" not in err
    gone(pids(2))


def launch_and_split_cpu(argv):
    assert main(argv) == 0
    tfdist.use_logical_cpus(3)


def test_tensorflow_is_not_initialised(start_in_fork, tmp_path):
    """Else this process would hold the GPUs that its workers are to use."""
    launcher = start_in_fork("print('here')", "--workers", "1", function=launch_and_split_cpu)
    assert launcher.wait(100) == 0, (tmp_path / "err.txt").read_text()
    assert (tmp_path / "out.txt").read_text() == "[worker 0] here\n"
