"""Writes a qwen3moe GGUF of random weights with a known way of routing, for benchmarks of the disk
tier.

    python tests/benchmarks/disk_model.py OUT.gguf --layers 12 --routing uniform|sticky|random

uniform and sticky: a token's embedding is topic + word + one constant direction, and layers add
less to it, so every router sees the embedding. Its rows answer to the word (uniform), or also to
topics that drift from token id to token id (experts are used again) and to the constant (some
experts are popular). The output row of token t + 1 is the word of t, so greedy decoding counts up
from the prompt's last token, in any program: both programs get the same routing.

random: everything random, as other generators do it. Its stream is dominated by the mean of the
attention's values, so after a few tokens the routing hardly changes any more: not uniform at all.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

N_SPECIAL = 259
# how much experts change the stream: as in real models, 84 % of the next layer's choice can be
# predicted from a router's input, 75 % of the one after (measured)
EXPERT_SPREAD = 0.005


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the defaults are those of Qwen3-30B-A3B."""

    n_embd: int = 2048
    n_layer: int = 12
    n_head: int = 32
    n_head_kv: int = 4
    k_size: int = 128
    n_expert: int = 128
    n_used: int = 8
    n_ff: int = 768
    n_vocab: int = 32000
    kind: Q = Q.Q4_K


TINY = Shape(n_embd=128, n_layer=4, n_head=4, n_head_kv=2, k_size=32, n_expert=16, n_used=4,
             n_ff=64, n_vocab=512, kind=Q.Q8_0)


@dataclass(frozen=True, slots=True)
class Routing:
    """popular: spread of the experts' popularity, topic: weight of the topic against the word,
    drift: how much of the topic is new with each token (all in logits of spread 1). The defaults:
    a third of a token's experts are the last token's; a decayed cache that holds 25 / 50 / 75 % of
    the experts hits .54 / .77 / .91."""

    popular: float = 0.3
    topic: float = 0.85
    drift: float = 0.6


STICKY = Routing()
UNIFORM = Routing(popular=0.0, topic=0.0, drift=1.0)


def blocks(kind: Q, n: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """n random quant blocks whose values have about the given spread: uint8 [n, block bytes]."""
    raw = rng.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)

    def scale(spread):
        return (spread * rng.uniform(0.5, 1.5, n)).astype(np.float16).view(np.uint8).reshape(n, 2)

    if kind == Q.Q8_0:
        raw[:, :2] = scale(std / 74)
    elif kind == Q.Q4_K:  # d * scale * q - dmin * min, scales and mins 0..63
        raw[:, :2], raw[:, 2:4] = scale(std / 4.6 / 32), scale(std * 7.5 / 4.6 / 32)
    elif kind == Q.Q6_K:
        raw[:, -2:] = scale(std / 18.5 / 74)
    else:
        raise ValueError(f"no random blocks of {kind.name}")
    return raw


