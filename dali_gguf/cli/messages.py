"""What commands say beside their result: lines on stderr, text of any script on stdout."""

import io
import sys
import warnings


def say(text: str) -> None:
    print(f"dali-gguf: {text}", file=sys.stderr, flush=True)


def warnings_in_one_line() -> None:
    """Python's warnings of the product as lines like all others, without a place in the source."""

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        say(f"warning: {message}")

    warnings.showwarning = show


def utf8_output() -> None:
    """stdout writes UTF-8 whatever the locale is: the text of a model is rarely ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


def shown(piece: bytes) -> str:
    """A token's bytes in quotes: as text, or b'..' if they are only a part of a character."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)
