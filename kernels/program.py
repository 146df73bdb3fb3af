"""A decode step as one kernel call: its operations written down once, then run again and again.

A large model's weights drive everything else out of the caches in each layer, so Python between
two launches costs several times what it costs elsewhere: about a tenth of a decode step. While a
step is recorded, each operation of cpu.py leaves a line: what to run, and the addresses of its
arrays, which stay alive with the program. A later step of as many tokens changes ids, positions
and sequences only.
"""

import numpy as np

from dali_gguf.device import RopeParams, Step
from dali_gguf.kernels import elementwise, lines, moe
from dali_gguf.kernels.attention import work_address as attention_address
from dali_gguf.kernels.kv import KVCache
from dali_gguf.kernels.matmul import Plan, Workspace, work_address
from dali_gguf.kernels.moe_plan import LayerPlan, MoeSpace, moe_address
from dali_gguf.kernels.pool import Pool
from dali_gguf.kernels.route import NO_BIAS, SCORING
from dali_gguf.router import RouterRule
from dali_gguf.routing import Routing


class Program:
    """The lines of one step, and everything they point to.

    broken: an operation took part that cannot be run again from its addresses.
    """

    def __init__(self, pool: Pool, step: Step):
        self.pool = pool
        self.step = Step(step.ids.copy(), step.positions.copy(), step.sequences.copy())
        self.broken = False
        self._out = np.empty(0, np.float32)
        self._lines: list[list[int]] = []
        self._kept: list = []
        self._table = np.empty(0, np.int64)

    def run(self, step: Step) -> np.ndarray | None:
        """The step's result, or None: something has to grow, and then the step be recorded anew."""
        mine = self.step
        mine.ids[:], mine.positions[:], mine.sequences[:] = step.ids, step.positions, step.sequences
        table, pool = self._table, self.pool
        done = lines.run_lines(table.ctypes.data, len(table), pool.state, pool.threads)
        return self._out.copy() if done else None

    def finish(self, out: np.ndarray) -> None:
        """The step is over and out is its result."""
        self._out = out
        self._table = np.array(self._lines, np.int64)

    def _line(self, kind: int, *words) -> None:
        """Arrays are kept, and stand as their addresses; a float as the bits of a float64."""
        values = [kind]
        for w in words:
            if isinstance(w, np.ndarray):
                self.broken |= not w.flags.c_contiguous
                self._kept.append(w)
                w = w.ctypes.data
            elif isinstance(w, float):
                w = np.float64(w).view(np.int64)
            values.append(int(w))
        self._lines.append(values + [0] * (lines.LINE_WORDS - len(values)))

    # ---- what the operations of cpu.py leave

    def embed(self, function: int, ids, address: int, stride: int, out) -> None:
        scratch = np.empty(256, np.uint8)
        self._line(lines.EMBED, function, self._mine(ids), address, stride, out.shape[1], out,
                   len(out), scratch)

    def _mine(self, array: np.ndarray) -> np.ndarray:
        """The array must be one of the step's own: others would never change."""
        own = self.step.ids, self.step.positions, self.step.sequences
        self.broken |= not any(array is a for a in own)
        return array

    def matmul(self, space: Workspace, plan: Plan, x, results) -> None:
        self._kept += [x, results, plan, space.buffers]
        self.broken |= not x.flags.c_contiguous
        self._line(lines.LAUNCH, work_address(), plan.job(len(x)).copy())

    def rows(self, function: int, x, y, out, size: int, value: float = 0.0) -> None:
        """A row function of elementwise.py."""
        self._line(lines.ROWS, function, x, y, out, x.size // size, size, value)

    def add(self, x, y) -> None:
        n = y.shape[-1]
        self._line(lines.ADD, x, y, x.size // n, n, 4 * n if y.size == x.size else 0)

    def rope(self, x, positions, table, params: RopeParams, weight, eps: float) -> None:
        self._line(
            lines.ROPE, elementwise.rope_address(), x, *x.shape, self._mine(positions), table,
            table.size, params.n_rot // 2, params.interleaved, elementwise.norm_address(), weight,
            weight.size, float(eps),
        )

    def attention(self, q, k, v, out, cache: KVCache, layer: int, step: Step, scale: float,
                  window: int, sinks) -> None:
        self._kept.append(cache)
        self._line(
            lines.ATTEND, attention_address(), cache.control, layer, q, k, v,
            self._mine(step.positions), self._mine(step.sequences), len(q), q.shape[1], k.shape[1],
            q.shape[2], v.shape[2], len(cache.control), sinks, len(sinks), out, float(scale),
            window,
        )

    def route(self, logits, rule: RouterRule, routing: Routing) -> None:
        self.broken |= rule.n_group > 1
        bias = NO_BIAS if rule.bias is None else rule.bias
        self._line(
            lines.ROUTE, logits, *logits.shape, routing.expert_ids.shape[1], SCORING[rule.scoring],
            rule.normalize, float(rule.scale), bias, len(bias), routing.expert_ids, routing.weights,
            routing.workload,
        )

    def moe(self, space: MoeSpace, plan: LayerPlan, x, routing: Routing, addresses, y) -> None:
        ids, n_expert = routing.expert_ids, plan.experts.n_expert
        *tables, pointers = space.tables(ids.size, n_expert)
        self._kept += [plan, pointers, space.buffers, space.space.buffers]
        self._line(
            lines.MOE, moe_address(), plan.job.copy(), *ids.shape, n_expert, plan.n_embd,
            moe.JOB_WORDS, x, ids, routing.weights, routing.workload, *tables, addresses, y,
        )
