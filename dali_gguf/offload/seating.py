"""Which experts have the slots when a run begins, and once its prompt has shown which are hot."""

import numpy as np

from dali_gguf.offload.gpu_slots import NOWHERE
from dali_gguf.offload.gpu_traffic import Traffic
from dali_gguf.offload.transfer import DEMAND, Copy


def fill_all(traffic: Traffic, resident: np.ndarray) -> None:
    """Copies the first residents uint8 [L, E] into their slots, and waits for them."""
    slots, link, copies = traffic.slots, traffic.link, []
    for row, expert in np.argwhere(resident).tolist():
        offset, _ = slots.take(row)
        slots.place[row, expert] = offset
        copies.append(traffic.copy_of(row, expert, offset, DEMAND, None))
    _await(traffic, copies)
    link.bytes = link.copies = 0
    link.busy_us = 0.0


def reseat(traffic: Traffic) -> None:
    """Every layer's slots go to its experts with the highest scores, at once."""
    cache, place, copies = traffic.cache, traffic.slots.place, []
    for row, score in enumerate(cache.score):
        resident, absent = cache.resident[row], traffic.near(row) == 0
        best = [e for e in np.argsort(-score, kind="stable").tolist() if absent[e]]
        worst = [e for e in np.argsort(score, kind="stable").tolist() if resident[e]]
        for load, evict in zip(best, worst):
            if score[load] <= score[evict]:
                break
            offset = int(place[row, evict])
            place[row, evict], place[row, load] = NOWHERE, offset
            resident[evict], resident[load] = 0, 1
            copies.append(traffic.copy_of(row, load, offset, DEMAND, traffic.last_use))
            traffic.counters.add(row, "fills")
            traffic.counters.add(row, "bytes", copies[-1].nbytes)
    _await(traffic, copies)


def _await(traffic: Traffic, copies: list[Copy]) -> None:
    """Until all have ended. Experts whose copy failed are nowhere then, and the first error is
    raised."""
    traffic.link.offer(copies)
    errors, waiting = [], list(reversed(copies))
    while waiting:
        copy = waiting[-1]
        try:
            traffic.link.wait(copy)
        except BaseException as error:
            errors.append(error)
            if error is not copy.error:  # interrupted: it is still on its way
                continue
            traffic.cache.resident[copy.row, copy.expert] = 0
            traffic.give(copy, None)
        waiting.pop()
    if errors:
        raise errors[0]
