"""What the daemon costs beside an engine that serves: resident memory, processor time, and what it tells Prometheus;
then the same while a page is open.
"""

from __future__ import annotations

import json
import urllib.parse
from collections import Counter
from statistics import median
from typing import Any, Final

from autotune.bench.context import Context, Outcome
from autotune.bench.processes import has_mapped, processor_s, resident_bytes
from autotune.bench.stand import Stand
from autotune.bench.traffic import Load, Traffic

_MOST_MB: Final = 80.0
_MOST_CORE_PCT: Final = 0.5
_SETTLE_S: Final = 20.0
_MEASURED_S: Final = 300.0
_SAMPLE_S: Final = 5.0
_SCRAPE_S: Final = 15.0  # Prometheus' own habit
_LOOK_S: Final = 2.0  # an open page's habit
_RPS: Final = 1.0
# Everything else is the default: a tick a second, two readings of the engine a second.
_CONFIG: Final[dict[str, Any]] = {}


def run(context: Context) -> Outcome:
    seconds = 60.0 * context.minutes if context.minutes else 30.0 if context.quick else _MEASURED_S
    with Stand(context, "footprint", _CONFIG) as stand:
        traffic = Traffic(stand.stack.url, Load(lambda _: _RPS), context.clock, context.seed)
        traffic.start()
        try:
            figures = _watch(context, stand, seconds)
            figures |= _watch_page(context, stand, seconds / 2)
        finally:
            tally = traffic.stop()
    figures["footprint_requests"] = tally.completed
    outcome = Outcome(figures)
    outcome.bar("rss_mb", _MOST_MB)
    outcome.bar("core_pct", _MOST_CORE_PCT)
    outcome.bar("page_rss_mb", _MOST_MB)
    if figures["torch_imported"]:
        outcome.missed.append("the daemon has mapped torch")
    return outcome


def _watch(context: Context, stand: Stand, seconds: float) -> dict[str, Any]:
    clock, pid = context.clock, stand.daemon.pid
    stand.sleep(min(_SETTLE_S, seconds))
    begin_ns, begin_cpu_s, scraped_ns = clock.now_ns(), processor_s(pid), 0
    engine_cpu_s, ticks_before = processor_s(stand.engine.pid), _ticks(stand)
    resident: list[int] = []
    while (passed_s := (clock.now_ns() - begin_ns) / 1e9) < seconds:
        if clock.now_ns() - scraped_ns >= _SCRAPE_S * 1e9:
            stand.metrics()
            scraped_ns = clock.now_ns()
        resident.append(resident_bytes(pid))
        if len(resident) % 12 == 0:
            used_pct = 100 * (processor_s(pid) - begin_cpu_s) / passed_s
            context.log(f"footprint: {passed_s:.0f} s, {resident[-1] / 1e6:.1f} MB, {used_pct:.2f} % of a core")
        stand.sleep(min(_SAMPLE_S, seconds - passed_s))
    passed_s = (clock.now_ns() - begin_ns) / 1e9
    series = Counter(line.partition("{")[0].split(" ")[0] for line in stand.metrics().splitlines() if line[:1] != "#")
    return {
        "rss_mb": round(max(resident) / 1e6, 1),
        "rss_mib": round(max(resident) / 2**20, 1),
        "rss_median_mb": round(median(resident) / 1e6, 1),
        "core_pct": round(100 * (processor_s(pid) - begin_cpu_s) / passed_s, 3),
        "engine_core_pct": round(100 * (processor_s(stand.engine.pid) - engine_cpu_s) / passed_s, 1),
        "torch_imported": has_mapped(pid, "libtorch", "/torch/"),
        "series_per_engine": sum(series.values()),
        "footprint_ticks": _ticks(stand) - ticks_before,
        "footprint_s": round(passed_s, 1),
    }


def _watch_page(context: Context, stand: Stand, seconds: float) -> dict[str, Any]:
    """The same while somebody has the built-in page open: whole at first, then what is new every two seconds."""
    clock, pid = context.clock, stand.daemon.pid
    begin_ns, begin_cpu_s, resident = clock.now_ns(), processor_s(pid), []
    known = {"process": "", "after": 0, "decisions": 0}
    while (clock.now_ns() - begin_ns) / 1e9 < seconds:
        known = _look(stand, known)
        resident.append(resident_bytes(pid))
        stand.sleep(_LOOK_S)
    passed_s = (clock.now_ns() - begin_ns) / 1e9
    return {
        "page_rss_mb": round(max(resident) / 1e6, 1),
        "page_core_pct": round(100 * (processor_s(pid) - begin_cpu_s) / passed_s, 3),
    }


def _look(stand: Stand, known: dict[str, Any]) -> dict[str, Any]:
    query = urllib.parse.urlencode(known)
    answer = stand.get(f"http://127.0.0.1:{stand.stack.admin_port}/dashboard/data?{query}")
    if answer is None:
        return known
    new = json.loads(answer)
    return {"process": new["process"], "after": new["points"]["last"], "decisions": new["decisions"]["version"]}


def _ticks(stand: Stand) -> int:
    status = stand.status()
    return 0 if status is None else int(status["tick"])
