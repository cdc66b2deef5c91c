// Number formats and DOM helpers. Text is inserted as text nodes only, never parsed as HTML.

const UNKNOWN = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];

const count = (value) => (value == null ? UNKNOWN : WHOLE.format(value));
const compact = (value) => (value < 10_000 ? count(value) : `${three(value / (value < 1e6 ? 1e3 : 1e6))}${value < 1e6 ? "k" : "M"}`);
const clock = (time) => CLOCK.format(new Date(time * 1000));
const bytes = (value) => scaled(value, BINARY, 1024);
const speed = (gigabytes) => scaled(gigabytes * 1e9, DECIMAL, 1000);

/** Format a number with three significant digits. */
function three(value) {
  return value.toFixed(value === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
}

function scaled(value, units, base) {
  let place = 0;
  for (; value >= base * 0.9995 && place < units.length - 1; place++) value /= base;
  return `${place ? three(value) : count(value)} ${units[place]}`;
}

function percent(share) {
  if (share == null) return UNKNOWN;
  return `${(share * 100).toFixed(share > 0 && share < 0.00995 ? 1 : 0)} %`;
}

function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  if (seconds < 0.9995) return `${three(seconds * 1e3)} ms`;
  return seconds < 99.95 ? `${three(seconds)} s` : span(seconds);
}

/** Format a time span in its two largest units, for example "3 h 5 min". */
function span(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([size, unit], place) => {
    const whole = Math.floor((place ? seconds % parts[first][0] : seconds) / size);
    return place && !whole ? "" : `${whole} ${unit}`;
  }).join(" ").trim();
}

const byId = (id) => document.getElementById(id);

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const make = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

/** Set the text only if it changed, because an update every second would disturb screen readers and selections. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show a measure such as "12.3 ms", with the unit in small type. */
function writeMeasure(node, text) {
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  const [value, ...unit] = text.split(" ");
  node.replaceChildren(value, ...(unit.length ? [make("span", { class: "unit" }, ` ${unit.join(" ")}`)] : []));
}

/** Tiers with their own colour. All other tiers share two further colours. */
const TIER_COLOURS = ["device", "host", "disk", "shared"];
function tierColour(name, names) {
  return TIER_COLOURS.includes(name) ? `var(--${name})` : `var(--tier-${4 + (Math.max(0, names.indexOf(name)) % 2)})`;
}

function coloured(node, colour) {
  node.style.setProperty("--tier", colour);
  return node;
}

const key = (kind, colour) => coloured(make("span", { class: `key ${kind}`, "aria-hidden": "true" }), colour);
const legendItem = (mark, name, value) => make("span", {}, mark, `${name} `, make("b", {}, value ?? ""));

function tableOf(head, rows) {
  const cells = (kind, row) => row.map((text, place) => make(kind, {
    ...(kind === "th" ? { scope: "col" } : {}), ...(place ? { class: "number" } : {}),
  }, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))));
}
