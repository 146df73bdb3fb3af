"""A named weight: its ggml type, its shape, and a view of its bytes in the mapped file."""

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One weight as it lies in the file.

    shape is in numpy order, slowest first: a matrix is (rows, cols), experts are (E, rows, cols);
    that is GGUF's order reversed. data is uint8 [nbytes], a view and never a copy.
    file and offset say where data[0] lies on disk (the disk tier reads it from there).
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray
    file: str = ""
    offset: int = 0

    @property
    def rows(self) -> int:
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.cols // block * block_bytes

    @property
    def nbytes(self) -> int:
        return self.data.size

    @property
    def address(self) -> int:
        return self.data.ctypes.data

    def part(self, first: int, rows: int, name: str = "") -> "Tensor":
        """Rows [first, first + rows) of all rows of the tensor, as a matrix of their own."""
        start, size = first * self.row_bytes, rows * self.row_bytes
        return Tensor(
            name or self.name, self.type, (rows, self.cols), self.data[start : start + size],
            self.file, self.offset + start,
        )

    def expert(self, e: int) -> "Tensor":
        """Matrix e of a stack [E, rows, cols]."""
        return self.part(e * self.rows, self.rows, f"{self.name}[{e}]")
