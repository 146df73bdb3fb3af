"""Every weight type: numpy reference = gguf-py, and the compiled products = the reference."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.kernels import rows
from dali_gguf.kernels.formats import FORMATS, expand_address, matmat_address, matvec_address
from dali_gguf.kernels.quantize import FLOAT, Q8, quantize_row, record_bytes
from tests.kernel_helpers import call, random_weights, reference_rows

TYPES = list(FORMATS)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_reference_equals_gguf(ggml_type):
    w = random_weights(ggml_type, 5, 512, np.random.default_rng(1))
    ours = reference_rows(ggml_type, w)
    theirs = gguf.quants.dequantize(w, ggml_type)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_expand_equals_reference(ggml_type):
    w = random_weights(ggml_type, 1, 512, np.random.default_rng(2))
    out, scratch = np.empty(512, np.float32), np.empty(256, np.uint8)
    function = expand_address(FORMATS[ggml_type])
    call(function, w.ctypes.data, 512, out.ctypes.data, scratch.ctypes.data)
    np.testing.assert_allclose(out, reference_rows(ggml_type, w)[0], rtol=2e-6, atol=1e-12)


def product(ggml_type, w, x, address=matvec_address):
    """out [T, rows], and the activations as the kernel sees them."""
    fmt, (tokens, n) = FORMATS[ggml_type], x.shape
    size = record_bytes(fmt.kind, n)
    records = np.zeros((tokens, size), np.uint8)
    seen = x
    if fmt.kind == FLOAT:
        records[:, : 4 * n] = x.view(np.uint8)
    else:
        for t in range(tokens):
            quantize_row(fmt.kind, x[t].ctypes.data, n, records[t].ctypes.data)
        block = 32 if fmt.kind == Q8 else 256
        d = records[:, n : n + 4 * n // block].copy().view(np.float32)
        seen = records[:, :n].view(np.int8).astype(np.float64) * np.repeat(d, block, axis=1)
    addresses = np.array([r.ctypes.data for r in records], np.intp)
    out = np.full((tokens, len(w) + 3), 7.0, np.float32)  # 3 columns that must stay untouched
    scratch = np.full(rows.SCRATCH + 64, 7, np.uint8)
    call(address(fmt), w.ctypes.data, w.shape[1], 0, len(w), n, addresses.ctypes.data,
         tokens, out.ctypes.data, out.strides[0], scratch.ctypes.data)
    assert (out[:, len(w) :] == 7.0).all() and (scratch[rows.SCRATCH :] == 7).all()
    return out[:, : len(w)], seen


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_products(ggml_type):
    rng = np.random.default_rng(3)
    for count, n in ((1, 256), (7, 512), (8, 256), (16, 768), (21, 4608)):
        w = random_weights(ggml_type, count, n, rng)
        full = reference_rows(ggml_type, w).astype(np.float64)
        x = rng.standard_normal((9, n)).astype(np.float32)
        y, seen = product(ggml_type, w, x)
        expected = seen @ full.T
        size = np.abs(seen) @ np.abs(full.T)
        assert (np.abs(y - expected) <= 1e-6 * size + 1e-30).all()
        for tokens in (1, 2, 3, 4, 5, 9):  # both ways, the same bits
            part, _ = product(ggml_type, w, x[:tokens], matmat_address)
            assert (part == y[:tokens]).all(), f"{tokens} tokens, {count} x {n}"


@pytest.mark.parametrize("ggml_type", [t for t in TYPES if FORMATS[t].kind == Q8],
                         ids=lambda t: t.name)
def test_products_of_odd_numbers_of_blocks(ggml_type):
    """Nibbles are taken two blocks at a time; the last one alone."""
    rng = np.random.default_rng(6)
    for n in (32, 96, 32 * 33):
        w, x = random_weights(ggml_type, 11, n, rng), rng.standard_normal((2, n)).astype(np.float32)
        y, seen = product(ggml_type, w, x)
        full = reference_rows(ggml_type, w).astype(np.float64)
        assert (np.abs(y - seen @ full.T) <= 1e-6 * (np.abs(seen) @ np.abs(full.T)) + 1e-30).all()
        assert (product(ggml_type, w, x, matmat_address)[0] == y).all()


def int8_as_ggml(x, kind):
    """The activations as ggml's int8 products see them: Q8_0 (a half scale a 32) or Q8_K."""
    block = 32 if kind == Q8 else 256
    parts = x.astype(np.float64).reshape(len(x), -1, block)
    d = (np.abs(parts).max(2, keepdims=True) / 127).astype(np.float32)
    q = np.rint(parts / d)
    return (q * (d.astype(np.float16) if kind == Q8 else d)).reshape(x.shape)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_error_is_no_larger_than_of_ggmls_int8_products(ggml_type):
    rng, kind = np.random.default_rng(7), FORMATS[ggml_type].kind
    w = random_weights(ggml_type, 64, 2048, rng)
    x = rng.standard_normal((16, 2048)).astype(np.float32)
    full = reference_rows(ggml_type, w).astype(np.float64)
    exact, y = x.astype(np.float64) @ full.T, product(ggml_type, w, x)[0]
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    if kind == FLOAT:  # ggml rounds the activations to the weights' type, or not at all
        assert error < 2e-6
        return
    theirs = np.linalg.norm(int8_as_ggml(x, kind) @ full.T - exact) / np.linalg.norm(exact)
    assert error <= 1.02 * theirs
    print(f"{ggml_type.name}: relative error {error:.5f}, ggml's {theirs:.5f}")


def test_products_by_eye():
    """Q8_0 rows of ones and a scale of 2: the sum of the activations, doubled."""
    block = np.zeros((1, 34), np.uint8)
    block[:, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[:, 2:] = 1
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = [127, -1, 2, 3]  # largest 127: the quantized values are exact
    y, _ = product(Q.Q8_0, block, x)
    assert y[0, 0] == 262.0


@pytest.mark.parametrize("ggml_type", [Q.Q8_0, Q.Q4_K, Q.F16], ids=lambda t: t.name)
def test_nan_shows(ggml_type):
    w = random_weights(ggml_type, 8, 256, np.random.default_rng(4))
    x = np.ones((1, 256), np.float32)
    x[0, 100] = np.nan
    y, _ = product(ggml_type, w, x)
    assert np.isnan(y).all()
