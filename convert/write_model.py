"""Writes a planned model: header, then tensor after tensor, with a progress bar."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dali_gguf.convert.encode import Encoder, Matrix
from dali_gguf.convert.gguf_output import OutputFile, TensorInfo, Value, header
from dali_gguf.convert.recipes import Choice, bits_per_weight
from dali_gguf.errors import ConvertError, InputError
from dali_gguf.kernels.pool import available_cpus


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """A tensor of the output and the matrices that make it up, one after the other."""

    choice: Choice
    matrices: list[Matrix]

    @property
    def info(self) -> TensorInfo:
        return self.choice.info


def write_model(
    path: str | Path,
    metadata: dict[str, Value],
    tensors: list[PlannedTensor],
    inputs: list,
    threads: int | None = None,
) -> int:
    """Writes the file and returns its size in bytes. inputs: files that must not be overwritten.

    Raises ConvertError when the disk is full or the user interrupts; nothing is left then.
    """
    head = header(metadata, [t.info for t in tensors])
    size = len(head) + sum(t.info.padded for t in tensors)
    threads = threads or len(available_cpus())
    with OutputFile(path, size, inputs) as out, ThreadPoolExecutor(threads) as pool:
        bar = tqdm(
            total=size,
            unit="B",
            unit_scale=True,
            desc=Path(path).name,
            disable=None,
            file=sys.stderr,
        )
        with bar:
            out.write(head)
            bar.update(len(head))
            encoder = Encoder(pool, threads)
            for tensor in tensors:
                try:
                    _write_tensor(out, encoder, tensor, bar)
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        out.commit()
    return size


def _write_tensor(out: OutputFile, encoder: Encoder, tensor: PlannedTensor, bar: tqdm) -> None:
    info, start = tensor.info, out.written
    for data in encoder.encode(info.name, tensor.matrices, info.type):
        out.write(data)
        bar.update(data.size)
    if out.written - start != info.nbytes:
        raise ConvertError(
            f"tensor {info.name}: {out.written - start} bytes of data, its shape {info.shape} "
            f"needs {info.nbytes}; the checkpoint contradicts its config.json"
        )
    out.pad()


def refuse_fallbacks(choices: list[Choice]) -> None:
    """--no-fallback: raises InputError when a tensor cannot have the type its recipe wants."""
    fallen = [c for c in choices if c.fell_back]
    if fallen:
        first = fallen[0]
        raise InputError(
            f"{len(fallen)} tensors do not fit their type, the first is {first.info.name}: rows of "
            f"{first.info.shape[-1]} are no multiple of {first.wanted.name}'s block; "
            "leave --no-fallback out or choose another type"
        )


def table(choices: list[Choice]) -> str:
    """A line a tensor: name, shape, type, bytes."""
    lines = []
    for choice in choices:
        t = choice.info
        shape = " x ".join(map(str, t.shape))
        note = f"  (wanted {choice.wanted.name})" if choice.fell_back else ""
        lines.append(f"{t.name:<40} {shape:>20}  {t.type.name:<7} {t.nbytes:>14,}{note}")
    return "\n".join(lines)


def summary(path: str | Path, size: int, choices: list[Choice]) -> str:
    """Size, true bits per weight, and every fallback grouped by tensor kind."""
    infos = [c.info for c in choices]
    text = f"{path}: {size / 1e6:.1f} MB, {bits_per_weight(infos):.2f} bits per weight"
    fallen = [c for c in choices if c.fell_back]
    if not fallen:
        return text
    lines = [
        f"{len(fallen)} of {len(choices)} tensors fell back, their rows do not fit the type's "
        f"block:"
    ]
    for c in fallen:
        lines.append(
            f"  {c.info.name}: rows of {c.info.shape[-1]}, {c.wanted.name} -> {c.info.type.name} "
            f"({bits_per_weight([c.info]):.2f} bits per weight)"
        )
    return "\n".join([text, *lines])
