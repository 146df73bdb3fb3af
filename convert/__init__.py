"""Hugging Face checkpoints to GGUF, and GGUF to smaller GGUF."""
