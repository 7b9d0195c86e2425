"""What a restart would be good for and what it costs, said to people."""

from __future__ import annotations

from engine.text import rough_time
from policies.restart_advice import Advice


def worth_text(advice: Advice) -> str:
    """What it would have saved and costs, in one line; what is not measured is called estimated."""
    saving, cost = advice.saving, advice.cost
    if saving is None or cost is None:
        return "nothing to be saved"
    parts = []
    if saving.preemptions is not None:
        parts.append(f"{saving.preemptions:.0f} of {advice.evidence.preemptions or 0:.0f} preemptions")
    if saving.over_s is not None:
        parts.append(f"{saving.over_s:.0f} of {advice.evidence.over_s or 0:.0f} s over target")
    else:
        parts.append(f"{saving.pressed_s:.0f} of {advice.evidence.pressed_s:.0f} s of waiting for memory")
    requests = "" if cost.requests is None else f", in which {cost.requests:.0f} requests come"
    kind = "as the last one did" if cost.is_measured else "estimated"
    back = "never" if advice.payback_s is None else f"after {rough_time(advice.payback_s)} of such load"
    return (
        f"would have saved {' and '.join(parts)} (estimated); a restart costs {cost.seconds:.0f} s without service "
        f"({kind}){requests}: paid back {back}"
    )
