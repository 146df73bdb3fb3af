"""What a hybrid scheduler tells about a run."""


def line(scheduler) -> str:
    """For the closing line. scheduler: a HybridScheduler."""
    parts = [scheduler.counters.line(), scheduler.choices.line(), scheduler.pays.line()]
    if scheduler.verifier is not None:
        parts.append(scheduler.verifier.line())
    return " | ".join(part for part in parts if part)


def figures(scheduler) -> dict:
    """For --stats-json."""
    out = scheduler.counters.as_dict()
    out["placement"] = scheduler.choices.placement
    out["kept"] = dict(scheduler.pays.on)
    link = scheduler.traffic.link
    out["link"] = {"bytes": link.bytes, "busy_us": round(link.busy_us)}
    if scheduler.verifier is not None:
        out["verify"] = scheduler.verifier.as_dict()
    return out
