"""Vendors' data sheets of devices, as a `Hardware` of which nothing is measured.

Rates are of dense products, without sparsity, and count half: what large products reach in practice is between 40 and 70 % of the
peak. A link counts one direction of the sheet's figure, which is of both, and 80 % of it; memory 80 %. Latencies, the cost of an
operation and the overlap are not on any sheet: they are guesses of the usual size.

| device | source |
|---|---|
| v100 | NVIDIA V100 Tensor Core GPU data sheet, 2020: SXM2, 32 GB |
| a100 | NVIDIA A100 Tensor Core GPU data sheet, 2022: SXM, 80 GB |
| h100 | NVIDIA H100 Tensor Core GPU data sheet, 2024: SXM, 80 GB |
| h200 | NVIDIA H200 Tensor Core GPU data sheet, 2024: SXM, 141 GB |
| l40s | NVIDIA L40S data sheet, 2023: PCIe, 48 GB |

Between hosts: the adapters of the vendor's own machines, for each GPU: DGX-1 12.5, DGX A100 25, DGX H100 and H200 50 GB/s; of the
L40S 25 GB/s are assumed.
"""

from tfdist import errors
from tfdist.tools.planning.hardware import BUS_FACTORS, Collective, Hardware

OF_PEAK = 0.5
OF_BANDWIDTH = 0.8
# Guesses: of a collective within a host and between hosts, of an operation, and of what overlap costs.
_ALPHA_SECONDS = {"within": 20e-6, "between": 50e-6}
_OPERATION_SECONDS = 10e-6
_OVERLAP = 1.1
# Keras's Adam for each parameter: 12 operations of elements, none of which TensorFlow fuses on a GPU, read and write 30 numbers.
_UPDATE_BYTES = 30 * 4
# A product below this many FLOPs is dominated by its start, not by its rate.
_SMALL_FLOPS = 1e9


def _nvidia(name: str, half: float, single: float, sizes: tuple[float, float, float, float], sheet: str) -> Hardware:
    """Returns what may be expected of a device by the peaks of its data sheet; nothing of it is measured."""
    memory, bandwidth, link, network = (1e9 * size for size in sizes)
    # What TensorFlow multiplies float32 with is TensorFloat-32, where there is one.
    tflops = {"float16": half, "bfloat16": half, "float32": single}
    links = {
        kind: dict.fromkeys(BUS_FACTORS, Collective(_ALPHA_SECONDS[kind], OF_BANDWIDTH * speed))
        for kind, speed in (("within", link), ("between", network))
    }
    return Hardware(
        name=f"NVIDIA {name}",
        matmul={dtype: [(_SMALL_FLOPS, OF_PEAK * 1e12 * peak)] for dtype, peak in tflops.items()},
        bytes_per_second=OF_BANDWIDTH * bandwidth,
        operation_seconds=_OPERATION_SECONDS,
        links=links,
        overlap=_OVERLAP,
        update_seconds=_UPDATE_BYTES / (OF_BANDWIDTH * bandwidth),
        source=f"NVIDIA {sheet} data sheet; not measured",
        memory_bytes=memory,
    )


# Dense TFLOP/s in half precision and of float32; GB of memory, and GB/s of memory, of the link (one direction), of the network.
DATA_SHEETS = {
    "v100": _nvidia("V100 SXM2", 125, 15.7, (32, 900, 150, 12.5), "V100"),
    "a100": _nvidia("A100 SXM", 312, 156, (80, 2039, 300, 25), "A100"),
    "h100": _nvidia("H100 SXM", 989.5, 494.5, (80, 3350, 450, 50), "H100"),
    "h200": _nvidia("H200 SXM", 989.5, 494.5, (141, 4800, 450, 50), "H200"),
    "l40s": _nvidia("L40S", 362, 183, (48, 864, 32, 25), "L40S"),
}


def from_sheet(name: str) -> Hardware:
    """Returns the device called `name`, in upper or lower case. Raises ValueError when there is no data sheet of it."""
    sheet = DATA_SHEETS.get(name.lower()) if isinstance(name, str) else None
    if sheet is None:
        fix = "Measure it: `python -m tfdist calibrate --out FILE`."
        raise errors.value_error(f"`hardware` must be one of {', '.join(DATA_SHEETS)}.", hardware=name, fix=fix)
    return sheet