class Writer:
    def __init__(self, path: Path, shape: Shape, seed: int):
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.w = gguf.GGUFWriter(str(path), "qwen3moe")
        self.keys()

    def keys(self) -> None:
        w, s = self.w, self.shape
        w.add_name("disk-bench")
        w.add_block_count(s.n_layer)
        w.add_context_length(8192)
        w.add_embedding_length(s.n_embd)
        w.add_feed_forward_length(s.n_ff * s.n_used)
        w.add_head_count(s.n_head)
        w.add_head_count_kv(s.n_head_kv)
        w.add_key_length(s.k_size)
        w.add_value_length(s.k_size)
        w.add_layer_norm_rms_eps(1e-6)
        w.add_rope_freq_base(1e6)
        w.add_expert_count(s.n_expert)
        w.add_expert_used_count(s.n_used)
        w.add_expert_feed_forward_length(s.n_ff)
        words = [f"w{i}" for i in range(s.n_vocab - N_SPECIAL)]
        w.add_tokenizer_model("llama")
        w.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words])
        w.add_token_scores([-1000.0] * s.n_vocab)
        w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)

    def random(self, name: str, shape: tuple[int, ...], std: float, kind: Q | None = None) -> None:
        kind = kind or self.shape.kind
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        n = int(np.prod(shape)) // block
        pool = blocks(kind, min(n, 1 << 16), std, self.rng)
        data = pool[self.rng.integers(0, len(pool), n)]
        self.w.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=kind)

    def floats(self, name: str, values: np.ndarray, kind: Q = Q.F32) -> None:
        values = np.ascontiguousarray(values, np.float32)
        if kind != Q.F32:
            self.w.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            self.w.add_tensor(name, values)

    def layer(self, i: int, attention: float, experts: float, router: np.ndarray) -> None:
        """attention, experts: spreads of the matrices whose results are added to the stream."""
        s, p = self.shape, f"blk.{i}."
        for name in ("attn", "ffn"):
            self.floats(f"{p}{name}_norm.weight", np.ones(s.n_embd))
        for name in ("q", "k"):
            self.floats(f"{p}attn_{name}_norm.weight", np.ones(s.k_size))
        n_q, n_kv = s.n_head * s.k_size, s.n_head_kv * s.k_size
        self.random(p + "attn_q.weight", (n_q, s.n_embd), 0.02)
        self.random(p + "attn_k.weight", (n_kv, s.n_embd), 0.02)
        self.random(p + "attn_v.weight", (n_kv, s.n_embd), 0.02)
        self.random(p + "attn_output.weight", (s.n_embd, n_q), attention)
        self.floats(p + "ffn_gate_inp.weight", router)
        for role in ("gate", "up"):
            self.random(f"{p}ffn_{role}_exps.weight", (s.n_expert, s.n_ff, s.n_embd), 0.02)
        self.random(p + "ffn_down_exps.weight", (s.n_expert, s.n_embd, s.n_ff), experts)

    def close(self) -> None:
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def unit_rows(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return (rng.normal(size=(n, d)) / np.sqrt(d)).astype(np.float32)


def drifting(rng: np.random.Generator, n: int, d: int, drift: float) -> np.ndarray:
    """n rows of length about 1, each mostly the one before."""
    rows = unit_rows(rng, n, d)
    for i in range(1, n):
        rows[i] = np.sqrt(1 - drift**2) * rows[i - 1] + drift * rows[i]
    return rows


def parts(rng: np.random.Generator, shape: Shape, routing: Routing) -> tuple[np.ndarray, ...]:
    """(embeddings [V, D] of length sqrt(D), words [V, D], the constant direction [D])."""
    n, d = shape.n_vocab, shape.n_embd
    constant = unit_rows(rng, 1, d)[0]
    words, topics = unit_rows(rng, n, d), drifting(rng, n, d, routing.drift)
    share = np.sqrt(1 - routing.topic**2)
    mixed = constant + routing.topic * topics + share * words
    return np.sqrt(d / 2) * mixed, words, constant


def router_rows(rng: np.random.Generator, shape: Shape, routing: Routing,
                constant: np.ndarray) -> np.ndarray:
    """[E, D]: logits of spread 1 from topic and word, and popularity along the constant."""
    d, n = shape.n_embd, shape.n_expert
    rows = rng.normal(size=(n, d))
    rows -= np.outer(rows @ constant / (constant @ constant), constant)
    popularity = routing.popular * rng.normal(size=n)
    return (np.sqrt(2 / d) * (rows + np.outer(popularity, constant))).astype(np.float32)


def write_model(path: Path, shape: Shape = Shape(), routing: Routing | None = None,
                seed: int = 0) -> None:
    """routing None: random everything."""
    w, rng = Writer(path, shape, seed), np.random.default_rng(seed + 1)
    head = Q.Q6_K if shape.n_embd % 256 == 0 else Q.Q8_0
    if routing is None:
        w.random("token_embd.weight", (shape.n_vocab, shape.n_embd), 0.02)
        w.random("output.weight", (shape.n_vocab, shape.n_embd), 0.02, head)
    else:
        embeddings, words, constant = parts(rng, shape, routing)
        w.floats("token_embd.weight", embeddings, Q.Q8_0)
        w.floats("output.weight", np.roll(words, 1, axis=0), Q.Q8_0)
    w.floats("output_norm.weight", np.ones(shape.n_embd))
    for i in range(shape.n_layer):
        if routing is None:
            router = rng.normal(0, 0.05, (shape.n_expert, shape.n_embd))
        else:
            router = router_rows(rng, shape, routing, constant)
        w.layer(i, *((0.02, 0.02) if routing is None else (0.0005, EXPERT_SPREAD)), router)
    w.close()
    with open(path, "ab") as file:  # a loop device shows whole sectors only
        file.write(bytes(-path.stat().st_size % 4096))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    kinds = {"uniform": UNIFORM, "sticky": STICKY, "random": None}
    parser.add_argument("--routing", choices=kinds, default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.out, Shape(n_layer=args.layers), kinds[args.routing], args.seed)


if __name__ == "__main__":
    main()
