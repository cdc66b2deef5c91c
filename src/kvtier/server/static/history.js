// History since the page was opened: one small sample per response, kept for an hour.

const KEPT_SECONDS = 3600;

class History {
  #samples = [];
  #started = null;
  #isBroken = false;

  /** Break the lines before the next sample, because polling has stopped. */
  pause() {
    this.#isBroken = true;
  }

  add(state) {
    if (state.started !== this.#started) this.#samples = []; // a new server process counts from zero
    this.#started = state.started;
    this.#samples.push({
      time: state.time,
      isBroken: this.#isBroken,
      queried: state.hits.queried_tokens,
      hits: state.hits.by_tier,
      fill: Object.fromEntries(state.tiers.map((tier) => [tier.name, fillOf(tier)])),
      speeds: Object.fromEntries(state.transfers.map((each) => [wayOf(each), each.gb_per_s])),
      ttft: [state.ttft.p50_seconds, state.ttft.p90_seconds, state.ttft.p99_seconds],
      running: state.running,
      waiting: state.waiting,
    });
    this.#isBroken = false;
    const oldest = state.time - KEPT_SECONDS;
    const kept = this.#samples.findIndex((sample) => sample.time >= oldest);
    if (kept > 60) this.#samples.splice(0, kept); // in batches, not on every sample
  }

  /** Return the samples since `time`, and the sample before them, which differences need. */
  since(time) {
    const first = this.#samples.findIndex((sample) => sample.time >= time);
    return first < 0 ? [] : this.#samples.slice(Math.max(0, first - 1));
  }

  get last() {
    return this.#samples.at(-1);
  }

  get first() {
    return this.#samples[0];
  }

  get peaks() {
    const found = {};
    for (const { speeds } of this.#samples)
      for (const [way, value] of Object.entries(speeds)) found[way] = Math.max(found[way] ?? 0, value);
    return found;
  }
}

const wayOf = (transfer) => `${transfer.source} → ${transfer.target}`;

/** Return the share of a tier's blocks in use, or null without a limit. Blocks are counted, because used bytes may
    include space that a store has reserved. */
function fillOf(tier) {
  return tier.num_blocks ? Math.min(1, tier.num_used / tier.num_blocks) : null;
}

/** Sum up queried and hit tokens in intervals of `width` seconds. The last interval ends at `to`. */
function hitPieces(samples, from, to, width) {
  const pieces = Array.from({ length: Math.round((to - from) / width) }, (_, place) => (
    { from: from + place * width, to: from + (place + 1) * width, queried: 0, hits: {} }));
  for (let place = 1; place < samples.length; place++) {
    const [before, after] = [samples[place - 1], samples[place]];
    const piece = pieces[Math.min(pieces.length - 1, Math.floor((after.time - from) / width))];
    if (piece === undefined || after.time < from) continue;
    piece.queried += after.queried - before.queried;
    for (const [name, tokens] of Object.entries(after.hits))
      piece.hits[name] = (piece.hits[name] ?? 0) + tokens - (before.hits[name] ?? 0);
  }
  return pieces;
}

/** Return the time range of the charts: the chosen span, or the history if shorter, in intervals of a round width. */
function timeShown(history, chosen) {
  const to = history.last.time;
  const seen = Math.min(chosen, Math.max(30, to - history.first.time));
  const width = [1, 2, 5, 10, 20, 60].find((each) => seen / each <= 60);
  const end = Math.ceil(to / width) * width; // aligned, so that intervals do not move with each sample
  return { from: end - Math.ceil(seen / width) * width, to: end, width };
}
