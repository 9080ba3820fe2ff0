"""Steps over a slow link: the cases, what is shown, going on with a run, and the link itself."""

import json
import subprocess
import sys

import pytest

from benchmarks import cases, links
from benchmarks.job import Job
from tests.soak import hosts

needs_hosts = pytest.mark.skipif(bool(hosts.why_not("1gbit")), reason=hosts.why_not("1gbit"))


def record(contender="zero2", gradients=None, seconds=1.0, at="1gbit", **fields):
    key = {"model_name": "wide", "rate": at, "contender": contender, "ranks": 2, "gradients": gradients, "parameters": gradients}
    return {**key, "step_seconds": seconds, "wire_bytes": 2e6, "counted_bytes": 1.9e6, "part_of_link": 0.5, **fields}


def found(words):
    args = links.parse_args(words.split())
    return [(at, case.contender, case.gradients, case.parameters) for at, case in links.all_cases(args)]


def test_cases():
    assert found("--models wide --rates 1gbit --contenders zero0 zero2 zero3 ddp --compressors int4") == [
        ("1gbit", "zero0", None, None),
        ("1gbit", "zero0", "int4", None),
        ("1gbit", "zero2", None, None),
        ("1gbit", "zero2", "int4", "int4"),
        ("1gbit", "zero3", None, None),
        ("1gbit", "zero3", "int4", "int8"),
        ("1gbit", "ddp", None, None),
    ]
    assert found("--models wide --rates 1gbit --contenders zero2 --compressors int4 --parameters exact")[1][3] is None
    assert len(found("")) == 2 * 2 * (4 * 9 + 1 + 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rates fast", "must be a whole number and one of kbit mbit gbit. Received: fast"),
        ("--rates 1.5gbit", "Received: 1.5gbit"),
        ("--ranks 3", "must be even: as many on either host. Received: 3"),
        ("--compressors int2", "invalid choice: 'int2'"),
    ],
)
def test_mistakes_on_the_command_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        links.parse_args(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_rate_in_bits_a_second():
    assert [links.bits_per_second(rate) for rate in ("1gbit", "100mbit", "64kbit")] == [1e9, 1e8, 64e3]


def test_tables_and_targets():
    records = [record(), record(gradients="int8", seconds=0.5), record(gradients="int4", seconds=0.6), record("ddp", seconds=0.9)]
    failed = {name: value for name, value in record("fsdp2").items() if name not in ("step_seconds", "wire_bytes")}
    lines = links.show([*records, {**failed, "error": "it died"}]).splitlines()
    assert lines[3].split() == ["wide", "1gbit", "zero2", "int8,", "int8", "0.50", "2.00", "2.00", "1.90", "50", "%"]
    assert lines[-1].endswith("failed")
    by_text = {target.text: target for target in links.targets(records)}
    reached = by_text["wide, stage 2, int8 over uncompressed at 1gbit, at least 1.8"]
    missed = by_text["wide, stage 2, int4 over uncompressed at 1gbit, at least 2"]
    beside = by_text["wide, stage 2, uncompressed, times the speed of ddp at 1gbit, at least 1"]
    assert (reached.value, reached.is_met) == (2.0, True)
    assert (missed.value, missed.is_met) == (pytest.approx(1 / 0.6), False)
    assert (beside.value, beside.is_met) == (0.9, False)
    assert by_text["wide, stage 2, int8 over uncompressed at 100mbit, at least 3.2"].value is None


def test_an_exact_case_with_another_loss_has_failed():
    first, other, compressed = record(warmup_loss=2.0), record("ddp", warmup_loss=2.1), record(gradients="int8", warmup_loss=2.1)
    for one in (other, compressed):
        links.check_loss(one, [first])
    assert "not the same work" in other["error"] and "error" not in compressed


def test_what_has_been_measured_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "measure", lambda *_: {"warmup_loss": 1.0, "step_seconds": 3.0})
    monkeypatch.setattr(hosts, "joined", lambda rate: pytest.fail("a cable") if made else _Nothing(made))
    made = []
    words = "--models wide --rates 1gbit --contenders zero2 --compressors int8".split()
    args = links.parse_args([*words, "--json", str(tmp_path / "links.jsonl")])
    first = links.run_all(args, missing_torch=True)
    assert made == ["made"] and len(first) == 2
    assert links.run_all(args, missing_torch=True) == first
    assert [json.loads(line)["step_seconds"] for line in (tmp_path / "links.jsonl").read_text().splitlines()] == [3.0, 3.0]


class _Nothing:
    def __init__(self, made):
        self._made = made

    def __enter__(self):
        self._made.append("made")

    def __exit__(self, *_):
        return None


def test_without_the_rights_it_is_skipped_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "why_not", lambda rate: "the program `tc` is missing")
    assert links.main(["--models", "wide"]) == 0
    assert capsys.readouterr().out == "skipped: the program `tc` is missing\n"


CHILD = """
import json, os, socket, sys
next(sys.stdin)
print(json.dumps({"address": json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]}), flush=True)
next(sys.stdin)
address, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    with socket.create_server((address, int(port))) as server:
        print(json.dumps({}), flush=True)
        next(sys.stdin)
        connection, _ = server.accept()
        while connection.recv(2**16):
            pass
        print(json.dumps({"host": os.listdir("/dev/shm")}), flush=True)
else:
    print(json.dumps({}), flush=True)
    next(sys.stdin)
    with socket.create_connection((address, int(port))) as connection:
        connection.sendall(b"x" * 1_000_000)
    print(json.dumps({"host": os.listdir("/dev/shm")}), flush=True)
next(sys.stdin, None)  # one that ends while the other has not answered has failed
"""


@needs_hosts
@pytest.mark.timeout(60)
def test_processes_of_a_job_on_two_hosts_and_what_they_sent():
    case = cases.Case("zero2", "mlp", 2, 1, 1, 4, multi_worker=True)
    with hosts.joined("100mbit") as cable:
        with Job("", case, environment={}, timeout_seconds=40, program=[sys.executable, "-c", CHILD], hosts=cable) as job:
            assert [one.partition(":")[0] for one in job.ready[0]["address"]] == list(cable.addresses)
            job.ask({})
            before = cable.sent_bytes()
            assert [answer["host"] for answer in job.ask({})] == [[], []]  # a /dev/shm of their own
            sent = [after - one for one, after in zip(before, cable.sent_bytes(), strict=True)]
        name = cable._names[0]
        assert 1_000_000 < sent[1] < 1_100_000 and sent[0] < 100_000
        limit = subprocess.run(["tc", "-n", name, "qdisc", "show", "dev", "cable"], capture_output=True, text=True).stdout
        assert "tbf" in limit and "rate 100Mbit" in limit
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_hosts
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_step_over_a_link(capsys):
    words = "--models small --rates 1gbit --contenders zero2 --compressors int8 --steps 1"
    assert links.main(words.split()) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    for one in shown:
        assert one["counted_bytes"] <= one["wire_bytes"] <= 1.02 * one["counted_bytes"]
    assert shown[1]["counted_bytes"] < 0.7 * shown[0]["counted_bytes"]
