"""NumpyDevice with the three-part experts of a scheduler: it reads weights from where they are said
to lie."""

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from dali_gguf.routing import LayerExperts, Routing
from tests.numpy_device import NumpyDevice


@dataclass(eq=False)
class MoeStep:
    x: np.ndarray
    routing: Routing
    experts: LayerExperts
    parts: dict


class ArenaDevice(NumpyDevice):
    """The same sums in the same order as NumpyDevice.moe, whatever order the experts come in."""

    def rest(self, resting):
        pass

    def moe(self, x, routing, experts, addresses=None):
        if addresses is None:
            return super().moe(x, routing, experts)
        step = self.moe_begin(x, routing, experts)
        self.moe_run(step, np.flatnonzero(routing.workload), addresses)
        return self.moe_end(step)

    def moe_begin(self, x, routing, experts):
        return MoeStep(x, routing, experts, {})

    def moe_run(self, step, ids, addresses=None):
        for e in np.asarray(ids).tolist():
            assert e not in step.parts, "computed twice"
            own = step.experts if addresses is None else at(step.experts, e, addresses)
            t, _ = np.nonzero(step.routing.expert_ids == e)
            step.parts[e] = self.expert(step.x[t], own, e)

    def moe_end(self, step):
        out = np.zeros_like(step.x)
        for e in np.flatnonzero(step.routing.workload).tolist():
            t, slot = np.nonzero(step.routing.expert_ids == e)
            out[t] += step.routing.weights[t, slot, None] * step.parts[e]
        return out


def at(experts: LayerExperts, e: int, addresses: np.ndarray) -> LayerExperts:
    """The layer with expert e's bytes taken from addresses [3, E]."""

    def moved(tensors, role):
        size = tensors[e].nbytes
        data = np.frombuffer(ctypes.string_at(int(addresses[role, e]), size), np.uint8)
        return {e: replace(tensors[e], data=data)}

    return replace(
        experts, gate=moved(experts.gate, 0), up=moved(experts.up, 1), down=moved(experts.down, 2)
    )
