"""What was learned about a model's routing, kept between runs: NAME.dali.gguf beside the model.

Tokens per expert (they seed the cache's scores and choose the hot experts), the residual means and,
when recorded from a trace, the linear maps of the predictors. A model is recognised by its routers,
which all its quantizations share. If the model's folder cannot be written, the file is kept in the
user's cache folder; a file of another model is ignored with one line.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

from dali_gguf.errors import ModelFileError
from dali_gguf.kernels import user_cache_dir
from dali_gguf.offload import predict_trace
from dali_gguf.offload.trace import Trace
from dali_gguf.replacing import replacing

SUFFIX = ".dali.gguf"
ARCHITECTURE = "dali-counts"
MOST_MAP_BYTES = 1 << 28  # linear maps of larger models are not kept


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """counts float32 [L, E] tokens per expert, means float32 [L - 1, D], maps float32
    [L - 1, 3D + 1, E] or None. fingerprint: of the routers; tokens: behind the counts."""

    fingerprint: str
    tokens: int
    counts: np.ndarray
    means: np.ndarray
    maps: np.ndarray | None = None


def fingerprint(routers: list[np.ndarray]) -> str:
    """Of the first and the last router matrix float32 [E, D], and of how many there are."""
    digest = hashlib.sha256(f"{len(routers)} {routers[0].shape}".encode())
    for router in (routers[0], routers[-1]):
        digest.update(np.ascontiguousarray(router, np.float32).tobytes())
    return digest.hexdigest()[:32]


def from_trace(trace: Trace) -> Counts:
    """Counts, means and linear maps of a recorded trace (all of it)."""
    layers = range(1, trace.n_layer)
    means = np.stack([predict_trace.residual_mean(trace, i) for i in layers])
    size = 4 * (3 * trace.n_embd + 1) * trace.n_expert * len(layers)
    maps = None
    if size <= MOST_MAP_BYTES:
        maps = np.stack([predict_trace.linear_map(trace, i) for i in layers])
    return Counts(
        fingerprint(list(trace.routers)),
        len(trace.ids),
        trace.counts().astype(np.float32),
        means,
        maps,
    )


def places(model: Path, mark: str) -> list[Path]:
    """Where the file may be: beside the model, then in the user's cache folder."""
    stem = model.name.removesuffix(".gguf")
    cached = user_cache_dir() / "counts" / f"{stem}-{mark[:8]}{SUFFIX}"
    return [model.with_name(stem + SUFFIX), cached]


def save(model: Path, counts: Counts) -> Path:
    """Writes the file beside the model (never into the package itself) or to the cache folder, in
    one step. Returns the path. ModelFileError if neither can be written."""
    beside, cached = places(model, counts.fingerprint)
    package, above = Path(__file__).parents[1], model.resolve().parents
    inside = package in above or package.parent / "models" in above
    for path in ([] if inside else [beside]) + [cached]:
        try:
            with replacing(path) as part:
                _write(part, counts)
            return path
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    raise ModelFileError(f"counts of {model.name} cannot be kept: {problem}")


def _write(path: Path, counts: Counts) -> None:
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_string("dali.fingerprint", counts.fingerprint)
    writer.add_uint64("dali.tokens", counts.tokens)
    writer.add_tensor("counts", np.ascontiguousarray(counts.counts, np.float32))
    writer.add_tensor("means", np.ascontiguousarray(counts.means, np.float32))
    if counts.maps is not None:
        writer.add_tensor("maps", np.ascontiguousarray(counts.maps, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(model: Path, mark: str, shape: tuple[int, int], say=None) -> Counts | None:
    """The model's counts: mark is its routers' fingerprint, shape (L, E). None when there are none;
    a damaged file or one of another model is ignored with one line."""
    say = say or sys.stderr.write
    for path in places(model, mark):
        if not path.is_file():
            continue
        try:
            found = _read(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            say(f"dali-gguf: {path} is damaged ({error}); ignored\n")
            continue
        if found.fingerprint != mark or found.counts.shape != shape:
            say(f"dali-gguf: {path} belongs to another model; ignored\n")
            continue
        return found
    return None


def _read(path: Path) -> Counts:
    reader = GGUFReader(path)
    if "dali.fingerprint" not in reader.fields:
        raise ValueError("no counts in it")
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    return Counts(
        reader.fields["dali.fingerprint"].contents(),
        int(reader.fields["dali.tokens"].contents()),
        tensors["counts"],
        tensors["means"],
        tensors.get("maps"),
    )
