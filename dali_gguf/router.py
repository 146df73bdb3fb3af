"""Router logits -> which experts, with which weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_gguf.routing import Routing

SMALLEST_SUM = np.float32(
    2.0**-14
)  # llama.cpp's guard of the division, the smallest normal float16


@dataclass(frozen=True, slots=True, eq=False)
class RouterRule:
    """How an architecture turns router logits into weights.

    scoring: "softmax" (over all experts), "sigmoid" (each for itself, DeepSeek-V3), or
    "softmax_after" (chosen by logit, softmax over the chosen only, gpt-oss).
    n_group > 1: experts stand in groups, and only the best n_group_used groups of a token may
    be chosen from. normalize: the chosen weights are divided by their sum; then times scale.
    bias float32 [E] is added for choosing, not for weighting.
    """

    scoring: str = "softmax"
    n_group: int = 1
    n_group_used: int = 1
    normalize: bool = False
    scale: float = 1.0
    bias: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A layer's router: weight [E, D], a handle of the device; bias [E] of the logits, an array of
    the device, or None; n_used experts of a token are chosen by rule."""

    weight: Any
    bias: Any
    n_used: int
    rule: RouterRule


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float32."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def scores_of(logits: np.ndarray, scoring: str) -> np.ndarray:
    """What experts are compared and weighted by: [T, E]."""
    if scoring == "softmax":
        return softmax(logits)
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return logits


def best(scores: np.ndarray, n: int) -> np.ndarray:
    """Indices of the n largest along the last axis, largest first, ties to the lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :n]


def mask_groups(choice: np.ndarray, rule: RouterRule) -> np.ndarray:
    """-inf for experts outside a token's best groups.

    A group counts as its two best experts together (DeepSeek-V3, sigmoid) or as its best one
    (DeepSeek-V2, softmax).
    """
    n_token, n_expert = choice.shape
    grouped = choice.reshape(n_token, rule.n_group, n_expert // rule.n_group)
    n_best = 2 if rule.scoring == "sigmoid" else 1
    worth = np.sort(grouped, axis=-1)[..., -n_best:].sum(axis=-1)
    allowed = np.zeros((n_token, rule.n_group, 1), bool)
    np.put_along_axis(allowed[..., 0], best(worth, rule.n_group_used), True, axis=1)
    return np.where(allowed, grouped, -np.inf).reshape(n_token, n_expert)


def route(logits: np.ndarray, n_used: int, rule: RouterRule) -> Routing:
    """logits float32 [T, E] -> Routing. Slots are in order of falling score."""
    scores = scores_of(logits.astype(np.float32, copy=False), rule.scoring)
    choice = scores if rule.bias is None else scores + rule.bias
    if rule.n_group > 1:
        choice = mask_groups(choice, rule)
    ids = best(choice, n_used).astype(np.int32)  # [T, A]
    weights = np.take_along_axis(scores, ids, axis=1)
    if rule.scoring == "softmax_after":
        weights = softmax(weights)
    if rule.normalize:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), SMALLEST_SUM)
    weights = (weights * np.float32(rule.scale)).astype(np.float32)
    return Routing(ids, weights, np.bincount(ids.ravel(), minlength=logits.shape[1]))
