"""Compressors: the values against NumPy bit by bit, the bytes by formula, the error by its bound, and what is not finite."""

import math

import numpy as np
import numpy_compressors as model
import pytest
import tensorflow as tf

from tfdist.extensions.compression import NAMES, BFloat16, Compressor, Exact, Int4, Int8, TopK, compressor_of

pytestmark = pytest.mark.as_traced

F = np.float32
SIZES = [5, 4097, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 31, 256, 777))]
CASES = [
    pytest.param(Exact(), lambda x: x, lambda n: 4 * n, id="exact"),
    pytest.param(BFloat16(), model.as_bfloat16, lambda n: 4 * math.ceil(n / 2), id="bfloat16"),
    pytest.param(Int8(), model.int8, lambda n: (256 + 4) * math.ceil(n / 256), id="int8"),
    pytest.param(Int8(64), lambda x: model.int8(x, 64), lambda n: (64 + 4) * math.ceil(n / 64), id="int8-64"),
    pytest.param(Int4(), model.int4, lambda n: 16 * math.ceil(n / 32) + 4 * math.ceil(math.ceil(n / 32) / 2), id="int4"),
    pytest.param(
        Int4(128),
        lambda x: model.int4(x, 128),
        lambda n: 64 * math.ceil(n / 128) + 4 * math.ceil(math.ceil(n / 128) / 2),
        id="int4-128",
    ),
    pytest.param(TopK(), model.top_k, lambda n: _kept_bytes(n, 0.01) + Int8().bytes_of(n), id="top_k"),
    pytest.param(
        TopK(0.1, "int4"),
        lambda x: model.top_k(x, 0.1, model.int4),
        lambda n: _kept_bytes(n, 0.1) + Int4().bytes_of(n),
        id="top_k-int4",
    ),
    pytest.param(TopK(0.3, None), lambda x: model.top_k(x, 0.3, None), lambda n: _kept_bytes(n, 0.3), id="top_k-alone"),
]


def _kept_bytes(n, fraction):
    chunks = math.ceil(n / 4096)
    kept = chunks * math.ceil(round(fraction * math.ceil(n / chunks), 6))
    return 4 * kept + 4 * math.ceil(kept / 2)


