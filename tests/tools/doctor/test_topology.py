"""What `nvidia-smi` prints, read. The texts have the form of its manual; no GPU was asked."""

import pytest

from tfdist.tools.doctor.topology import Topology, link_between, parse_cards, parse_links, parse_nvlinks, read_topology, uuids_of

CARDS = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 5, 16
1, GPU-aaaa-2, NVIDIA H100 80GB HBM3, 81559, 900, 550.54.15, 5, 16
2, GPU-bbbb-3, NVIDIA H100 80GB HBM3, [N/A], [N/A], 550.54.15, 4, 8
"""
LINKS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tPIX\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tNODE\t0-31\t0\t\tN/A\n"
    "NIC0\tPIX\tPIX\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
NVLINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-2)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def answers(**changed):
    """Returns a stand-in for `nvidia-smi`, by the first word of what it is asked."""
    told = {"--query-gpu": CARDS, "topo": LINKS, "nvlink": NVLINKS, **changed}

    def ask(*arguments):
        answer = told[arguments[0].partition("=")[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def system(tmp_path):
    for name, speed, state in [("eth0", "100000", "up"), ("eth1", "25000", "down"), ("lo", "", "unknown"), ("tap", "-1", "up")]:
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(speed)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    return tmp_path


def devices(*uuids, hosts=("one",)):
    return [{"device": "GPU:0", "uuid": uuid, "host": hosts[i % len(hosts)]} for i, uuid in enumerate(uuids)]


def test_cards():
    first, _, last = parse_cards(CARDS)
    assert (first.index, first.uuid, first.driver, first.memory_bytes) == (0, "GPU-aaaa-1", "550.54.15", 81559 * 2**20)
    assert first.pcie_gb_per_second == pytest.approx(63, rel=0.01)  # PCIe 5, 16 lanes, one direction
    assert last.memory_bytes is None and last.pcie_gb_per_second == pytest.approx(15.75, rel=0.01)


def test_links():
    assert parse_links(LINKS) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert parse_nvlinks(NVLINKS) == {0: 26.562, 1: 26.562}
    with pytest.raises(ValueError, match="no row of GPUs"):
        parse_links("nothing\n")


def test_the_slowest_link_counts(tmp_path):
    topology = read_topology(answers(), system(tmp_path))
    assert topology.unknown == ()
    link = link_between(devices("GPU-aaaa-1", "GPU-aaaa-2"), topology)
    assert (link.words, link.is_nvlink) == ("NV18 (NVLink)", True)
    assert link.gb_per_second == pytest.approx(18 * 26.562)
    link = link_between(devices("GPU-aaaa-1", "GPU-aaaa-2", "GPU-bbbb-3"), topology)
    assert link.words in ("SYS (PCIe, and between CPUs)", "PHB (PCIe, through the CPU)")
    assert link.gb_per_second == pytest.approx(15.75, rel=0.01) and not link.is_nvlink
    assert Topology.from_json(topology.to_json()) == topology


def test_links_without_figures(tmp_path):
    topology = read_topology(answers(nvlink=OSError("not supported")), tmp_path)
    assert topology.unknown == ("the speed of NVLinks: nvidia-smi nvlink --status failed: not supported",)
    assert link_between(devices("GPU-aaaa-1", "GPU-aaaa-2"), topology).gb_per_second is None
    assert link_between(devices("GPU-aaaa-1", ""), topology).words == "links that are not known"
    assert link_between(devices("GPU-aaaa-1", "GPU-aaaa-1"), topology).words == "the memory of one card"
    assert link_between(devices("GPU-aaaa-1"), topology).words == "no link: there is one device"
    cpus = [{"device": f"CPU:{i}", "uuid": "", "host": "one"} for i in range(2)]
    assert link_between(cpus, topology).words == "the memory of one machine"


def test_between_machines_it_is_the_network(tmp_path):
    topology = read_topology(answers(), system(tmp_path))
    assert topology.interfaces == {"eth0": 12.5, "mlx5_0": 50.0}
    link = link_between(devices("GPU-aaaa-1", "GPU-cccc-1", hosts=("one", "two")), topology)
    assert link.is_network and link.gb_per_second == 50.0
    assert link.words == "the network between 2 machines (the fastest interface is mlx5_0)"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError("nvidia-smi"), "links between GPUs: there is no nvidia-smi here"),
        (OSError("No devices were found"), "links between GPUs: nvidia-smi failed: No devices were found"),
    ],
)
def test_without_nvidia_smi(tmp_path, error, told):
    topology = read_topology(answers(**{"--query-gpu": error}), tmp_path)
    assert topology == Topology(unknown=(told,))


def test_a_table_that_cannot_be_read(tmp_path):
    topology = read_topology(answers(topo="nothing"), tmp_path)
    assert len(topology.cards) == 3 and not topology.links
    assert topology.unknown == ("links between GPUs: nvidia-smi topo -m failed: there is no row of GPUs in its table",)


def test_uuids_of_visible_gpus():
    topology = Topology(tuple(parse_cards(CARDS)))
    assert uuids_of(["2", "0"], topology) == ["GPU-bbbb-3", "GPU-aaaa-1"]
    assert uuids_of(["GPU-bbbb", "GPU-aaaa", "7"], topology) == ["GPU-bbbb-3", "", ""]
