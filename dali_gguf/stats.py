"""Figures of one generation, and the closing line."""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from dali_gguf.offload.arena_stats import ArenaStats

HASH_STRIDE = 16  # every logit depends on the whole hidden state, so a sixteenth of them is enough


@dataclass(frozen=True, slots=True)
class Stats:
    """Tokens and seconds of the two phases. finish: eos, stop, length, context, or interrupted.

    disk: what decode took from disk, None if all weights are in memory.
    logits_hash: CRC-32 over the logits that tokens were drawn from: the same on every run that
    computed the same bits.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    bytes_per_token: int = 0
    logits_hash: int = 0
    finish: str = ""
    disk: ArenaStats | None = None

    @property
    def prefill_rate(self) -> float:
        """Tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def read_rate(self) -> float:
        """GB/s of weights that decode went through."""
        return self.decode_rate * self.bytes_per_token / 1e9

    def prefilled(self, tokens: int, seconds: float) -> "Stats":
        return replace(self, prefill_tokens=tokens, prefill_seconds=seconds)

    def decoded(self, tokens: int, seconds: float) -> "Stats":
        return replace(
            self,
            decode_tokens=self.decode_tokens + tokens,
            decode_seconds=self.decode_seconds + seconds,
        )

    def hashed(self, logits_hash: int) -> "Stats":
        return replace(self, logits_hash=logits_hash)

    def with_disk(self, disk: ArenaStats | None) -> "Stats":
        return replace(self, disk=disk)

    def finished(self, reason: str) -> "Stats":
        return replace(self, finish=reason)

    def line(self) -> str:
        disk = f"{self.disk.line(self.decode_tokens)} | " if self.disk is not None else ""
        return (
            f"prefill {self.prefill_tokens} tokens, {self.prefill_rate:.1f} tokens/s | "
            f"decode {self.decode_tokens} tokens, {self.decode_rate:.1f} tokens/s, "
            f"{self.read_rate:.1f} GB/s | "
            f"{disk}logits {self.logits_hash:08x} | stopped by {self.finish}"
        )

    def as_dict(self) -> dict:
        """For --json."""
        disk = {} if self.disk is None else self.disk.as_dict(self.decode_tokens)
        return {
            "prefill_tokens": self.prefill_tokens,
            "prefill_tokens_per_second": round(self.prefill_rate, 2),
            "decode_tokens": self.decode_tokens,
            "decode_tokens_per_second": round(self.decode_rate, 2),
            "gigabytes_per_second": round(self.read_rate, 3),
            "logits_hash": f"{self.logits_hash:08x}",
            "finish": self.finish,
            **disk,
        }


def hash_logits(logits: np.ndarray, before: int) -> int:
    return zlib.crc32(np.ascontiguousarray(logits[::HASH_STRIDE]), before)
