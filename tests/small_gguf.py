"""A small GGUF file of a llama MoE, by hand: the start of tests of the file and the engine."""

from pathlib import Path

import gguf
import numpy as np

from tests.vocabulary_file import N_VOCAB, write_vocabulary

D, HEADS, F, EXPERTS, USED, LAYERS = 64, 2, 32, 4, 2, 2


def small_keys(writer: gguf.GGUFWriter, n_ctx: int = 64) -> None:
    write_vocabulary(writer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)


def small_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (N_VOCAB, D), "output_norm": (D,)}
    for i in range(LAYERS):
        p = f"blk.{i}."
        shapes |= {p + "attn_norm": (D,), p + "ffn_norm": (D,), p + "ffn_gate_inp": (EXPERTS, D)}
        shapes |= {p + f"attn_{x}": (D, D) for x in ("q", "k", "v", "output")}
        shapes |= {p + f"ffn_{x}_exps": (EXPERTS, F, D) for x in ("gate", "up")}
        shapes |= {p + "ffn_down_exps": (EXPERTS, D, F)}
    return {
        f"{n}.weight": rng.standard_normal(s).astype(np.float32) / s[-1] ** 0.5
        for n, s in shapes.items()
    }


def write_small(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    keys=small_keys,
    alignment: int = 0,
    floats: tuple[str, ...] = ("gate_inp",),
) -> Path:
    """keys(writer) adds the keys; tensors None: small_tensors(). floats: parts of the names of
    matrices that stay F32; all others become Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    keys(writer)
    for name, array in (small_tensors() if tensors is None else tensors).items():
        quantized = array.ndim > 1 and not any(part in name for part in floats)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array, kind) if quantized else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
