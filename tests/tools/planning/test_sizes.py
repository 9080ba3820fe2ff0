"""Sizes and counts as people write them."""

import numpy as np
import pytest

from tfdist.tools.planning.sizes import bytes_of, count_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80 GB", 8e10),
        ("80GB", 8e10),
        ("80gb", 8e10),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        (" 1.5 TB ", 1.5e12),
        ("512 MiB", 2**29),
        ("640 kB", 640e3),
        ("100 B", 100),
        ("8e10", 8e10),
        ("80,000,000,000", 8e10),
        ("1,500.5 MB", 1.5005e9),
        (np.float32(8e10), float(np.float32(8e10))),
        (8e10, 8e10),
        (2**30, 2**30),
    ],
)
def test_sizes(text, size):
    assert bytes_of("memory", text) == size


@pytest.mark.parametrize(
    "text", ["", "80 XB", "GB", "-3 GB", "0 GB", 0, -1.0, None, True, "80 GB of memory", "1.2.3 GB", "1,5 GB", float("nan")]
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"`memory` must be a size in bytes.*Received: memory=.*Write \"80 GB\""):
        bytes_of("memory", text)


@pytest.mark.parametrize(
    ("text", "count"), [("1.4T", 1.4e12), ("300 B", 3e11), ("70b", 7e10), ("5M", 5e6), ("2e23", 2e23), (7, 7)]
)
def test_counts(text, count):
    assert count_of("tokens", text) == count


@pytest.mark.parametrize("text", ["", "many", "3 GB", -1, True, "0"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match="`tokens` must be a positive number"):
        count_of("tokens", text)
