"""Numba kernels on GGUF blocks. Compiled code is kept in the user's cache folder.

Numba notices a changed CPU and a changed function, but not a changed function called from another
file: so the folder's name carries a hash of all kernel sources and of the instruction set in use.
"""

import hashlib
import os
import sys
from pathlib import Path

from numba import config

import dali_gguf
from dali_gguf.kernels import isa


def user_cache_dir() -> Path:
    """The user's cache folder for this program, by each system's convention."""
    if os.environ.get("DALI_CACHE"):
        return Path(os.environ["DALI_CACHE"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "dali-gguf"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/dali-gguf"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dali-gguf"


def _sources_hash() -> str:
    digest = hashlib.sha256(isa.NAME.encode())
    package, here = Path(dali_gguf.__file__).parent, Path(__file__).parent
    folders = (here, here.parent / "convert", package / "offload")  # all that compile
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CACHE_DIR = user_cache_dir() / "kernels" / _sources_hash()
config.CACHE_DIR = str(CACHE_DIR)

