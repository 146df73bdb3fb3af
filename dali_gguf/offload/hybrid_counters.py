"""What the hybrid scheduler counts, by layer, and how it is told."""

from array import array
from collections.abc import Callable

import numpy as np
from numba import njit

from dali_gguf.offload.placement import LayerPlan

FIELDS = (
    "steps", "uses", "hits", "misses", "tokens", "tokens_hit", "on_cpu", "on_gpu", "copied",
    "predicted_us", "plan_us", "real_us", "prefetched", "useful", "late", "wasted", "fills",
    "adopted", "bytes", "cpu_us", "gpu_us", "link_us", "cpu_waits_us", "gpu_waits_us",
    "from_ram", "from_disk",
)  # fmt: skip


@njit(cache=True)
def _count_step(workload, here, cpu, gpu, copied, predicted_us, plan_us, figures, routed, row):
    """Adds one step of a layer to the fields from "steps" to "plan_us", and to routed."""
    uses = hits = tokens = tokens_hit = 0
    for e in range(workload.size):
        w = workload[e]
        routed[row, e] += w
        if w > 0:
            uses += 1
            tokens += w
            if here[e]:
                hits += 1
                tokens_hit += w
    figures[0, row] += 1
    figures[1, row] += uses
    figures[2, row] += hits
    figures[3, row] += uses - hits
    figures[4, row] += tokens
    figures[5, row] += tokens_hit
    figures[6, row] += cpu
    figures[7, row] += gpu
    figures[8, row] += copied
    figures[9, row] += predicted_us
    figures[10, row] += plan_us


class HybridCounters:
    """figures float64 [fields, L]; hits + misses == uses always holds. routed int64 [L, E]: tokens
    that each expert was given."""

    def __init__(self, layers: list[int], n_expert: int):
        self.layers = layers
        self.routed = np.zeros((len(layers), n_expert), np.int64)
        self._cells = array("d", bytes(8 * len(FIELDS) * len(layers)))
        self.figures = np.frombuffer(self._cells).reshape(len(FIELDS), len(layers))
        self._at = {name: i * len(layers) for i, name in enumerate(FIELDS)}  # where a row begins

    def add(self, row: int, name: str, amount: float = 1) -> None:
        self._cells[self._at[name] + row] += amount  # a fifth of the time of figures[i, row]

    def total(self, name: str) -> float:
        return float(self.figures[FIELDS.index(name)].sum())

    def planned(self, row: int, workload: np.ndarray, here: np.ndarray, plan: LayerPlan,
                plan_us: float) -> None:
        """One step's experts, and by who computes them. workload int64 [E], here uint8 [E] = in GPU
        memory when planned. plan_us: what planning took."""
        _count_step(
            workload,
            here,
            plan.cpu.size,
            plan.gpu.size,
            plan.copy.size,
            plan.predicted_us,
            plan_us,
            self.figures,
            self.routed,
            row,
        )

    def waits(self, row: int, cpu_us: float, gpu_us: float) -> None:
        """Finish of both sides of a layer: the earlier one waited. Nothing if only one was used."""
        self.add(row, "cpu_us", cpu_us)
        self.add(row, "gpu_us", gpu_us)
        if cpu_us and gpu_us:
            self.add(row, "cpu_waits_us", max(0.0, gpu_us - cpu_us))
            self.add(row, "gpu_waits_us", max(0.0, cpu_us - gpu_us))

    def as_dict(self) -> dict:
        """For --stats-json: totals, and the same by layer."""
        whole = [f for f in FIELDS if not f.endswith("_us")]
        table = dict(zip(FIELDS, self.figures))
        return {
            "total": {
                f: int(v.sum()) if f in whole else round(v.sum(), 1) for f, v in table.items()
            },
            "layers": [
                {"layer": layer}
                | {f: int(v[i]) if f in whole else round(float(v[i]), 1) for f, v in table.items()}
                for i, layer in enumerate(self.layers)
            ],
        }

    def line(self) -> str:
        """For the closing line."""
        n = {name: self.total(name) for name in FIELDS}
        if not n["uses"]:
            return "no experts were used"
        line = (
            f"experts {n['hits'] / n['uses']:.0%} hits ({n['tokens_hit'] / n['tokens']:.0%} by "
            f"token), {n['bytes'] / 1e6:.0f} MB moved, {n['copied']:.0f} copied, prefetch "
            f"{n['useful']:.0f} useful {n['late']:.0f} late {n['wasted']:.0f} wasted"
        )
        if n["from_disk"]:
            line += f", copies {n['from_ram']:.0f} from RAM {n['from_disk']:.0f} from disk"
        return line + ("" if n["fills"] + n["adopted"] else ", the expert cache never acted")

    def table(self) -> str:
        """For --stats: one row a layer."""
        rows = ["".join(f"{head:>{width}}" for head, width, _ in COLUMNS)]
        for i, layer in enumerate(self.layers):
            n = {name: float(self.figures[j, i]) for j, name in enumerate(FIELDS)}
            rows.append("".join(f"{show(n | {'layer': layer}):>{w}}" for _, w, show in COLUMNS))
        return "\n".join(rows)


def _count(name: str) -> Callable[[dict], str]:
    return lambda n: f"{n[name]:.0f}"


def _ms(name: str) -> Callable[[dict], str]:
    return lambda n: f"{n[name] / 1e3:.1f}"


COLUMNS = (  # heading, width, how its value is shown
    ("layer", 5, _count("layer")),
    ("uses", 7, _count("uses")),
    ("hits", 6, lambda n: f"{n['hits'] / max(n['uses'], 1):.0%}"),
    ("by token", 10, lambda n: f"{n['tokens_hit'] / max(n['tokens'], 1):.0%}"),
    ("on CPU", 8, _count("on_cpu")),
    ("on GPU", 8, _count("on_gpu")),
    ("copied", 8, _count("copied")),
    ("useful/late/wasted", 20, lambda n: f"{n['useful']:.0f}/{n['late']:.0f}/{n['wasted']:.0f}"),
    ("from RAM/disk", 15, lambda n: f"{n['from_ram']:.0f}/{n['from_disk']:.0f}"),
    ("MB moved", 10, lambda n: f"{n['bytes'] / 1e6:.1f}"),
    ("CPU ms", 9, _ms("cpu_us")),
    ("GPU ms", 9, _ms("gpu_us")),
    ("link ms", 9, _ms("link_us")),
    ("CPU waits", 11, _ms("cpu_waits_us")),
    ("GPU waits", 11, _ms("gpu_waits_us")),
)
