"""DeepSeek-V2, V2-Lite, V3, R1: latent attention (MLA), shared experts, first layers dense.

Keys and values are kept as one latent vector a token (kv_rank numbers) and one rotated key part
(n_rot numbers) that all heads share. Newer files split the matrix that expands the latent into
attn_k_b and attn_v_b, so that it can be applied to the query and to the result instead of to
every key: attention then runs on the latents themselves, with one key head. Older files have
attn_kv_b: there keys and values are expanded and kept a head.
"""

from dali_gguf.config import ModelConfig
from dali_gguf.device import Array, RopeParams
from dali_gguf.errors import ModelFileError
from dali_gguf.layers import FeedForward, Layer, MoE, Norm, Pass
from dali_gguf.rope import attention_scale, rope_params
from dali_gguf.router import RouterRule
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    if not c.kv_rank:
        raise ModelFileError(
            f"{w.path}: key deepseek2.attention.kv_lora_rank is missing; "
            "expected the rank of the latent keys"
        )
    if c.rope.n_rot >= head_sizes(c)[0]:
        raise ModelFileError(
            f"{w.path}: key deepseek2.rope.dimension_count is {c.rope.n_rot}; "
            f"expected less than the size of a key ({head_sizes(c)[0]})"
        )
    rope = rope_params(c.rope, interleaved=True)
    kind = LatentAttention if is_latent(w) else ExpandedAttention
    return [Layer(w, c, i, kind(w, c, i, rope), feed(w, c, i)) for i in range(c.n_layer)]


def is_latent(w: Weights) -> bool:
    return w.has("blk.0.attn_k_b.weight")


def kv_shape(w: Weights, c: ModelConfig) -> tuple[int, int, int]:
    """Key heads, size of a key, size of a value in the cache (0: values are a part of the keys)."""
    return (1, c.kv_rank + c.rope.n_rot, 0) if is_latent(w) else (c.n_head, *head_sizes(c))


def head_sizes(c: ModelConfig) -> tuple[int, int]:
    """Key and value of a head when expanded. Files with attn_kv_b have no *_mla keys."""
    return c.k_size_mla or c.k_size, c.v_size_mla or c.v_size


def feed(w: Weights, c: ModelConfig, i: int) -> FeedForward | MoE:
    e = c.experts
    if i < c.n_layer_dense or e.n_expert == 0:
        return FeedForward(w, c, i, c.n_ff)
    rule = RouterRule(
        scoring=e.scoring or "softmax",
        n_group=e.n_group,
        n_group_used=e.n_group_used,
        normalize=e.norm is True,
        scale=e.scale,
        bias=w.host_vector(f"blk.{i}.exp_probs_b.bias", e.n_expert),
    )
    shared = FeedForward(w, c, i, e.n_ff * e.n_shared, "_shexp") if e.n_shared else None
    return MoE(w, c, i, rule, e.n_ff, shared=shared)


class Query:
    """[T, D] -> [T, H, K], in one matrix (V2-Lite) or through a low rank (V2, V3)."""

    def __init__(self, w: Weights, c: ModelConfig, i: int, k_size: int):
        self.device, self.shape, p = w.device, (c.n_head, k_size), f"blk.{i}.attn_q"
        self.low_rank = not w.has(p + ".weight")
        if self.low_rank:
            self.down = w.matrix(p + "_a.weight", c.q_rank, c.n_embd)
            self.norm = Norm(w, p + "_a_norm.weight", c.q_rank, c.eps)
            self.up = w.matrix(p + "_b.weight", c.n_head * k_size, c.q_rank)
        else:
            self.up = w.matrix(p + ".weight", c.n_head * k_size, c.n_embd)

    def __call__(self, x: Array) -> Array:
        if self.low_rank:
            x = self.norm(self.device.matmul(x, self.down)[0])
        return self.device.matmul(x, self.up)[0].reshape(len(x), *self.shape)


class LatentAttention:
    """Attention on the latents: key = [latent, rotated part], value = the latent, one key head."""

    def __init__(self, w: Weights, c: ModelConfig, i: int, rope: RopeParams):
        p, n_rot = f"blk.{i}.attn_", c.rope.n_rot
        self.device, self.config, self.layer, self.rope = w.device, c, i, rope
        k_size, self.v_size = head_sizes(c)
        self.k_plain = k_size - n_rot
        self.query = Query(w, c, i, k_size)
        self.kv_down = w.row_parts(p + "kv_a_mqa.weight", (c.kv_rank, n_rot), c.n_embd)
        self.kv_norm = Norm(w, p + "kv_a_norm.weight", c.kv_rank, c.eps)
        self.output = w.matrix(p + "output.weight", c.n_embd, c.n_head * self.v_size)
        self.scale = attention_scale(c.rope, k_size)
        self.expansion(w, p)

    def expansion(self, w: Weights, p: str) -> None:
        c = self.config
        self.k_up = w.matrix(p + "k_b.weight", c.n_head, c.kv_rank, self.k_plain)
        self.v_up = w.matrix(p + "v_b.weight", c.n_head, self.v_size, c.kv_rank)
        w.find(p + "kv_b.weight", None, c.kv_rank)  # a few files hold both forms

    def __call__(self, x: Array, run: Pass) -> Array:
        device, positions, n_token = self.device, run.step.positions, run.step.size
        q = self.query(x)  # [T, H, k_plain + n_rot]
        q_rotated = device.rope(q[:, :, self.k_plain :], positions, self.rope)
        latent, k_rotated = device.matmul(x, *self.kv_down)  # [T, R], [T, n_rot]
        latent = self.kv_norm(latent)
        k_rotated = device.rope(k_rotated[:, None, :], positions, self.rope)  # one key head
        out = self.attend(q[:, :, : self.k_plain], q_rotated, latent, k_rotated, run)  # [T, H, V]
        return device.matmul(out.reshape(n_token, -1), self.output)[0]

    def attend(
        self, q: Array, q_rotated: Array, latent: Array, k_rotated: Array, run: Pass
    ) -> Array:
        q = self.device.concat(
            self.device.batched_matmul(q, self.k_up), q_rotated
        )  # [T, H, R + n_rot]
        k = self.device.concat(latent[:, None, :], k_rotated)  # [T, 1, R + n_rot]
        out = self.device.attention(
            q, k, None, run.cache, self.layer, run.step, self.scale, v_size=self.config.kv_rank
        )
        return self.device.batched_matmul(out, self.v_up)


class ExpandedAttention(LatentAttention):
    """Keys [T, H, k_plain + n_rot] and values [T, H, V] of every head, expanded from the latent."""

    def expansion(self, w: Weights, p: str) -> None:
        c = self.config
        self.kv_up = w.matrix(p + "kv_b.weight", c.n_head * (self.k_plain + self.v_size), c.kv_rank)

    def attend(
        self, q: Array, q_rotated: Array, latent: Array, k_rotated: Array, run: Pass
    ) -> Array:
        (kv,) = self.device.matmul(latent, self.kv_up)
        kv = kv.reshape(run.step.size, self.config.n_head, self.k_plain + self.v_size)
        q = self.device.concat(q, q_rotated)
        k = self.device.concat(
            kv[:, :, : self.k_plain], k_rotated
        )  # the rotated part is the same for all heads
        return self.device.attention(
            q, k, kv[:, :, self.k_plain :], run.cache, self.layer, run.step, self.scale
        )
