"""A model's routers for the hybrid scheduler: the predictor, and neighbours as one product."""

import numpy as np

from dali_gguf.offload.paired_routers import PairedRouters
from dali_gguf.offload.prefetch import Predictor, RouterMap
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.torch_device import TorchDevice
from dali_gguf.offload.torch_weight import TorchWeight


def host_bias(device: TorchDevice, model, layer: int) -> np.ndarray | None:
    """float32 [E] or None."""
    bias = model.layers[layer].feed.router.bias
    return None if bias is None else device.to_host(bias)


def predictor(kind: str, device: TorchDevice, model, n_used: int, known: RunCounts) -> Predictor:
    """With what earlier runs learned. model: layers.Model."""
    routers = {}
    for layer, (weight, rule) in model.routers.items():
        dense, bias = device.to_host(weight.dense()), host_bias(device, model, layer)
        routers[layer] = RouterMap(dense, n_used, bias, rule.scoring == "sigmoid", rule.bias)
    stored, layers = known.stored, sorted(routers)
    means = None if stored is None else dict(zip(layers, stored.means))
    has_maps = stored is not None and stored.maps is not None
    maps = dict(zip(layers, stored.maps)) if has_maps else None
    return Predictor(kind, routers, known.counts, maps, means)


def paired(
    device: TorchDevice, model, pairs: list[TorchWeight], predictor: Predictor | None
) -> PairedRouters | None:
    """None where predictions need something else, or pairs (torch_weight.pairs_of) is empty."""
    if predictor is None or not predictor.stacks or not pairs:
        return None
    biases = {layer: host_bias(device, model, layer) for layer in model.routers}
    return PairedRouters(device, dict(zip(model.routers, pairs)), biases)
