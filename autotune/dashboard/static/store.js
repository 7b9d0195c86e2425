// What the page knows: the newest points and decisions, and for how long it has heard nothing.

import { get } from "./api.js";

export class Store {
  constructor(about, now) {
    this.about = about;
    this.now = now; // seconds of a clock that only goes forward
    this.forget();
    this.status = {};
    this.rows = [];
    this.heard = null; // when the last answer came, by now()
    this.heardWall = null; // the same by the daemon's wall clock
    this.aheadOfUs = 0; // the daemon's wall clock less ours
    this.problem = "";
  }

  forget() {
    this.process = "";
    this.lastPoint = 0;
    this.version = 0;
    this.data = { t: [], columns: {} };
  }

  // Asks for what is new. True when the daemon answered.
  async refresh() {
    const known = new URLSearchParams({ process: this.process, after: this.lastPoint, decisions: this.version });
    let answer;
    try {
      answer = await get(`dashboard/data?${known}`);
    } catch (error) {
      this.problem = String(error.message);
      return false;
    }
    this.#take(answer);
    return true;
  }

  // Seconds since the daemon last answered; null before the first time.
  get silence() {
    return this.heard === null ? null : this.now() - this.heard;
  }

  get wall() {
    return Date.now() / 1000 + this.aheadOfUs;
  }

  #take(answer) {
    if (answer.process !== this.process) this.forget();
    this.process = answer.process;
    const { t, columns, last } = answer.points;
    this.data.t = this.data.t.concat(t).slice(-this.about.size);
    for (const [name, values] of Object.entries(columns)) {
      this.data.columns[name] = (this.data.columns[name] ?? []).concat(values).slice(-this.about.size);
    }
    this.lastPoint = last;
    this.version = answer.decisions.version;
    if (answer.decisions.rows !== null) this.rows = answer.decisions.rows;
    this.status = answer.status;
    this.aheadOfUs = answer.now_s - Date.now() / 1000;
    this.heard = this.now();
    this.heardWall = answer.now_s;
    this.problem = "";
  }
}