def through(compressor, x):
    """Returns the rows `x` encoded and decoded, as a traced step does it."""

    @tf.function(autograph=False)
    def there_and_back(x):
        words = compressor.encode(x)
        assert words.shape == (x.shape[0], compressor.bytes_of(x.shape[1]) // 4)
        return words, compressor.decode(words, x.shape[1])

    words, decoded = there_and_back(tf.constant(x, tf.float32))
    assert words.dtype == tf.int32 and words.shape == (x.shape[0], compressor.bytes_of(x.shape[1]) // 4)
    return decoded.numpy()


def numbers(rows, n, seed=0):
    """Rows whose sizes differ by ten powers of ten, with zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, n)) * 10.0 ** rng.integers(-6, 4, size=(rows, n))
    return np.where(rng.random((rows, n)) < 0.1, 0, x).astype(F)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("compressor", "expected", "bytes_of"), CASES)
def test_values_and_bytes(compressor, expected, bytes_of, n):
    x = numbers(3, n)
    assert compressor.bytes_of(n) == bytes_of(n)
    np.testing.assert_array_equal(through(compressor, x), np.stack([expected(row) for row in x]))


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("compressor", [Int8(), TopK(0.01, None), TopK(0.3, None), TopK()], ids=str)
def test_sums_are_of_what_is_decoded_in_order(compressor, rows):
    x = numbers(rows, 4099, seed=6)
    x[:, 1] = 1e5  # in the same place of all
    x[1, 7] = np.nan
    words = compressor.encode(tf.constant(x))
    expected = np.add.reduce(compressor.decode(words, 4099).numpy())
    assert expected[1] == rows * F(1e5) or compressor == Int8()
    np.testing.assert_array_equal(compressor.summed(words, 4099), expected)


@pytest.mark.parametrize(
    ("compressor", "each"),
    [(BFloat16(), 2), (Int8(), 1.015625), (Int4(), 0.5625), (TopK(rest=None), 6 * 41 / 4096), (TopK(), 6 * 41 / 4096 + 1.015625)],
    ids=str,
)
def test_bytes_of_a_number(compressor, each):
    assert compressor.bytes_of(2**20) == each * 2**20


@pytest.mark.parametrize(("compressor", "bound"), [(Int8(), 1 / 254), (Int4(), 1 / 14 * (1 + 2**-8))], ids=str)
def test_the_error_is_half_a_step_of_the_block(compressor, bound):
    x = numbers(2, 4096, seed=1)
    error = np.abs(through(compressor, x) - x).reshape(-1, compressor.block_size).max(1)
    largest = np.abs(x).reshape(-1, compressor.block_size).max(1)
    assert (error <= bound * largest * (1 + 1e-5)).all()
    assert (error >= 0.5 * bound * largest).mean() > 0.5  # and the bound is none that anything meets


def test_the_largest_are_exact():
    x = numbers(2, 9000, seed=2)
    kept = np.sort(np.abs(x), axis=1)[:, -10:]
    decoded = through(TopK(0.01), x)
    for row, back, largest in zip(x, decoded, kept, strict=True):
        found = np.isin(np.abs(row), largest)
        assert found.sum() >= 10
        np.testing.assert_array_equal(back[found], row[found])
    assert np.abs(decoded - x).max() < np.abs(through(Int8(), x) - x).max()


@pytest.mark.parametrize(("compressor", "expected", "bytes_of"), CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "all"])
def test_what_is_not_finite_stays_so(compressor, expected, bytes_of, bad):
    x = numbers(2, 777, seed=3)
    x[1, 300] = np.nan if bad == "all" else bad
    if bad == "all":
        x[1] = np.nan
    decoded = through(compressor, x)
    assert not np.isfinite(decoded[1]).all()
    if bad != "all":
        assert not np.isfinite(decoded[1, 300])
    np.testing.assert_array_equal(decoded[0], expected(x[0]))  # another row


@pytest.mark.parametrize("compressor", [Int8(), Int4()], ids=str)
def test_a_maximum_that_drops_nan(compressor, monkeypatch):
    """XLA's, and that of GPU kernels: the scale is told by the codes."""
    x = numbers(1, 512, seed=4)
    x[0, 3], x[0, 300:302] = np.nan, (np.inf, -np.inf)
    original = tf.reduce_max
    monkeypatch.setattr(tf, "reduce_max", lambda x, **how: original(tf.where(tf.math.is_nan(x), 0.0, x), **how))
    assert not np.isfinite(through(compressor, x)[0, [3, 300, 301]]).any()
    x[0] = np.nan
    assert not np.isfinite(through(compressor, x)).any()


@pytest.mark.parametrize(("compressor", "expected", "bytes_of"), CASES)
def test_more_that_is_not_finite_than_is_kept(compressor, expected, bytes_of):
    x = numbers(1, 1000, seed=5)
    x[0, 100:500] = np.inf
    assert not np.isfinite(through(compressor, x)).all()


@pytest.mark.parametrize("compressor", [Int8(), Int4()], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 2.0**-127, 1e-36, 3e38])
def test_ends_of_the_range(compressor, size):
    x = np.full((1, 300), size, F)
    x[0, 1::2] *= -1
    decoded = through(compressor, x)
    lost = size / compressor._most < 2.0**-126
    np.testing.assert_allclose(decoded, np.zeros_like(x) if lost else x, rtol=2**-8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Int8(0), ["`block_size`", "block_size=0"]),
        (lambda: Int8(6), ["`block_size`", "multiple of 4", "block_size=6", "4, 8"]),
        (lambda: Int4(12), ["`block_size`", "multiple of 8", "8, 16"]),
        (lambda: Int4(32.0), ["`block_size`", "32.0"]),
        (lambda: TopK(0), ["`fraction`", "fraction=0"]),
        (lambda: TopK(1.5), ["`fraction`", "(0, 1]"]),
        (lambda: TopK(True), ["`fraction`"]),
        (lambda: TopK(rest="int2"), ["`rest`", "int2", "int4"]),
        (lambda: TopK(rest=Int8()), ["`rest`"]),
        (lambda: compressor_of("gradient_compression", "int2"), ["`gradient_compression`", "int2", '"int8"', '"top_k"']),
        (lambda: compressor_of("gradient_compression", Int8), ["`gradient_compression`", "`Int8()`"]),
        (lambda: compressor_of("gradient_compression", 8), ["`gradient_compression`", "8"]),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    for word in words:
        assert word in str(caught.value)


def test_names():
    assert {"bfloat16": BFloat16(), "int8": Int8(256), "int4": Int4(32), "top_k": TopK(0.01, "int8")} == NAMES
    assert all(compressor_of("x", name) is NAMES[name] for name in NAMES)
    assert compressor_of("x", None) is None


def test_one_of_ones_own_says_its_name():
    class Mine(Compressor):
        def encode(self, x):
            return tf.bitcast(x, tf.int32)

        def decode(self, words, n):
            return tf.bitcast(words, tf.float32)

        def bytes_of(self, n):
            return 4 * n

    assert repr(Mine()) == "Mine()"
    assert compressor_of("x", mine := Mine()) is mine
