"""What moe.py needs from Python: the plan of a layer, the memory of a step, and the calls."""

from dataclasses import dataclass

import numpy as np

from dali_gguf.errors import UnsupportedError
from dali_gguf.kernels import moe
from dali_gguf.kernels.formats import Format, format_of, matmat_address, matvec_address
from dali_gguf.kernels.matmul import MATMAT_FROM, Workspace
from dali_gguf.kernels.pool import work_function
from dali_gguf.kernels.quantize import record_bytes
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor

ACTIVATIONS = {"silu": moe.SILU, "swiglu_oai": moe.SWIGLU_OAI}


def _one_format(tensors: tuple[Tensor, ...]) -> Format:
    """The type all experts of a role share."""
    for t in tensors:
        if t.type != tensors[0].type or t.shape != tensors[0].shape:
            raise UnsupportedError(
                f"{t.name} is {t.type.name} {t.shape}, but {tensors[0].name} is "
                f"{tensors[0].type.name} {tensors[0].shape}: experts of a layer must be alike"
            )
    return format_of(tensors[0].type, tensors[0].name)


def formats_of(experts: LayerExperts) -> tuple[Format, Format, Format]:
    """Of gate, up and down. UnsupportedError for types that cannot be computed together."""
    gate, up, down = (_one_format(r) for r in (experts.gate, experts.up, experts.down))
    if up.kind != gate.kind:
        raise UnsupportedError(
            f"{experts.gate[0].name} is {gate.type.name} and {experts.up[0].name} is "
            f"{up.type.name}: they need activations of different kinds"
        )
    return gate, up, down


