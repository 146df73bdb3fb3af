"""GGUF inference for Mixture-of-Experts models that do not fit where the compute is."""

from pathlib import Path

from dali_gguf.version import __version__

if not (Path(__file__).parent / "kernels").is_dir():  # a checkout: kernels/ lies beside dali_gguf/
    __path__.append(str(Path(__file__).parents[1]))

__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str):
    """Engine and SamplingParams on first use, so that `import dali_gguf` stays fast."""
    if name == "Engine":
        from dali_gguf.engine import Engine

        return Engine
    if name == "SamplingParams":
        from dali_gguf.sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'dali_gguf' has no attribute {name!r}")
