"""What ``autotune advise`` says: a document for programs and lines for people. What is not measured is called so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.adapters.base import RestartableEngine
from autotune.adapters.looks import settings_of
from autotune.adapters.restart_file import ARGUMENTS, render
from autotune.adapters.watching import Watch, measured
from autotune.adapters.worth import worth_text
from engine.tunables import TunableValue
from policies.restart_advice import Advice, Terms, advise


def advices(watch: Watch, engine: RestartableEngine, terms: Terms) -> dict[str, Advice]:
    """By label: what each of the engines by itself would call for."""
    return {
        label: advise(one.looks, settings_of(engine, one.last.effective if one.last else {}), terms)
        for label, one in watch.engines.items()
    }


def chosen(found: Mapping[str, Advice]) -> str:
    """The label whose advice counts, as a restart meets them all: that of whoever was short of memory for longest."""
    return max(found, key=lambda label: (bool(found[label].changes), found[label].evidence.pressed_s))


def document(watch: Watch, engine: RestartableEngine, who: str, url: str, terms: Terms, missed: int) -> dict[str, Any]:
    """Everything, as JSON values."""
    found = advices(watch, engine, terms)
    label = chosen(found)
    advice, last = found[label], watch.engines[label].last
    effective = dict(last.effective) if last is not None else {}
    values = {**effective, **{change.knob: change.value for change in advice.changes}}
    changed = {change.knob: values[change.knob] for change in advice.changes}
    targets = watch.targets
    return {
        "engine": {"url": url, "who": who, "kind": engine.kind, "knobs": effective},
        "targets": {"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s, "quantile": targets.quantile},
        "missed_readings": missed,
        "engines": {
            name: {
                "readings": one.readings,
                "restarts_seen": one.restarts,
                "measured": {**measured(one, targets.quantile), **vars(found[name].evidence)},
                "advice": found[name].to_json(),
            }
            for name, one in watch.engines.items()
        },
        "advice": {**advice.to_json(), "of": label, "worth": worth_text(advice) if advice.changes else ""},
        "file": _file(engine, changed),
        "restarted": False,
    }


def _file(engine: RestartableEngine, changed: Mapping[str, TunableValue]) -> list[str]:
    try:
        return render("environment", engine.arguments(changed), changed).splitlines()[2:] if changed else []
    except ValueError as error:
        return [f"# {error}"]


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document for people."""
    engine, targets = found["engine"], found["targets"]
    knobs = " ".join(f"{knob}={value}" for knob, value in engine["knobs"].items())
    yield f"{engine['who']} at {engine['url']}: {knobs or 'it does not tell its settings'}"
    for label, one in found["engines"].items():
        name = f"engine {label}: " if len(found["engines"]) > 1 else ""
        yield from _measured(name, one, targets)
    if found["missed_readings"]:
        yield f"{found['missed_readings']} readings failed"
    advice = found["advice"]
    if not advice["changes"]:
        yield f"advice: leave it as it is ({advice['scenario']}): {advice['reason']}"
        return
    what = ", ".join(f"{knob}={value}" for knob, value in advice["changes"])
    yield f"advice: {'restart with' if advice['is_worth'] else 'not worth a restart, though it would help:'} {what}"
    yield f"because: {advice['reason']}"
    yield f"estimated: it {advice['worth']}"
    for text in advice["assumed"]:
        yield f"estimated: assumes that {text}"
    yield from _played(found.get("simulated"), found["engines"][advice["of"]]["measured"])
    yield f"to do it, in a file that the unit reads (EnvironmentFile=), with ${ARGUMENTS} at the end of its ExecStart:"
    for line in found["file"]:
        yield f"  {line}"
    yield "nothing was changed and nothing restarted"


def _measured(name: str, one: Mapping[str, Any], targets: Mapping[str, Any]) -> Iterator[str]:
    seen = one["measured"]
    quantile = f"p{100 * targets['quantile']:g}"
    yield (
        f"{name}measured: {seen['watched_s']:.0f} s, {one['readings']} readings; "
        f"{_said(seen['requests_per_s'], 'req/s')}, {_said(seen['generated_tokens_per_s'], 'tokens/s')}; "
        f"memory in use at most {_share(seen['peak_share'])}, "
        f"at most {_said(seen['peak_waiting'], 'waiting')}, {_said(seen['preemptions'], 'preemptions')}"
    )
    mean = "" if seen["tbt_mean_s"] is None else f" (mean {seen['tbt_mean_s']:.3g} s)"
    yield (
        f"{name}measured: TTFT {quantile} {_said(seen['ttft_tail_s'], 's')} of {targets['ttft_s']:g}, TBT {quantile} "
        f"{_said(seen['tbt_tail_s'], 's')}{mean} of {targets['tbt_s']:g}; {_said(seen['over_s'], 's over target')}, "
        f"{seen['pressed_s']:.0f} s short of memory"
    )
    if one["restarts_seen"]:
        yield f"{name}it was restarted {one['restarts_seen']} times meanwhile"


def _played(played: Mapping[str, Any] | None, seen: Mapping[str, Any]) -> Iterator[str]:
    if played is None:
        return
    if "impossible" in played:
        yield f"simulated: not possible: {played['impossible']}"
        return
    for name, key in (("as it was", "as_it_was"), ("as advised", "as_advised")):
        one = played[key]
        yield (
            f"simulated, {name}: {one['over_s']:.0f} s over target, {one['preemptions']:.0f} preemptions, "
            f"loss per token {one['loss_per_token']:.2%} (mean of {played['draws']} draws of arrivals like those seen)"
        )
    yield f"measured, as it was: {_said(seen['over_s'], 's over target')}, {_said(seen['preemptions'], 'preemptions')}"


def _said(value: float | None, unit: str) -> str:
    return f"unknown {unit}" if value is None else f"{value:.3g} {unit}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"
