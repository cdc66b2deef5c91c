// Asking the server, and saying how it is.

const POLL_MS = 1000;
const AWAY_MS = 3000; // while it does not answer
const ANSWER_MS = 10_000;
const KEY = "kvtier admin key";
const WORDS = {
  connecting: "Connecting", ok: "Serving", sleeping: "Asleep", draining: "Going down", away: "No answer", failed: "Failing",
  key: "Key needed",
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
  history.add(state);
  const notices = {
    sleeping: "The server is asleep: its device memory is free and requests get 503 until POST /control/wake.",
    draining: `The server is going down: it takes no new requests and finishes those it has.`,
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
  say("key", hadKey ? `${wrong} The dashboard needs an admin key.` : `The dashboard needs an admin key: ${message}`);
  return null; // until there is a key, the answer stays the same
}

/** One question. Returns after how long to ask again; null for not at all. */
async function ask() {
  asking = new AbortController();
  const held = sessionStorage.getItem(KEY);
  try {
    const answer = await fetch("state", {
      cache: "no-store", credentials: "omit", headers: held ? { Authorization: `Bearer ${held}` } : {},
      signal: AbortSignal.any([asking.signal, AbortSignal.timeout(ANSWER_MS)]),
    });
    const told = await answer.json().catch(() => null);
    if (!answer.ok || told === null) return refused(answer.status, told?.error?.message);
    took(told);
    return POLL_MS;
  } catch (error) {
    if (asking.signal.aborted) return null; // by us: the page is hidden, or there is another key
    if (error.name !== "TypeError" && error.name !== "TimeoutError" && error.name !== "AbortError") throw error;
    say("away", state === null ? "The server does not answer. Trying again."
      : `The server does not answer; what is shown is of ${clock(state.time)}. Trying again.`);
    return AWAY_MS;
  }
}

async function poll() {
  clearTimeout(timer);
  asking?.abort();
  const began = performance.now();
  const mine = ask();
  const controller = asking;
  const wait = await mine;
  if (wait === null || controller !== asking || document.hidden) return;
  timer = setTimeout(poll, Math.max(100, wait - (performance.now() - began)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return void poll();
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
