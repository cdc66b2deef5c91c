// Asking the server, and saying how it is.

const POLL_MS = 1000;
const AWAY_MS = 2000; // while it does not answer
const SLOW_MS = 3000; // the engine answers between two steps, and a step of a long prompt on a CPU takes its time
const ANSWER_MS = 60_000;
const KEY = "kvtier admin key";
const WORDS = {
  connecting: "Connecting", ok: "Serving", sleeping: "Asleep", draining: "Going down", slow: "Slow", away: "No answer",
  failed: "Failing", key: "Key needed",
};

const history = new History();
const recent = new Recent();
let state = null;
let chosen = 120;
let timer = 0;
let asking = null; // an AbortController while a question is under way

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

/** How the server is, in the header and, where there is something to say, in a sentence that is read aloud once. */
function say(link, notice = "") {
  document.body.dataset.link = link;
  write(byId("status"), WORDS[link]);
  write(byId("notice"), notice);
  document.title = [link === "ok" ? "" : WORDS[link], "kvtier", state?.model].filter(Boolean).join(" · ");
  byId("key-form").hidden = link !== "key";
  byId("forget").hidden = sessionStorage.getItem(KEY) === null;
}

function took(answer) {
  state = answer;
  document.body.dataset.seen = "";
  history.add(state);
  const notices = {
    sleeping: "The server is asleep: its device memory is free and requests get 503 until POST /control/wake.",
    draining: "The server is going down: it takes no new requests and finishes those it has.",
  };
  say(state.status in WORDS ? state.status : "ok", notices[state.status] ?? "");
  showAll();
}

function refused(status, message) {
  if (status !== 401 && status !== 403) {
    say("failed", `The server answers with ${status}: ${message || "no reason given"}`);
    return AWAY_MS;
  }
  const hadKey = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  const wrong = status === 401 ? "The server does not know that key." : "That key is not an admin's.";
  say("key", `${hadKey ? `${wrong} ` : ""}This server shows its state to admins only; enter an admin key.`);
  return null; // until there is a key, the answer stays the same
}

const shownOf = () => (state === null ? "" : ` What is shown is of ${clock(state.time)}.`);

/** What the server says; null if it says nothing. */
async function fetchState(signal) {
  const held = sessionStorage.getItem(KEY);
  try {
    const answer = await fetch("state", {
      cache: "no-store", credentials: "omit", headers: held ? { Authorization: `Bearer ${held}` } : {},
      signal: AbortSignal.any([signal, AbortSignal.timeout(ANSWER_MS)]),
    });
    return { status: answer.status, told: await answer.json() };
  } catch (error) { // no connection, too late, or somebody else's page in its place
    if (signal.aborted || ["TypeError", "TimeoutError", "SyntaxError"].includes(error.name)) return null;
    throw error;
  }
}

/** One question. Returns after how long to ask again; null for not at all. */
async function ask(signal) {
  const slow = setTimeout(() => say("slow",
    `The server has not answered for ${SLOW_MS / 1000} s: a long step is under way, or it hangs.${shownOf()}`), SLOW_MS);
  const answer = await fetchState(signal);
  clearTimeout(slow);
  if (signal.aborted) return null; // the page is hidden, or there is another key
  if (answer === null) {
    history.pause();
    say("away", `The server does not answer; trying again.${shownOf()}`);
    return AWAY_MS;
  }
  if (answer.status !== 200) return refused(answer.status, answer.told?.error?.message);
  took(answer.told);
  return POLL_MS;
}

async function poll() {
  clearTimeout(timer);
  asking?.abort();
  const controller = asking = new AbortController();
  const began = performance.now();
  const wait = await ask(controller.signal);
  if (wait === null || controller.signal.aborted) return;
  timer = setTimeout(poll, Math.max(100, wait - (performance.now() - began)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return void poll();
  history.pause();
  clearTimeout(timer);
  asking?.abort();
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
