// Panels of the dashboard. Each panel renders a part of the latest state and of the history.

const PERCENTILES = [
  { name: "p50", width: 2.5, mark: "line" },
  { name: "p90", width: 1.5, mark: "line thin" },
  { name: "p99", width: 1.5, mark: "line dashed", dash: "3 3" },
];
const FEW_REQUESTS = 12;

/** Rows of a list by name, created once and updated in place so that CSS can animate the bars. */
class Rows {
  #made = new Map();

  constructor(list, build) {
    this.list = list;
    this.build = build;
  }

  get(names) {
    if (names.join("\n") !== [...this.#made.keys()].join("\n")) {
      this.#made = new Map(names.map((name) => [name, this.#made.get(name) ?? this.build(name)]));
      this.list.replaceChildren(...[...this.#made.values()].map((row) => row.item));
    }
    return this.#made;
  }
}

function showSummary(state, history, shown) {
  const samples = history.since(shown.from);
  writeMeasure(byId("running"), count(state.running));
  writeMeasure(byId("waiting"), count(state.waiting));
  const most = Math.max(1, ...samples.map((sample) => Math.max(sample.running, sample.waiting)));
  spark(byId("running-line"), samples, shown, (sample) => sample.running, most);
  spark(byId("waiting-line"), samples, shown, (sample) => sample.waiting, most);
  const [first, last] = [samples[0], history.last];
  const queried = last.queried - first.queried;
  const found = Object.entries(last.hits).reduce((sum, [name, tokens]) => sum + tokens - (first.hits[name] ?? 0), 0);
  const hits = state.hits;
  writeMeasure(byId("hit-rate"), queried ? percent(found / queried) : UNKNOWN);
  write(byId("hit-note"), hits.queried_tokens
    ? `${percent(1 - hits.missed_tokens / hits.queried_tokens)} since the start` : "no prompts yet");
  const lately = history.since(last.time - 10);
  const seconds = last.time - lately[0].time;
  writeMeasure(byId("token-rate"), seconds > 0 ? `${compact((last.queried - lately[0].queried) / seconds)} per s` : UNKNOWN);
  write(byId("token-note"), `${compact(hits.queried_tokens)} since the start`);
  const ttft = state.ttft;
  for (const { name } of PERCENTILES) writeMeasure(byId(name), duration(ttft[`${name}_seconds`]));
  write(byId("ttft-note"), ttft.count
    ? `${count(ttft.count)} ${ttft.count === 1 ? "request" : "requests"} in the last ${span(ttft.window_seconds)}`
    : `none in the last ${span(ttft.window_seconds)}`);
}

function buildTier(name) {
  const row = {
    bar: make("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${name} tier, share in use` },
      make("i"), make("i")),
    full: make("b"), blocks: make("span", { class: "soft" }), size: make("span", { class: "soft small" }),
    line: shape("svg", { class: "spark", "aria-hidden": "true" }),
  };
  row.item = make("li", { "data-tier": name }, make("span", { class: "name" }, name),
    make("span", { class: "number" }, row.blocks, " ", row.full), row.bar, row.size, row.line);
  return row;
}

const tierRows = new Rows(byId("tiers"), buildTier);

function showTiers(state, history, shown) {
  const names = state.tiers.map((tier) => tier.name);
  const rows = tierRows.get(names);
  byId("tiers-empty").hidden = names.length > 0;
  const blockBytes = state.tiers[0]?.block_bytes;
  write(byId("block-bytes"), blockBytes ? `blocks of ${bytes(blockBytes)}` : "");
  for (const tier of state.tiers) {
    const row = rows.get(tier.name);
    const fill = fillOf(tier);
    const inUse = tier.num_blocks && fill !== null ? tier.num_pinned / tier.num_blocks : 0;
    coloured(row.item, tierColour(tier.name, names));
    write(row.full, fill === null ? "" : percent(fill));
    write(row.blocks, tier.num_blocks ? `${count(tier.num_used)} of ${count(tier.num_blocks)} blocks` : `${count(tier.num_used)} blocks`);
    write(row.size, [...sizesOf(tier), ...(tier.num_pinned ? [`${count(tier.num_pinned)} blocks in use`] : [])].join(" · "));
    row.bar.firstChild.style.width = `${inUse * 100}%`;
    row.bar.lastChild.style.width = `${Math.max(0, (fill ?? 0) - inUse) * 100}%`;
    row.bar.hidden = fill === null;
    row.bar.setAttribute("aria-valuenow", Math.round((fill ?? 0) * 100));
    row.bar.setAttribute("aria-valuetext", `${row.full.textContent}, ${row.blocks.textContent}`);
    spark(row.line, history.since(shown.from), shown, (sample) => sample.fill[tier.name], 1, tierColour(tier.name, names));
  }
}

/** Return the used and total size of a tier. The files of a store may be larger than the blocks in them. */
function sizesOf(tier) {
  const inside = tier.num_used * tier.block_bytes;
  const limit = tier.bytes ? ` of ${bytes(tier.bytes)}` : "";
  if (tier.used_bytes == null || tier.used_bytes === inside) return [bytes(inside) + limit];
  return [`${bytes(inside)} in blocks`, `${bytes(tier.used_bytes)}${limit} reserved`];
}

function showHits(state, history, shown, pointer) {
  const names = Object.keys(state.hits.by_tier);
  const pieces = hitPieces(history.since(shown.from), shown.from, shown.to, shown.width);
  const total = pieces.reduce((sum, piece) => sum + piece.queried, 0);
  const plot = new Plot(byId("hits"));
  plot.rows([0, 0.25, 0.5, 0.75, 1].map((share) => [share, percent(share)]));
  plot.times(shown.from, shown.to);
  const wide = (plot.right - plot.left) / pieces.length;
  const column = (place, from, to, fill) => plot.add("rect", {
    x: plot.x(place / pieces.length) + Math.min(1, wide * 0.1), y: plot.y(to), fill,
    width: Math.max(1, wide - Math.min(2, wide * 0.2)), height: Math.max(0, plot.y(from) - plot.y(to)),
  });
  pieces.forEach((piece, place) => {
    if (!piece.queried) return;
    let from = 0;
    for (const name of names) {
      const to = from + (piece.hits[name] ?? 0) / piece.queried;
      column(place, from, to, tierColour(name, names));
      from = to;
    }
    column(place, from, 1, "var(--missed)");
  });
  const at = pointer.share === null ? null : Math.min(pieces.length - 1, Math.floor(pointer.share * pieces.length));
  if (at !== null) plot.cross((at + 0.5) / pieces.length);
  const chosen = at === null ? sumOf(pieces) : pieces[at];
  const rate = (name) => (chosen.queried ? percent((chosen.hits[name] ?? 0) / chosen.queried) : UNKNOWN);
  const missed = missedShare(chosen);
  byId("hits-legend").replaceChildren(
    ...names.map((name) => legendItem(key("", tierColour(name, names)), name, rate(name))),
    legendItem(key("", "var(--missed)"), "computed", percent(missed)),
    make("span", {}, at === null ? `of ${count(chosen.queried)} prompt tokens` : `at ${clock(chosen.from)}, of ${count(chosen.queried)}`));
  const spoken = names.map((name) => `${name} ${rate(name)}`).join(", ");
  plot.show(total ? `Share of prompt tokens found in the cache, last ${span(shown.to - shown.from)}: ${spoken}, computed ${percent(missed)}` : "No prompts yet");
  byId("hits-empty").hidden = total > 0;
  showTable("hits-table", ["Until", ...names, "computed", "prompt tokens"], () => pieces.filter((piece) => piece.queried).slice(-15).reverse()
    .map((piece) => [clock(piece.to), ...names.map((name) => percent((piece.hits[name] ?? 0) / piece.queried)),
      percent(missedShare(piece)), count(piece.queried)]));
}

function sumOf(pieces) {
  const sum = { queried: 0, hits: {} };
  for (const piece of pieces) {
    sum.queried += piece.queried;
    for (const [name, tokens] of Object.entries(piece.hits)) sum.hits[name] = (sum.hits[name] ?? 0) + tokens;
  }
  return sum;
}

function missedShare(piece) {
  if (!piece.queried) return null;
  return Math.max(0, 1 - Object.values(piece.hits).reduce((sum, tokens) => sum + tokens, 0) / piece.queried);
}

/** Fill the table below a chart if it is open. */
function showTable(id, head, rows) {
  const details = byId(id);
  if (details.open) details.querySelector(".scroll").replaceChildren(tableOf(head, rows()));
}

function buildTransfer(name) {
  const row = {
    bar: make("div", { class: "bar thin", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${name}, share of the limit` }, make("i")),
    speed: make("b"), note: make("span", { class: "soft small" }), line: shape("svg", { class: "spark", "aria-hidden": "true" }),
    label: make("span"),
  };
  row.item = make("li", { "data-way": name }, row.label, make("span", { class: "number" }, row.speed), row.bar, row.note, row.line);
  return row;
}

const transferRows = new Rows(byId("transfers"), buildTransfer);

function showTransfers(state, history, shown) {
  const names = state.tiers.map((tier) => tier.name);
  const depth = (each) => [names.indexOf(each.source) + names.indexOf(each.target), names.indexOf(each.source)];
  const ways = [...state.transfers].sort((a, b) => depth(a)[0] - depth(b)[0] || depth(a)[1] - depth(b)[1]);
  const rows = transferRows.get(ways.map(wayOf));
  byId("transfers-empty").hidden = ways.length > 0;
  const peaks = history.peaks;
  for (const each of ways) {
    const [way, limit] = [wayOf(each), each.limit_gb_per_s];
    const row = rows.get(way);
    const most = limit ?? peaks[way];
    const share = most ? Math.min(1, each.gb_per_s / most) : 0;
    if (!row.label.firstChild)
      row.label.append(key("", tierColour(each.source, names)), `${each.source} → `, key("", tierColour(each.target, names)), each.target);
    write(row.speed, speed(each.gb_per_s));
    write(row.note, `${limit == null ? `peak ${speed(peaks[way])}` : `${percent(share)} of ${speed(limit)}`} · ${bytes(each.bytes)} in total`);
    row.bar.firstChild.style.width = `${share * 100}%`;
    row.bar.setAttribute("aria-valuenow", Math.round(share * 100));
    row.bar.setAttribute("aria-valuetext", `${row.speed.textContent}, ${row.note.textContent}`);
    spark(row.line, history.since(shown.from), shown, (sample) => sample.speeds[way], most || undefined);
  }
  const isUnmeasured = ways.some((each) => each.limit_gb_per_s == null);
  const window = ways.length ? `Over the last ${span(ways[0].window_seconds)}. ` : "";
  write(byId("transfers-note"), window + (isUnmeasured
    ? "Links without a measured limit are shown relative to their peak since this page was opened." : ""));
}

function showTtft(state, history, shown, pointer) {
  const { from, to } = shown;
  const samples = history.since(from);
  const dots = state.recent.filter((each) => each.ttft_seconds > 0 && each.ended >= from && each.ended <= to);
  const values = [...samples.flatMap((sample) => sample.ttft), ...dots.map((each) => each.ttft_seconds)].filter((value) => value > 0);
  const plot = new Plot(byId("ttft"), { left: 52 });
  plot.times(from, to);
  byId("ttft-empty").hidden = values.length > 0;
  const near = pointer.share === null || !samples.length ? state.ttft : nearest(samples, from + pointer.share * (to - from));
  if (values.length) {
    const axis = logTicks(Math.min(...values), Math.max(...values));
    plot.rows(axis.ticks.map(([share, tick]) => [share, duration(tick).replace(/\.0+ /, " ")]));
    for (const each of dots)
      plot.add("circle", { cx: plot.x((each.ended - from) / (to - from)), cy: plot.y(axis.place(each.ttft_seconds)), r: 2.2, fill: "var(--soft)", "fill-opacity": 0.65 });
    PERCENTILES.forEach(({ width, dash }, place) => plot.line(
      pointsOf(samples, from, to, (sample) => sample.ttft[place] && axis.place(sample.ttft[place])),
      { "stroke-width": width, "stroke-dasharray": dash }));
    if (pointer.share !== null) plot.cross(pointer.share);
  }
  const now = PERCENTILES.map(({ name }, place) => duration(near.ttft ? near.ttft[place] : near[`${name}_seconds`]));
  byId("ttft-legend").replaceChildren(
    ...PERCENTILES.map(({ name, mark }, place) => legendItem(key(mark, "var(--ink)"), name, now[place])),
    legendItem(key("dot", "var(--soft)"), "last 100 requests"),
    ...(near.time ? [make("span", {}, `at ${clock(near.time)}`)] : []));
  plot.show(values.length ? `Time to first token: ${PERCENTILES.map(({ name }, place) => `${name} ${now[place]}`).join(", ")}` : "No requests yet");
  showTable("ttft-table", ["At", ...PERCENTILES.map(({ name }) => name)], () => {
    const step = Math.max(1, Math.floor(samples.length / 15));
    return samples.filter((sample, place) => (samples.length - 1 - place) % step === 0 && sample.ttft[0] != null).reverse()
      .map((sample) => [clock(sample.time), ...sample.ttft.map(duration)]);
  });
}

const nearest = (samples, time) => samples.reduce((best, each) => (Math.abs(each.time - time) < Math.abs(best.time - time) ? each : best));

function showGhost(state) {
  const ghost = state.ghost;
  const points = ghost?.points ?? [];
  const isKnown = points.some((point) => point.error > 0 && point.error < 1);
  byId("ghost-empty").hidden = isKnown;
  write(byId("ghost-empty"), ghost ? "No estimate yet: not enough long prompts." : "Estimates are disabled on this server.");
  const plot = new Plot(byId("ghost"), { top: 20 });
  plot.rows([0, 0.25, 0.5, 0.75, 1].map((share) => [share, percent(share)]));
  if (!isKnown) {
    byId("ghost-legend").replaceChildren();
    plot.show("No estimates yet");
    return;
  }
  const [low, high] = [Math.log(points[0].num_blocks), Math.log(points.at(-1).num_blocks)];
  const place = (point) => 0.04 + (0.92 * (Math.log(point.num_blocks) - low)) / (high - low || 1);
  const clip = (share) => Math.min(1, Math.max(0, share));
  const edge = (sign) => points.map((point) => `${plot.x(place(point)).toFixed(1)},${plot.y(clip(point.hit_rate + sign * point.error)).toFixed(1)}`);
  plot.add("polygon", { points: [...edge(1), ...edge(-1).reverse()].join(" "), fill: "var(--soft)", "fill-opacity": 0.18 });
  plot.line(points.map((point) => [place(point), point.hit_rate]), { "stroke-width": 2 });
  const blockBytes = state.tiers[0]?.block_bytes;
  plot.columns(points.map((point) => [place(point), compact(point.num_blocks)]));
  const current = points.find((point) => point.num_blocks === ghost.num_blocks);
  for (const point of points)
    plot.add("circle", { cx: plot.x(place(point)), cy: plot.y(point.hit_rate), r: point === current ? 5 : 2.5, fill: point === current ? "var(--accent)" : "var(--ink)" });
  if (current) {
    plot.cross(place(current));
    plot.add("text", { class: "strong", x: plot.x(place(current)), y: 12, "text-anchor": "middle" }, `now: ${percent(current.hit_rate)}`);
  }
  const size = (blocks) => `${count(blocks)} blocks${blockBytes ? ` (${bytes(blocks * blockBytes)})` : ""}`;
  const larger = points.find((point) => point.num_blocks >= 2 * ghost.num_blocks);
  const advice = larger ? `${compact(larger.num_blocks)} blocks: ${percent(larger.hit_rate)} ± ${Math.round(larger.error * 100)}` : "";
  const learned = ghost.learned?.find((point) => point.num_blocks === ghost.num_blocks && point.error < 1);
  const other = learned ? `--policy learned: ${percent(learned.hit_rate)} ± ${Math.round(learned.error * 100)}` : "";
  byId("ghost-legend").replaceChildren(make("span", {}, `now ${size(ghost.num_blocks)}, ${ghost.policy}`), make("span", {}, make("b", {}, advice)), make("span", {}, other));
  plot.show(`Estimated hit rate by cache size. Now ${size(ghost.num_blocks)}: ${percent(current?.hit_rate)}. ${larger ? `With ${advice}.` : ""}`);
  showTable("ghost-table", ["Blocks", "size", "hit rate", "error"], () => points.map((point) => [
    `${count(point.num_blocks)}${point === current ? " (now)" : ""}`, blockBytes ? bytes(point.num_blocks * blockBytes) : UNKNOWN,
    percent(point.hit_rate), `± ${percent(point.error)}`]));
}

/** Table of recent requests. Finished requests do not change, so each row is built once. */
class Recent {
  #rows = new Map();
  #shown = "";
  isLong = false;

  show(state) {
    const names = state.tiers.map((tier) => tier.name);
    const few = this.isLong ? state.recent : state.recent.slice(0, FEW_REQUESTS);
    const keys = few.map((each) => `${each.id} ${each.ended}`);
    if (keys.join() !== this.#shown) {
      this.#rows = new Map(few.map((each, place) => [keys[place], this.#rows.get(keys[place]) ?? requestRow(each, names)]));
      byId("recent").tBodies[0].replaceChildren(...this.#rows.values());
      this.#shown = keys.join();
    }
    byId("recent").hidden = !few.length;
    byId("recent-empty").hidden = few.length > 0;
    const more = byId("more");
    more.hidden = state.recent.length <= FEW_REQUESTS;
    write(more, this.isLong ? `Show the last ${FEW_REQUESTS}` : `Show all ${state.recent.length}`);
  }
}

function requestRow(each, names) {
  const cell = (kind, name, ...children) => make("td", { role: "cell", class: kind, "data-name": name }, ...children);
  const parts = Object.entries(each.tokens_from ?? {}).filter(([, tokens]) => tokens > 0)
    .sort(([one], [other]) => names.indexOf(one) - names.indexOf(other));
  const computed = Math.max(0, each.prompt_tokens - each.cached_tokens);
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const labels = [];
  for (const [name, tokens, colour] of [...parts.map(([name, tokens]) => [name, tokens, tierColour(name, names)]), ["computed", computed, "var(--missed)"]]) {
    if (!tokens) continue;
    const piece = coloured(make("i"), colour);
    piece.style.width = `${(tokens / Math.max(1, each.prompt_tokens)) * 100}%`;
    bar.append(piece);
    labels.push(make("span", {}, key("", colour), `${name} ${count(tokens)}`), " ");
  }
  const isGood = each.finish === "stop" || each.finish === "length";
  return make("tr", { role: "row" },
    cell("ended", undefined, clock(each.ended)),
    cell("request", undefined, make("span", isGood ? {} : { class: "finish-bad" }, each.finish),
      ` · ${each.endpoint}${each.tenant ? ` · ${each.tenant}` : ""}`, make("code", { class: "id", title: each.id }, each.id)),
    cell("number", "prompt", count(each.prompt_tokens)),
    cell("found", undefined, ...(labels.length ? [bar, ...labels] : [UNKNOWN])),
    cell("number", "new", count(each.new_tokens)),
    cell("number", "ttft", duration(each.ttft_seconds)),
    cell("number", "total", duration(each.seconds)),
    cell("why", undefined, each.explanation || UNKNOWN));
}
