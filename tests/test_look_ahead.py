"""offload/look_ahead.py and trial.py: what is guessed, when it is trusted, when it is switched
off."""

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.offload.look_ahead import ENOUGH, LookAhead
from dali_gguf.router import RouterRule, route
from dali_gguf.tensor import Tensor
from tests.numpy_device import NumpyDevice

D, E, A, LAYERS = 32, 16, 3, 4


def routers(rng):
    rule = RouterRule()
    maps = {}
    for layer in range(LAYERS):
        weight = rng.normal(size=(E, D)).astype(np.float32)
        maps[layer] = (Tensor(f"r{layer}", Q.F32, (E, D), weight.reshape(-1).view(np.uint8)), rule)
    return maps


def run(rng, steps, keep):
    """Each layer's input is keep times the one before, plus a fixed and a random vector."""
    maps, device = routers(rng), NumpyDevice()
    ahead = LookAhead(device, maps, A, D)
    fixed = (0.3 * rng.normal(size=(LAYERS, D))).astype(np.float32)
    right = asked = 0
    for step in range(steps):
        h, guesses = rng.normal(size=(1, D)).astype(np.float32), {}
        for layer in range(LAYERS):
            fresh = (1 - keep) * rng.normal(size=(1, D)).astype(np.float32)
            h = keep * h + fixed[layer] + fresh
            routing = route(device.matmul(h, maps[layer][0])[0], A, maps[layer][1])
            ahead.observe(layer, h, routing.expert_ids)
            for ids in guesses.pop(layer, []):
                right += int((routing.workload[ids] > 0).sum())
                asked += len(ids)
            for target, ids in ahead.guess(layer, h):
                guesses.setdefault(target, []).append(ids)
            if step < ENOUGH:
                assert not guesses, "nothing is trusted before there are outcomes"
    return right, asked


def test_steady_inputs_are_predicted_and_trusted():
    right, asked = run(np.random.default_rng(0), 200, keep=1.0)
    assert asked > 200 * A and right / asked > 0.97


def test_random_inputs_are_not_trusted():
    _, asked = run(np.random.default_rng(1), 200, keep=0.0)
    assert asked < 20
