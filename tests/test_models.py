"""Every architecture against transformers in float32, on tiny random checkpoints made here."""

from itertools import islice

import numpy as np
import pytest
import torch

from dali_gguf import models
from dali_gguf.engine import Engine
from dali_gguf.sampler import SamplingParams
from tests.numpy_device import NumpyDevice
from tests.tiny_models import KINDS, N_VOCAB, checkpoint, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
GREEDY = SamplingParams(temperature=0, max_tokens=-2)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(3).integers(0, N_VOCAB, 40).tolist()


@torch.no_grad()
def reference(model, ids: list[int], n: int) -> tuple[np.ndarray, list[int]]:
    """Logits of every position, and n greedy tokens."""
    out = model(torch.tensor([ids]), use_cache=True)
    logits, cache, tokens = out.logits[0].numpy(), out.past_key_values, []
    last = out.logits[0, -1]
    for _ in range(n):
        tokens.append(int(last.argmax()))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        last, cache = out.logits[0, -1], out.past_key_values
    return logits, tokens


@pytest.mark.parametrize("name", KINDS)
def test_same_logits_and_greedy_tokens_as_transformers(name, prompt, tmp_path):
    model = checkpoint(KINDS[name])
    path = write_gguf(tmp_path / "model.gguf", KINDS[name], model)
    expected, tokens = reference(model, prompt, 32)
    for device in (NumpyDevice(), "cpu"):
        with Engine(path, n_ctx=128, n_batch=16, device=device, kv_type="f32") as engine:
            logits = engine.logits(prompt)
            assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()
            assert list(islice(engine.tokens(prompt, GREEDY), 32)) == tokens


def test_every_architecture_has_a_test():
    assert {kind.architecture for kind in KINDS.values()} == set(models.architectures())
