"""A text as equally long runs of tokens, the way llama-perplexity and llama-imatrix cut it."""

from pathlib import Path

from dali_gguf.errors import InputError
from dali_gguf.tokenizer import Tokenizer


def read_chunks(
    path: str | Path, tokenizer: Tokenizer, size: int, limit: int = -1
) -> list[list[int]]:
    """Runs of `size` token ids; a rest at the end is left out. Where the model wants a BOS token it
    stands at the start of the text, and in place of the first token of every later run.

    limit: at most so many runs, -1 all. Raises InputError if the text is too short for one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    ids = tokenizer.encode(text)
    count = len(ids) // size
    if count < 1:
        raise InputError(
            f"{path}: {len(ids)} tokens, expected at least {size}; give a longer text or a "
            f"smaller --ctx"
        )
    chunks = [
        list(ids[i * size : (i + 1) * size])
        for i in range(count if limit < 0 else min(count, limit))
    ]
    bos = ids[0] if tokenizer.add_bos else None
    if bos is not None:
        for chunk in chunks:
            chunk[0] = bos
    return chunks
