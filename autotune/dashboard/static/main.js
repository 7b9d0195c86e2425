// Asks, draws, asks again. Stops asking while nobody looks.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { Controls } from "./controls.js";
import { DecisionList, kindOf, lineOf } from "./decisions.js";
import { byId, el, put, say } from "./dom.js";
import { panels } from "./panels.js";
import { Store } from "./store.js";
import { ago, clock, show } from "./units.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 10000;
const OLD_S = 8; // an answer older than this is not what is
const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const ON_PLOTS = new Set(["done", "advised", "person"]);

const now = () => performance.now() / 1000;

class Page {
  constructor(about) {
    this.store = new Store(about, now);
    this.span = 900;
    this.at = null; // wall seconds of the cursor
    this.failures = 0;
    this.timer = null;
    const cursor = { to: (t) => this.#point(t), by: (points) => this.#step(points) };
    this.charts = panels(about.formats).map((one) => new Chart(one, cursor));
    put(byId("plots"), ...this.charts.map((chart) => chart.node));
    this.decisions = new DecisionList();
    this.controls = new Controls(byId("controls"), about, () => this.look());
    this.#offerSpans();
    new ResizeObserver(() => this.#drawPlots()).observe(byId("plots"));
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.timer) : this.look()));
    setInterval(() => this.#drawState(), 1000);
  }

  async look() {
    clearTimeout(this.timer);
    const version = `${this.store.process} ${this.store.version}`;
    this.failures = (await this.store.refresh()) ? 0 : this.failures + 1;
    if (`${this.store.process} ${this.store.version}` !== version || !this.decisions.drawn) this.decisions.draw(this.store.rows);
    this.#drawState();
    this.#drawPlots();
    this.controls.draw(this.store.status);
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.look(), Math.min(SLOWEST_MS, EVERY_MS * 2 ** Math.min(this.failures, 3)));
  }

  #point(t) {
    if (t === this.at) return;
    this.at = t;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#drawPlots());
  }

  #step(points) {
    const { t } = this.store.data;
    const from = this.store.wall - this.span;
    const first = t.findIndex((one) => one >= from);
    if (first < 0) return;
    const now = this.at === null ? t.length - 1 : t.findLastIndex((one) => one <= this.at);
    this.#point(t[Math.min(t.length - 1, Math.max(first, now + points))]);
  }

  #offerSpans() {
    for (const [seconds, label] of SPANS) {
      const id = `span-${seconds}`;
      const input = el("input", { type: "radio", name: "span", id, checked: seconds === this.span });
      input.addEventListener("change", () => {
        this.span = seconds;
        this.#drawPlots();
      });
      byId("spans").append(input, el("label", { for: id }, label));
    }
  }

  #drawPlots() {
    const { data, about, rows, status, wall } = this.store;
    const from = wall - this.span;
    const index = this.at === null ? -1 : data.t.indexOf(this.at);
    const at = index < 0 || this.at < from ? null : index;
    const marks = rows
      .filter((row) => ON_PLOTS.has(kindOf(row)))
      .map((row) => ({ t: row.wall_s, kind: kindOf(row), text: `${clock(row.wall_s)} ${lineOf(row)}` }));
    const every = Math.max(about.every_s, status.tick_s ?? 0);
    if (data.t.length) for (const chart of this.charts) chart.draw({ data, from, to: wall, every, marks, at });
    say(byId("cursor"), at === null ? "Figures are the newest. Point at a plot, or use the arrow keys on one, for earlier ones." : `Figures at ${clock(data.t[at])}`);
  }

  #drawState() {
    const { status, silence, problem, heard, heardWall } = this.store;
    const isLost = this.failures > 1 || (silence !== null && silence > OLD_S && !document.hidden);
    document.body.classList.toggle("stale", isLost || (heard !== null && status.engine !== "ok"));
    say(byId("fresh"), heard === null ? "Nothing heard yet" : `Updated ${ago(silence)} ago`);
    const alerts = [];
    if (isLost) alerts.push(`The daemon does not answer (${problem || "it takes too long"}). What is shown is as of ${heard === null ? "never" : clock(heardWall, { date: true })}.`);
    else if (heard !== null) alerts.push(...troubles(status));
    const wanted = alerts.join("\n");
    if (wanted !== this.alerts) put(byId("alerts"), ...alerts.map((text) => el("p", { class: "alert" }, text)));
    this.alerts = wanted;
    const facts = factsOf(status, isLost);
    const drawn = JSON.stringify(facts);
    if (drawn !== this.facts) put(byId("facts"), ...facts.map(fact));
    this.facts = drawn;
  }
}

function troubles(status) {
  const told = [];
  if (status.engine && status.engine !== "ok") {
    told.push(`Engine ${status.engine}${status.problem ? `: ${status.problem}` : ""}. The daemon holds; plots end where the figures do.`);
  } else if (status.problem) told.push(status.problem);
  if (status.policy_refused) told.push(`${status.policy_refused}; ${status.policy} decides in its place.`);
  if (status.journal?.last_error) told.push(`Journal: ${status.journal.last_error}`);
  for (const text of status.last_reload?.rejected ?? []) told.push(`The last reload was refused: ${text}`);
  return told;
}

// [name, value, kind]; kind: good, warn, bad or plain.
function factsOf(status, isLost) {
  const quality = status.quality ?? {};
  const spent = quality.lost_per_token;
  const facts = [
    ["Daemon", isLost ? "no answer" : "answers", isLost ? "bad" : "good"],
    ["Engine", isLost ? "unknown" : (status.engine ?? "unknown"), isLost ? "warn" : status.engine === "ok" ? "good" : "bad"],
    ["Mode", `${status.mode ?? "unknown"}${status.mode_by === "order" ? ", by order" : ""}`, status.mode === "active" ? "good" : "warn"],
    ["Policy", status.policy ?? "unknown", status.policy_refused ? "bad" : "plain"],
    ["Model", status.model ?? "unknown", "plain"],
    ["Last change", status.seconds_since_change == null ? "none yet" : `${ago(status.seconds_since_change)} ago`, "plain"],
  ];
  if (typeof quality.budget === "number") {
    const over = typeof spent === "number" && spent > quality.budget;
    facts.push(["Quality lost", `${show(spent, "share")} of ${show(quality.budget, "share")}`, over ? "bad" : "plain"]);
  }
  return facts;
}

const SIGNS = { good: "✓", warn: "!", bad: "✕", plain: "" };

function fact([name, value, kind]) {
  const sign = SIGNS[kind] ? el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]) : null;
  return el("li", { class: `fact fact-${kind}` }, el("span", { class: "name" }, name), " ", sign, el("span", { class: "value" }, value));
}

async function start() {
  let about = null;
  while (about === null) {
    try {
      about = await get("dashboard/about");
    } catch (error) {
      say(byId("fresh"), `The daemon does not answer: ${error.message}`);
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }
  await new Page(about).look();
}

start();
