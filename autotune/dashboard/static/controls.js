// Orders: mode, knobs, reload. They need the daemon's token; everything else on the page does not.

import { hasToken, order, setToken } from "./api.js";
import { el, put, say } from "./dom.js";

const TIMES = [["", "until given back"], ["900", "15 minutes"], ["3600", "1 hour"], ["14400", "4 hours"], ["86400", "1 day"]];
const MEANINGS = {
  active: "writes what it decides",
  advise: "decides, and writes nothing",
  off: "only watches",
};

export class Controls {
  // ``changed``: called after an order was carried out, to look again at once.
  constructor(node, about, changed) {
    this.about = about;
    this.changed = changed;
    this.answer = el("p", { class: "answer", role: "status" });
    this.knobs = el("tbody");
    this.orders = []; // what is disabled without a token
    put(node, this.#tokenForm(), this.answer, this.#modes(), this.#knobTable(), this.#overrideForm(), this.#reload());
    this.#enable();
  }

  draw(status) {
    for (const [mode, button] of this.modes) button.setAttribute("aria-pressed", String(status.mode === mode));
    const row = (knob, value) => {
      const about = this.about.knobs[knob];
      const theirs = status.overrides?.[knob];
      const release = theirs === undefined ? null : this.#button("Give back", () => this.#order("release", { knob, ...this.#who() }), `Give ${knob} back to the daemon`);
      return el(
        "tr",
        {},
        el("th", { scope: "row", title: about?.description ?? null }, knob),
        el("td", {}, String(value)),
        el("td", {}, theirs ?? status.barred?.[knob] ?? (about?.can_be_set === false ? "set at its start" : "the daemon"), release ? " " : null, release),
      );
    };
    const state = JSON.stringify([status.tunables, status.overrides, status.barred]);
    if (state === this.drawn) return; // so that the focus stays where it is
    this.drawn = state;
    this.orders = this.orders.filter((one) => one.isConnected);
    put(this.knobs, ...Object.entries(status.tunables ?? {}).map(([knob, value]) => row(knob, value)));
    this.#enable();
  }

  #tokenForm() {
    const input = el("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false" });
    const keep = el("input", { type: "checkbox", id: "keep" });
    const state = el("p", { class: "note", id: "token-state" });
    this.tokenState = () => say(state, hasToken() ? "A token is set; orders are possible." : "Orders need the token of the daemon: the file admin.token beside its journal.");
    const forget = el("button", { type: "button" }, "Forget");
    forget.addEventListener("click", () => this.#setToken("", false));
    const form = el(
      "form",
      {},
      el("label", { for: "token" }, "Token"),
      el("div", { class: "row" }, input, el("button", { type: "submit" }, "Use"), forget),
      el("p", {}, keep, el("label", { for: "keep" }, "keep it until this tab is closed")),
      state,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#setToken(input.value, keep.checked);
      input.value = "";
    });
    return form;
  }

  #setToken(given, keep) {
    setToken(given, keep);
    say(this.answer, "");
    this.#enable();
  }

  #modes() {
    this.modes = this.about.modes.map((mode) => [mode, this.#button(mode, () => this.#order("mode", { mode }), `${mode}: ${MEANINGS[mode]}`)]);
    return el("div", { role: "group", "aria-labelledby": "mode-title" }, el("h3", { id: "mode-title" }, "Mode"), el("div", { class: "row" }, ...this.modes.map(([, button]) => button)));
  }

  #knobTable() {
    const heads = ["Knob", "In force", "Whose"].map((text) => el("th", { scope: "col" }, text));
    return el("div", { class: "wide" }, el("table", { class: "knobs" }, el("caption", {}, "Knobs"), el("thead", {}, el("tr", {}, ...heads)), this.knobs));
  }

  #overrideForm() {
    this.name = el("input", { id: "who", maxlength: "24", autocomplete: "off", placeholder: "admin" });
    const option = (value, text = value) => el("option", { value }, text);
    const names = Object.keys(this.about.knobs).filter((name) => this.about.knobs[name].can_be_set);
    if (!names.length) return el("p", { class: "note" }, "This engine takes its settings at its start: they change by a restart alone.");
    const knob = el("select", { id: "knob" }, ...names.map((name) => option(name)));
    const value = el("select", { id: "value" });
    const time = el("select", { id: "time" }, ...TIMES.map(([seconds, text]) => option(seconds, text)));
    const reason = el("input", { id: "reason", maxlength: "200", autocomplete: "off" });
    const offer = () => put(value, ...this.about.knobs[knob.value].values.map((one) => option(one)));
    knob.addEventListener("change", offer);
    offer();
    const submit = this.#mind(el("button", { type: "submit" }, "Set"));
    const field = (label, input) => el("div", { class: "field" }, el("label", { for: input.id }, label), input);
    const form = el("form", {}, el("h3", {}, "Set a knob yourself"), field("Knob", knob), field("Value", value), field("For", time), field("Reason", reason), field("Your name", this.name), submit);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const wanted = { knob: knob.value, value: value.value, reason: reason.value, ...this.#who() };
      if (time.value) wanted.for_s = Number(time.value);
      this.#order("set", wanted);
    });
    return form;
  }

  #who() {
    const name = this.name.value.trim();
    return name ? { who: name } : {};
  }

  #reload() {
    return el("div", {}, el("h3", {}, "Configuration"), this.#button("Reload the file", () => this.#order("reload", {}), null));
  }

  #button(text, act, label) {
    const button = el("button", { type: "button", "aria-label": label, title: label }, text);
    button.addEventListener("click", act);
    return this.#mind(button);
  }

  #mind(button) {
    this.orders.push(button);
    return button;
  }

  #enable() {
    for (const button of this.orders) button.disabled = !hasToken();
    this.tokenState();
  }

  async #order(name, body) {
    say(this.answer, "Asking the daemon");
    this.answer.className = "answer";
    try {
      say(this.answer, await order(name, body));
      this.answer.classList.add("answer-good");
    } catch (error) {
      say(this.answer, error.message);
      this.answer.classList.add("answer-bad");
    }
    await this.changed();
  }
}
