import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.quant_blocks import random_tensor

torch = pytest.importorskip("torch")
from dali_gguf.errors import UnsupportedError  # noqa: E402
from dali_gguf.offload.torch_dequantize import DECODERS, dequantize  # noqa: E402


@pytest.mark.parametrize("kind", DECODERS, ids=lambda k: k.name)
def test_same_bits_as_gguf(kind):
    tensor = random_tensor(kind, (37, 512), seed=int(kind))
    ours = dequantize(torch.from_numpy(tensor.data), kind, 37, 512).numpy()
    theirs = quants.dequantize(tensor.data.reshape(37, -1), kind)
    assert np.array_equal(ours.view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32))


def test_every_exponent_of_mxfp4():
    blocks = np.zeros((255, 17), np.uint8)
    blocks[:, 0] = np.arange(255)
    blocks[:, 1:] = np.arange(16) * 17
    ours = dequantize(torch.from_numpy(blocks), GGMLQuantizationType.MXFP4, 255, 32).numpy()
    assert np.array_equal(ours, quants.dequantize(blocks, GGMLQuantizationType.MXFP4))


def test_an_unread_type_is_named():
    with pytest.raises(UnsupportedError, match="TQ1_0"):
        dequantize(torch.zeros(54, dtype=torch.uint8), GGMLQuantizationType.TQ1_0, 1, 256)
