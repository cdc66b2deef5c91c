// Polling, connection status and event handlers.

const POLL_MS = 1000;
const AWAY_MS = 2000; // interval while the server does not respond
const SLOW_MS = 3000; // the engine responds between steps, and a step of a long prompt on a CPU takes seconds
const ANSWER_MS = 60_000;
const KEY = "kvtier admin key";
const WORDS = {
  connecting: "Connecting", ok: "Serving", sleeping: "Asleep", draining: "Shutting down", slow: "Slow", away: "No answer",
  failed: "Failing", key: "Key needed",
};

const history = new History();
const recent = new Recent();
let state = null;
let chosen = 120;
let timer = 0;
let inFlight = null; // AbortController of the request in flight

const redraw = () => { if (state !== null) showAll(); };
const hitsPointer = new Pointer(byId("hits"), redraw);
const ttftPointer = new Pointer(byId("ttft"), redraw);

function showAll() {
  const shown = timeShown(history, chosen);
  write(byId("model"), state.model);
  write(byId("uptime"), `up ${span(state.time - state.started)}`);
  showSummary(state, history, shown);
  showTiers(state, history, shown);
  showHits(state, history, shown, hitsPointer);
  showTransfers(state, history, shown);
  showTtft(state, history, shown, ttftPointer);
  showGhost(state);
  recent.show(state);
}

/** Show the status in the header and a notice, which screen readers announce once. */
function showStatus(link, notice = "") {
  document.body.dataset.link = link;
  write(byId("status"), WORDS[link]);
  write(byId("notice"), notice);
  document.title = [link === "ok" ? "" : WORDS[link], "kvtier", state?.model].filter(Boolean).join(" · ");
  byId("key-form").hidden = link !== "key";
  byId("forget").hidden = sessionStorage.getItem(KEY) === null;
}

function showState(answer) {
  state = answer;
  document.body.dataset.seen = "";
  history.add(state);
  const notices = {
    sleeping: "The server is asleep. Its device memory is released, and requests fail with 503 until POST /control/wake.",
    draining: "The server is shutting down. It accepts no new requests and finishes the current requests.",
  };
  showStatus(state.status in WORDS ? state.status : "ok", notices[state.status] ?? "");
  showAll();
}

/** Show an error response. Returns the milliseconds until the next poll, or null to stop polling. */
function showError(status, message) {
  if (status !== 401 && status !== 403) {
    showStatus("failed", `The server returned ${status}: ${message || "no reason given"}`);
    return AWAY_MS;
  }
  const hadKey = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  const wrong = status === 401 ? "The server rejected this key." : "This key is not an admin key.";
  showStatus("key", `${hadKey ? `${wrong} ` : ""}Only admins can see the state of this server; enter an admin key.`);
  return null; // polling again with the same key would fail again
}

const shownOf = () => (state === null ? "" : ` The data shown is from ${clock(state.time)}.`);

/** Fetch the state. Returns null if the server does not respond. */
async function fetchState(signal) {
  const held = sessionStorage.getItem(KEY);
  try {
    const answer = await fetch("state", {
      cache: "no-store", credentials: "omit", headers: held ? { Authorization: `Bearer ${held}` } : {},
      signal: AbortSignal.any([signal, AbortSignal.timeout(ANSWER_MS)]),
    });
    return { status: answer.status, body: await answer.json() };
  } catch (error) { // no connection, timeout, or a response that is not JSON, such as a proxy's error page
    if (signal.aborted || ["TypeError", "TimeoutError", "SyntaxError"].includes(error.name)) return null;
    throw error;
  }
}

/** Poll once. Returns the milliseconds until the next poll, or null to stop polling. */
async function pollOnce(signal) {
  const slow = setTimeout(() => showStatus("slow",
    `No response for ${SLOW_MS / 1000} s: the engine is in a long step, or it hangs.${shownOf()}`), SLOW_MS);
  const answer = await fetchState(signal);
  clearTimeout(slow);
  if (signal.aborted) return null; // the page was hidden, or the key changed
  if (answer === null) {
    history.pause();
    showStatus("away", `The server does not respond; retrying.${shownOf()}`);
    return AWAY_MS;
  }
  if (answer.status !== 200) return showError(answer.status, answer.body?.error?.message);
  showState(answer.body);
  return POLL_MS;
}

async function poll() {
  clearTimeout(timer);
  inFlight?.abort();
  const controller = inFlight = new AbortController();
  const began = performance.now();
  const wait = await pollOnce(controller.signal);
  if (wait === null || controller.signal.aborted) return;
  timer = setTimeout(poll, Math.max(100, wait - (performance.now() - began)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return void poll();
  history.pause();
  clearTimeout(timer);
  inFlight?.abort();
});
byId("span").addEventListener("change", (event) => {
  chosen = Number(event.target.value);
  redraw();
});
byId("more").addEventListener("click", () => {
  recent.isLong = !recent.isLong;
  redraw();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  poll();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
for (const id of ["hits-table", "ttft-table", "ghost-table"]) byId(id).addEventListener("toggle", redraw);
new ResizeObserver(redraw).observe(byId("main"));
poll();
