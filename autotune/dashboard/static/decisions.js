// The list of decisions, newest first: what, why, and what was predicted and measured.

import { byId, el, put, say } from "./dom.js";
import { UNKNOWN, clock, said, show } from "./units.js";

const FIRST = 15;
const FIGURES = [
  ["ttft_tail_s", "TTFT tail", "seconds"],
  ["tbt_tail_s", "TBT tail", "seconds"],
  ["goodput_rps", "inside all targets", "rate"],
  ["kv_usage", "KV pool in use", "share"],
  ["load", "load", "share"],
  ["waiting", "waiting", "count"],
];
const DONE = { applied: "done", converging: "done" };
const SIGNS = { done: "✓", advised: "i", person: "●", held: "–" };
// Figures beside it may be worse than before, and yet nothing counts against the change.
const OUTCOMES = { met: "✓ kept", short: "~ kept, short of the prediction", missed: "✕ missed", unclear: "? unclear" };

export function kindOf(row) {
  if (row.scenario === "override") return "person";
  return DONE[row.verdict] ?? (row.verdict === "advised" ? "advised" : "held");
}

export const lineOf = (row) => `${row.knob} ${row.old ?? "?"} → ${row.new}: ${row.verdict} (${row.scenario})`;

export class DecisionList {
  constructor() {
    this.shown = FIRST;
    this.open = new Set();
    this.drawn = null;
    byId("more").addEventListener("click", () => {
      this.shown = Infinity;
      this.draw(this.drawn);
    });
  }

  draw(rows) {
    this.drawn = rows;
    const newest = rows.toReversed();
    const list = newest.slice(0, this.shown).map((row) => this.#item(row));
    put(byId("decisions"), ...(list.length ? list : [el("li", { class: "none" }, "Nothing has been decided since the daemon started.")]));
    const more = byId("more");
    more.hidden = newest.length <= this.shown;
    say(more, `Show all ${newest.length}`);
  }

  #item(row) {
    const kind = kindOf(row);
    const key = `${row.tick} ${row.knob}`;
    return el(
      "li",
      { class: `decision decision-${kind}` },
      el(
        "p",
        { class: "what" },
        el("time", {}, clock(row.wall_s, { date: true })),
        el("span", { class: "move" }, `${row.knob} ${row.old ?? "?"} → ${row.new}`),
        el("span", { class: "verdict" }, el("span", { "aria-hidden": "true" }, `${SIGNS[kind]} `), row.verdict),
      ),
      el("p", { class: "why" }, said(row.reason || row.why || UNKNOWN)),
      row.reason && row.why ? el("p", { class: "note" }, said(row.why)) : null,
      el("p", { class: "note" }, `tick ${row.tick} · ${row.scenario} · by ${row.writer}`),
      row.effect || row.predicted ? this.#effect(row, key) : null,
    );
  }

  #effect(row, key) {
    const effect = row.effect ?? {};
    const details = el("details", { class: "effect", open: this.open.has(key) }, el("summary", {}, summary(row.predicted ?? {}, effect)));
    details.addEventListener("toggle", () => (details.open ? this.open.add(key) : this.open.delete(key)));
    if (effect.why) details.append(el("p", { class: "note" }, said(effect.why)));
    if (effect.unknown) details.append(el("p", { class: "note" }, effect.unknown));
    if (effect.together_with?.length) {
      details.append(el("p", { class: "note" }, `Ticks ${effect.together_with.join(", ")} fell into the same window.`));
    }
    details.append(figures(row.predicted ?? {}, effect));
    return details;
  }
}

function summary(predicted, effect) {
  if (effect.outcome) return `${OUTCOMES[effect.outcome] ?? `? ${effect.outcome}`}${moves(predicted, effect)}`;
  if (effect.unknown) return "? effect unknown";
  return effect.after ? "measured, not judged yet" : "predicted, not measured yet";
}

// The tails before and after, as far as they are known: ': TTFT tail 3.8 s → 1.7 s, predicted 0.9 s'.
function moves(predicted, { before = {}, after = {} }) {
  const known = FIGURES.slice(0, 2).filter(([name]) => typeof before[name] === "number" && typeof after[name] === "number");
  const told = known.map(([name, label, unit]) => {
    const hoped = typeof predicted[name] === "number" ? ` (predicted ${show(predicted[name], unit)})` : "";
    return `${label} ${show(before[name], unit)} → ${show(after[name], unit)}${hoped}`;
  });
  return told.length ? `: ${told.join(", ")}` : "";
}

function figures(predicted, { before = {}, after = {} }) {
  const heads = ["", "before", "predicted", "after"].map((text) => el("th", { scope: "col" }, text));
  const rows = FIGURES.filter(([name]) => [before, predicted, after].some((one) => typeof one[name] === "number"));
  const cells = rows.map(([name, label, unit]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      ...[before, predicted, after].map((one) => el("td", {}, show(one[name], unit))),
    ),
  );
  return el("table", { class: "figures" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...cells));
}
