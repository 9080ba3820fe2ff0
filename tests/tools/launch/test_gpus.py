"""Which GPUs there are and who gets them. GPUs are pretended."""

import pytest

from tfdist.tools.launch.gpus import device_environments, visible_gpus

pytestmark = pytest.mark.timeout(60)

FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0,1,2,3", FOUR),
        ("3, 1", ["3", "1"]),
        ("GPU-8932f937,GPU-1f22", ["GPU-8932f937", "GPU-1f22"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
    ],
)
def test_the_environment_decides(listed, expected, tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == expected


def test_else_the_driver(tmp_path):
    assert visible_gpus({}, tmp_path / "no driver") == []
    for bus in range(3):
        (tmp_path / f"0000:{bus}:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("workers", "devices_per_worker", "expected"),
    [
        (4, None, ["0", "1", "2", "3"]),
        (2, None, ["0,1", "2,3"]),
        (3, None, ["0", "1", "2"]),
        (2, 1, ["0", "1"]),
        (1, 3, ["0,1,2"]),
    ],
)
def test_every_worker_has_its_own(workers, devices_per_worker, expected):
    environments = device_environments(workers, devices_per_worker, gpus=FOUR)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected
    asked = {environment.get("TFDIST_DEVICES_PER_WORKER") for environment in environments}
    assert asked == {devices_per_worker and str(devices_per_worker)}


def test_ids_are_those_of_the_environment():
    environments = device_environments(2, None, gpus=["GPU-a", "GPU-b"])
    assert environments == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]


def test_without_gpus():
    assert device_environments(2, None, gpus=[]) == [{}, {}]
    assert device_environments(2, 3, gpus=[]) == [{"TFDIST_DEVICES_PER_WORKER": "3"}] * 2


def test_cpu_hides_them():
    expected = {"CUDA_VISIBLE_DEVICES": "-1", "TFDIST_DEVICES_PER_WORKER": "8"}
    assert device_environments(5, 8, gpus=FOUR, cpu=True) == [expected] * 5


def test_fewer_gpus_than_workers():
    with pytest.raises(ValueError, match="argument --workers: .* there are 4. Received: workers=5. Use --workers 4 or fewer"):
        device_environments(5, None, gpus=FOUR)


def test_too_few_gpus_for_what_each_is_to_have():
    message = "argument --devices-per-worker: 2 workers need 6 GPUs, and there are 4. Received: devices_per_worker=3. Use .* 2 or"
    with pytest.raises(ValueError, match=message):
        device_environments(2, 3, gpus=FOUR)


@pytest.mark.parametrize(
    ("workers", "gpus", "expected", "sharing"),
    [
        (1, ["0"], ["0"], "1"),
        (2, FOUR, ["0", "1"], "1"),
        (3, ["0"], ["0"] * 3, "3"),
        (5, ["a", "b"], ["a", "a", "a", "b", "b"], "3"),
    ],
)
def test_parts_of_a_gpu(workers, gpus, expected, sharing):
    environments = device_environments(workers, None, gpus=gpus, logical_gpus=4)
    assert [environment.pop("CUDA_VISIBLE_DEVICES") for environment in environments] == expected
    assert environments == [{"TFDIST_LOGICAL_GPUS": "4", "TFDIST_WORKERS_PER_GPU": sharing}] * workers


@pytest.mark.parametrize(
    ("devices_per_worker", "cpu", "gpus", "message"),
    [
        (None, True, FOUR, "--logical-gpus: cannot be given with --cpu"),
        (2, False, FOUR, "--logical-gpus: cannot be given with --devices-per-worker"),
        (None, False, [], "--logical-gpus: there is no GPU to split. .* --devices-per-worker 3 splits the CPU"),
    ],
)
def test_parts_of_no_gpu(devices_per_worker, cpu, gpus, message):
    with pytest.raises(ValueError, match=message):
        device_environments(2, devices_per_worker, gpus=gpus, cpu=cpu, logical_gpus=3)
