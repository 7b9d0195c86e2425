// Figures for people. What is unknown is a dash and never 0.

export const UNKNOWN = "–";

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);
const PREFIXES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// Three digits: 0.0123, 1.23, 123, 12,300.
export function short(value) {
  if (!isKnown(value)) return UNKNOWN;
  const rounded = Number(value.toPrecision(3));
  return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en") : String(rounded);
}

// How many bytes the prefix that suits ``largest`` stands for.
export function binary(largest) {
  return 1024 ** Math.min(PREFIXES.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, largest)) / 10)));
}

function bytes(value) {
  const factor = binary(value);
  return `${short(value / factor)} ${PREFIXES[Math.round(Math.log2(factor) / 10)]}`;
}

function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 9.995e-4) return `${short(value * 1e6)} µs`;
  return value < 0.9995 ? `${short(value * 1e3)} ms` : `${short(value)} s`;
}

const WRITERS = {
  share: (value) => `${short(100 * value)} %`,
  count: short,
  rate: (value) => `${short(value)}/s`,
  seconds,
  bytes,
};

export const show = (value, unit) => (isKnown(value) ? WRITERS[unit](value) : UNKNOWN);

// What daemon and engine say, with an arrow that no line break tears.
export const said = (text) => text.replaceAll("->", "→");

// A length of time: 12 s, 4 min, 2.5 h.
export function ago(length) {
  if (!isKnown(length)) return UNKNOWN;
  if (length < 120) return `${Math.max(0, Math.round(length))} s`;
  return length < 7200 ? `${Math.round(length / 60)} min` : `${(length / 3600).toFixed(1)} h`;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const MINUTES = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "2-digit", day: "2-digit" });

// Wall seconds as a time of day; with its date where that is not today's.
export function clock(wall, { minutes = false, date = false } = {}) {
  if (!isKnown(wall)) return UNKNOWN;
  const when = new Date(wall * 1000);
  const time = (minutes ? MINUTES : CLOCK).format(when);
  return date && DAY.format(when) !== DAY.format(new Date()) ? `${DAY.format(when)} ${time}` : time;
}