def chunk(rows: int, threads: int) -> int:
    """Rows that a thread takes at a time: a stretch of memory that is long enough to be read as one
    stream (64 rows measured 10 % slower), but one expert alone still keeps all threads busy."""
    return max(16, min(1024, rows // threads // 16 * 16))


class LayerPlan:
    """The job record of one layer's experts, filled with what never changes.

    addresses: int64 [3, E], where each expert's gate, up and down lie in the mapped file.
    """

    def __init__(self, experts: LayerExperts, threads: int):
        self.experts = experts
        roles = (experts.gate, experts.up, experts.down)
        self.formats = formats_of(experts)
        self.n_ff, self.n_embd = experts.gate[0].rows, experts.gate[0].cols
        self.addresses = np.array([[t.address for t in r] for r in roles], np.int64)
        x_kind, h_kind = self.formats[0].kind, self.formats[2].kind
        self.x_bytes = record_bytes(x_kind, self.n_embd)
        self.h_bytes = record_bytes(h_kind, self.n_ff)
        self.f_stride = 4 * (-(-self.n_ff // 8) * 8)
        self.placed = (0, 0)  # pairs and version of the memory that the job's addresses belong to
        job = self.job = np.zeros(moe.JOB_WORDS, np.int64)
        job[moe.D], job[moe.F], job[moe.F_STRIDE] = self.n_embd, self.n_ff, self.f_stride
        job[moe.X_KIND], job[moe.H_KIND] = x_kind, h_kind
        job[moe.X_BYTES], job[moe.H_BYTES] = self.x_bytes, self.h_bytes
        job[moe.N_EXPERT] = experts.n_expert
        strides = moe.GATE_STRIDE, moe.UP_STRIDE, moe.DOWN_STRIDE
        for at, role in zip(strides, roles):
            job[at] = role[0].row_bytes
        job[moe.ACTIVATION] = ACTIVATIONS[experts.activation]
        biases = experts.gate_bias, experts.up_bias, experts.down_bias
        self._biases = [None if b is None else np.ascontiguousarray(b, np.float32) for b in biases]
        for at, bias in zip((moe.GATE_BIAS, moe.UP_BIAS, moe.DOWN_BIAS), self._biases):
            job[at] = 0 if bias is None else bias.ctypes.data
        job[moe.F_CHUNK], job[moe.D_CHUNK] = chunk(self.n_ff, threads), chunk(self.n_embd, threads)

    def compile(self, most_tokens: int) -> None:
        """Makes the products for experts with up to most_tokens tokens."""
        job = self.job
        if job[moe.FUNCTIONS] == 0:
            job[moe.FUNCTIONS : moe.FUNCTIONS + 3] = [matvec_address(f) for f in self.formats]
        if most_tokens >= MATMAT_FROM and job[moe.FUNCTIONS + 3] == 0:
            job[moe.FUNCTIONS + 3 : moe.FUNCTIONS + 6] = [matmat_address(f) for f in self.formats]


@dataclass(slots=True, eq=False)
class MoeStep:
    """A step under way: between moe_begin and moe_end. One at a time per workspace."""

    plan: LayerPlan
    x: np.ndarray
    routing: Routing
    y: np.ndarray


class MoeSpace:
    """Memory for a step's pairs, grown as needed and shared by all layers."""

    def __init__(self, space: Workspace):
        self.space = space
        self._floats = np.empty(0, np.float32)
        self._bytes = np.empty(0, np.uint8)
        self._tables: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._version = 0  # of the memory: a plan's addresses are written again when it changed

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The memory that addresses given out so far point to."""
        return self._floats, self._bytes

    def tables(self, n_pair: int, n_expert: int) -> tuple[np.ndarray, ...]:
        """first int64 [E+1], token, place int32 [P], run uint8 [E], active int32 [E],
        pointers int64 [2, P]."""
        key = (n_pair, n_expert)
        if key not in self._tables:
            if len(self._tables) > 64:
                self._tables.clear()
                self._version += 1
            self._tables[key] = (
                np.empty(n_expert + 1, np.int64), np.empty(n_pair, np.int32),
                np.empty(n_pair, np.int32), np.empty(n_expert, np.uint8),
                np.empty(n_expert, np.int32), np.empty((2, n_pair), np.int64),
            )
        return self._tables[key]

    def place(self, plan: LayerPlan, n_token: int, n_pair: int, pointers: np.ndarray) -> None:
        """Writes the buffers' addresses into the plan's job, unless they are there."""
        wide = plan.f_stride // 4
        floats = n_pair * (2 * wide + plan.n_embd) + 64
        size = n_token * plan.x_bytes + n_pair * plan.h_bytes + 128
        if floats > self._floats.size or size > self._bytes.size:
            self._floats = np.empty(max(floats, self._floats.size), np.float32)
            self._bytes = np.empty(max(size, self._bytes.size), np.uint8)
            self._version += 1
        if plan.placed == (n_pair, self._version):
            return
        plan.placed = (n_pair, self._version)
        job, at = plan.job, self._floats.ctypes.data
        job[moe.GATE], job[moe.UP] = at, at + 4 * n_pair * wide
        job[moe.DOWN] = at + 8 * n_pair * wide
        records = -(-self._bytes.ctypes.data // 64) * 64
        job[moe.X_RECORDS], job[moe.H_RECORDS] = records, records + n_token * plan.x_bytes
        at = pointers.ctypes.data
        job[moe.X_POINTERS], job[moe.H_POINTERS] = at, at + 8 * n_pair
        job[moe.SCRATCH] = self.space.scratch

    def whole(self, plan: LayerPlan, x: np.ndarray, routing: Routing,
              addresses: np.ndarray | None = None) -> np.ndarray:
        """All experts of the step in one launch: y [T, D]."""
        n_token, n_used = routing.expert_ids.shape
        *tables, pointers = self.tables(n_token * n_used, plan.experts.n_expert)
        self.place(plan, n_token, n_token * n_used, pointers)
        plan.compile(n_token)
        y, pool = np.empty((n_token, plan.n_embd), np.float32), self.space.pool
        moe.whole(moe_address(), plan.job, x, routing.expert_ids, routing.weights, routing.workload,
                  *tables, plan.addresses if addresses is None else addresses, y, pool.state,
                  pool.threads)
        return y

    def begin(self, plan: LayerPlan, x: np.ndarray, routing: Routing) -> MoeStep:
        """Sorts the pairs and gives them memory; nothing is computed yet."""
        n_token, n_used = routing.expert_ids.shape
        *tables, _, pointers = self.tables(n_token * n_used, plan.experts.n_expert)
        self.place(plan, n_token, n_token * n_used, pointers)
        moe.begin(plan.job, x, routing.expert_ids, routing.weights, *tables)
        plan.compile(n_token)
        return MoeStep(plan, x, routing, np.empty((n_token, plan.n_embd), np.float32))

    def run(self, step: MoeStep, phases: int, active: np.ndarray, addresses: np.ndarray) -> None:
        """active int32 [n] expert ids; addresses int64 [3, E]."""
        job, pool = step.plan.job, self.space.pool
        moe.go(moe_address(), job, phases, active, addresses, step.y, pool.state, pool.threads)


_address: list[int] = []


def moe_address() -> int:
    if not _address:
        _address.append(work_function(moe.moe_work))
    return _address[0]


