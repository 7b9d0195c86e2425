// What the page asks of the daemon. The token goes into a header, is kept in this tab only, and never into an address.

const PLACE = "kv-autotune.token";
const PATIENCE_MS = 5000;
const ORDER_PATIENCE_MS = 15000; // the control loop may take ten seconds to get to it
const FIXED = { cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer" };

let token = "";
try {
  token = sessionStorage.getItem(PLACE) ?? "";
} catch {
  // Storage is forbidden here: the token lives as long as the page.
}

export const hasToken = () => token !== "";

// ``keep``: until the tab is closed; else until the page is.
export function setToken(given, keep) {
  token = given.trim();
  try {
    if (keep && token) sessionStorage.setItem(PLACE, token);
    else sessionStorage.removeItem(PLACE);
  } catch {
    // as above
  }
}

export async function get(path) {
  const answer = await fetch(path, { ...FIXED, signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

// Has something done; returns the daemon's line. Throws an Error with its line, or with why there was none; ``status`` is
// the answer's, 0 without one.
export async function order(name, body) {
  let answer;
  let document;
  try {
    answer = await fetch(`control/${name}`, {
      ...FIXED,
      method: "POST",
      headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(ORDER_PATIENCE_MS),
    });
    document = await answer.json();
  } catch {
    throw Object.assign(new Error("no answer from the daemon; it may still do it"), { status: answer?.status ?? 0 });
  }
  if (!answer.ok) throw Object.assign(new Error(String(document.error)), { status: answer.status });
  return String(document.answer);
}
