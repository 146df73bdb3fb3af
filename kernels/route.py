"""Router logits to experts and weights, compiled: router.py, the reference, knows groups too."""

import numpy as np

from dali_gguf.kernels.simd import address_of, jit, load_f32x8, splat_f32x8, store, v_fsub
from dali_gguf.kernels.vmath import exp_f32x8
from dali_gguf.router import SMALLEST_SUM, RouterRule, route as route_groups
from dali_gguf.routing import Routing

SOFTMAX, SIGMOID, SOFTMAX_AFTER = 0, 1, 2
SCORING = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_after": SOFTMAX_AFTER}
NO_BIAS = np.zeros(0, np.float32)


@jit
def exponentials(x, shift, sign, n, out):
    """out[i] = exp(sign * (x[i] - shift)) ; out has room for n + 8 numbers."""
    source, target = address_of(x), address_of(out)
    for i in range(0, n // 8 * 8, 8):
        v = v_fsub(load_f32x8(source + 4 * i), splat_f32x8(shift))
        if sign < 0:
            v = v_fsub(splat_f32x8(np.float32(0)), v)
        store(target + 4 * i, exp_f32x8(v))
    for i in range(n // 8 * 8, n):
        v = splat_f32x8(sign * (x[i] - shift))
        store(target + 4 * n, exp_f32x8(v))
        out[i] = out[n]


@jit
def softmax(x, n, out):
    top = x[0]
    for i in range(1, n):
        top = max(top, x[i])
    exponentials(x, top, np.float32(1), n, out)
    total = np.float32(0)
    for i in range(n):
        total += out[i]
    for i in range(n):
        out[i] /= total


@jit
def choose(choice, n_used, ids):
    """Indices of the n_used largest, largest first, ties to the lower index."""
    for e in range(len(choice)):
        at = min(e, n_used - 1)
        if e >= n_used and not choice[e] > choice[ids[at]]:
            continue
        while at > 0 and choice[e] > choice[ids[at - 1]]:
            ids[at] = ids[at - 1]
            at -= 1
        ids[at] = e


@jit
def route_rows(logits, scoring, normalize, scale, bias, ids, weights, workload):
    """Fills ids, weights [T, A] and workload [E]."""
    n_expert, n_used = logits.shape[1], ids.shape[1]
    scores, choice = np.empty(n_expert + 8, np.float32), np.empty(n_expert + 8, np.float32)
    picked = np.empty(n_used + 8, np.float32)
    scale = np.float32(scale)
    workload[:] = 0
    for t in range(len(logits)):
        x = logits[t]
        if scoring == SOFTMAX:
            softmax(x, n_expert, scores)
        elif scoring == SIGMOID:
            exponentials(x, np.float32(0), np.float32(-1), n_expert, scores)
            for e in range(n_expert):
                scores[e] = np.float32(1) / (np.float32(1) + scores[e])
        else:
            for e in range(n_expert):
                scores[e] = x[e]
        for e in range(n_expert):
            choice[e] = scores[e] + (bias[e] if len(bias) else np.float32(0))
        choose(choice[:n_expert], n_used, ids[t])
        total = np.float32(0)
        for a in range(n_used):
            picked[a] = scores[ids[t, a]]
            workload[ids[t, a]] += 1
        if scoring == SOFTMAX_AFTER:
            for a in range(n_used):
                choice[a] = picked[a]
            softmax(choice, n_used, picked)
        for a in range(n_used):
            total += picked[a]
        total = max(total, SMALLEST_SUM) if normalize else np.float32(1)
        for a in range(n_used):
            weights[t, a] = picked[a] / total * scale


def route(logits: np.ndarray, n_used: int, rule: RouterRule) -> Routing:
    """logits float32 [T, E] -> Routing, as router.route."""
    if rule.n_group > 1:
        return route_groups(logits, n_used, rule)
    n_token, n_expert = logits.shape
    ids, weights = np.empty((n_token, n_used), np.int32), np.empty((n_token, n_used), np.float32)
    workload = np.empty(n_expert, np.int64)
    route_rows(logits, SCORING[rule.scoring], rule.normalize, rule.scale,
               NO_BIAS if rule.bias is None else rule.bias, ids, weights, workload)
    return Routing(ids, weights, workload)
