"""offload/memory_plan.py: fits, streams, or refuses with a budget that works."""

import re

import pytest

from dali_gguf.errors import MemoryBudgetError
from dali_gguf.offload.budget import MACHINE, Room
from dali_gguf.offload.memory_plan import Demand, is_expert, plan_memory

GIB = 1 << 30
DEMAND = Demand(experts=16 * GIB, dense=2 * GIB, kv=GIB, scratch=GIB // 4)


def room(gib, source="--ram"):
    return Room(int(gib * GIB), source)


def test_what_fits_is_mapped():
    plan = plan_memory(DEMAND, room(30, MACHINE), GIB)
    assert not plan.streams and plan.arena_bytes == 0 and "fit" in plan.line()


def test_the_margin_is_larger_where_other_programs_live():
    assert plan_memory(DEMAND, room(20.5, MACHINE), GIB).streams
    assert not plan_memory(DEMAND, room(19.5), GIB).streams


def test_what_does_not_fit_streams_within_the_budget():
    plan = plan_memory(DEMAND, room(8), GIB)
    assert plan.streams and plan.arena_bytes + DEMAND.fixed <= 8 * GIB
    assert plan.arena_bytes > 4 * GIB and "on disk" in plan.line()


@pytest.mark.parametrize("source", ["--ram", MACHINE])
def test_the_refusal_names_the_smallest_budget_that_works(source):
    with pytest.raises(MemoryBudgetError, match="would work") as error:
        plan_memory(DEMAND, room(4, source), GIB)
    smallest = int(re.search(r"(\d+)M would work", str(error.value))[1]) << 20
    assert plan_memory(DEMAND, Room(smallest, source), GIB).streams
    with pytest.raises(MemoryBudgetError):
        plan_memory(DEMAND, Room(smallest - (8 << 20), source), GIB)


def test_a_dense_model_fits_or_is_refused():
    dense = Demand(0, 8 * GIB, GIB, GIB // 4)
    assert not plan_memory(dense, room(12), 0).streams
    with pytest.raises(MemoryBudgetError, match="would work"):
        plan_memory(dense, room(6), 0)


@pytest.mark.parametrize("name, expert", [
    ("blk.0.ffn_gate_exps.weight", True), ("blk.11.ffn_down.127.weight", True),
    ("blk.3.ffn_gate_up_exps.weight", True), ("blk.3.ffn_gate_exps.bias", False),
    ("blk.3.ffn_gate.weight", False), ("blk.3.ffn_gate_shexp.weight", False),
    ("blk.3.ffn_gate_inp.weight", False), ("token_embd.weight", False),
])
def test_which_tensors_are_experts(name, expert):
    assert is_expert(name) == expert


def test_what_a_gpu_holds_needs_no_memory():
    beside = DEMAND.beside_gpu(on_gpu=12 * GIB, staging=GIB // 8)
    assert beside.fixed == DEMAND.fixed - GIB + GIB // 8, "the KV cache lies on the GPU"
    for demand, named in ((DEMAND, True), (beside, False)):
        with pytest.raises(MemoryBudgetError) as error:
            plan_memory(demand, room(1), GIB)
        assert ("KV cache" in str(error.value)) == named
    assert not plan_memory(beside, room(8), GIB).streams
    plan = plan_memory(beside, room(5), GIB)
    assert plan.streams and plan.arena_bytes + beside.fixed <= 5 * GIB
    assert "12.0G on the GPU, the others on disk" in plan.line()


def test_the_refusal_counts_what_is_in_use_already_and_the_staging():
    beside = DEMAND.beside_gpu(on_gpu=4 * GIB, staging=GIB // 8)
    with pytest.raises(MemoryBudgetError, match="copies to the GPU 128M") as error:
        plan_memory(beside, Room(GIB, "--ram 2G", GIB), GIB)
    smallest = int(re.search(r"(\d+)M would work", str(error.value))[1]) << 20
    assert plan_memory(beside, Room(smallest - GIB, "--ram", GIB), GIB).streams
    with pytest.raises(MemoryBudgetError):
        plan_memory(beside, Room(smallest - GIB - (8 << 20), "--ram", GIB), GIB)
