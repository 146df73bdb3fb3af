"""The quantizers of every type, against gguf-py's dequantization and its own simple quantizers."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from gguf import quants

from dali_gguf.convert.encode import to_float32
from dali_gguf.convert.quant_lanes import half_bits
from dali_gguf.convert.quantizers import KERNELS, first_not_finite, quantize

# root mean square error of Gaussian weights in units of their deviation: what a search that is no
# worse than llama-quantize's reaches (measured: its own, in the comment), with 0.5 % to spare
GAUSSIAN_ERROR = {
    T.Q8_0: 0.00540,  # .00536
    T.Q6_K: 0.01732,  # .0177
    T.Q5_K: 0.03530,  # .0362
    T.Q4_K: 0.07080,  # .0714
    T.Q3_K: 0.14440,  # .1511
    T.Q2_K: 0.26620,  # .2970
    T.Q5_0: 0.04030,  # .0428
    T.Q5_1: 0.03385,  # .0379
    T.Q4_0: 0.08140,  # .0860
    T.Q4_1: 0.07000,  # .0782
    T.IQ4_XS: 0.07460,  # .0768
    T.IQ4_NL: 0.07410,  # .0762
    T.MXFP4: 0.11330,  # .1181
}  # fmt: skip
TYPES = list(KERNELS)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def back(packed: np.ndarray, kind: T) -> np.ndarray:
    return quants.dequantize(packed, kind)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
class TestEveryType:
    def test_error_on_gaussian_weights(self, kind):
        x = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32) * 0.05
        packed = quantize(x, kind)
        block, size = GGML_QUANT_SIZES[kind]
        assert packed.shape == (64, 2048 // block * size)
        assert rms(x - back(packed, kind)) / 0.05 < GAUSSIAN_ERROR[kind]

    def test_importance_lowers_the_weighted_error(self, kind):
        rng = np.random.default_rng(1)
        x = rng.standard_t(4, (32, 512)).astype(np.float32)
        w = np.exp(2 * rng.standard_normal(512)).astype(np.float32)
        w /= w.mean()
        error = [rms(np.sqrt(w) * (x - back(quantize(x, kind, v), kind))) for v in (None, w)]
        assert error[1] <= error[0] * (1.0 if kind == T.Q8_0 else 0.97)

    def test_odd_values(self, kind):
        """Zeros, constants, one large value, one sign, tiny numbers: finite, and near."""
        x = np.zeros((7, 256), np.float32)  # 7 rows: groups of eight blocks do not come out even
        x[1], x[2], x[3, 17], x[4] = 1.0, -0.25, 1e4, np.linspace(0.5, 1, 256)
        x[5], x[6] = 1e-9, np.where(np.arange(256) % 2, 3.0, -3.0)
        y = back(quantize(x, kind), kind)
        assert np.isfinite(y).all()
        assert not y[0].any()
        coarse = 2000 if kind == T.MXFP4 else 600  # its neighbours of 10000 are 8192 and 12288
        assert abs(y[3, 17] - 1e4) < coarse and rms(np.delete(y[3], 17)) < 60
        for row in (1, 2, 4, 6):
            assert rms(y[row] - x[row]) <= 0.16 * rms(x[row])

    def test_same_bytes_row_by_row(self, kind):
        """Rows do not know of each other: any division of the work gives the same file."""
        x = np.random.default_rng(2).standard_normal((5, 512)).astype(np.float32)
        rows = [quantize(x[i : i + 1], kind) for i in range(5)]
        assert np.array_equal(quantize(x, kind), np.concatenate(rows))

    def test_values_of_the_type_survive(self, kind):
        """What was quantized once loses next to nothing the second time."""
        x = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
        once = back(quantize(x, kind), kind)
        again = back(quantize(once, kind), kind)
        exact = kind in (T.MXFP4, T.Q8_0)
        assert rms(once - again) <= (1e-6 if exact else 0.25 * GAUSSIAN_ERROR[kind] + 2e-3)


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1], ids=lambda t: t.name)
def test_no_worse_than_the_simple_quantizers(kind):
    x = np.random.default_rng(4).laplace(size=(32, 512)).astype(np.float32)
    ours, simple = (rms(x - back(p, kind)) for p in (quantize(x, kind), quants.quantize(x, kind)))
    assert ours <= simple


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16], ids=lambda t: t.name)
def test_plain_types_are_gguf_pys(kind):
    x = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    packed = quantize(x, kind)
    assert np.array_equal(packed.reshape(-1), quants.quantize(x, kind).view(np.uint8).reshape(-1))
    assert np.array_equal(to_float32(packed, kind), quants.dequantize(packed, kind))


def test_half_is_numpys():
    rng = np.random.default_rng(6)
    x = (rng.standard_normal(4000) * np.exp(rng.uniform(-18, 11, 4000))).astype(np.float32)
    x = np.clip(x, -65000, 65000)
    assert all(half_bits(v) == h for v, h in zip(x, x.astype(np.float16).view(np.uint16)))
    assert half_bits(np.float32(1e6)) == 0x7BFF  # the largest finite half, not infinity


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_found(bad):
    x = np.ones(1000, np.float32)
    assert first_not_finite(x) == -1
    x[777] = bad
    assert first_not_finite(x) == 777
