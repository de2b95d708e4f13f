// @ts-check
"use strict";
// The token viewer: the groups of a step, with each completion as a strip of coloured tokens.

/**
 * @typedef {{own: boolean, by: string, text: string, characters: number, calls: {text: string, failed: boolean}[], failed: boolean}} Message
 * @typedef {{sample: number, text: string, characters: number, messages: Message[]|null, stop: string, versions: number[], reward: number|null,
 *   correct: boolean|null, prompt: string|null, shaped: number|null, advantage: number|null, advantages: (number|null)[]|null,
 *   parts: Record<string, number|null>, extras: Record<string, any>, errors: Record<string, string>, length: number,
 *   ids: number[], sampled: boolean[]|null, why: number[]|null, clipped: (number|null)[]|null,
 *   sampler: (number|null)[]|null, old: (number|null)[]|null, new: (number|null)[]|null, ref: (number|null)[]|null,
 *   entropy: (number|null)[]|null, credit?: (number|null)[][], given?: (number|string|null)[]}} Rollout
 * @typedef {{index: number, status: string, prompt: string, columns: string, rollouts: Rollout[]}} Group
 * @typedef {{step: number, left_out: number, groups: Group[], texts: Record<string, string>, reasons: string[]}} Step
 * @typedef {{name: string, title: string, kind: "signed"|"amount"|"class", unit?: string, of: (r: Rollout, i: number, v: number) => number|null}} Quantity
 */

/** @param {(number|null)[]|null} values @param {number} i @returns {number|null} */
const pick = (values, i) => (values === null || values[i] === undefined ? null : values[i]);
/** @param {Rollout} r @param {number} i @returns {number|null} */
const advantageOf = (r, i) => (r.sampled && !r.sampled[i] ? null : r.advantages ? pick(r.advantages, i) : r.advantage);
/** @param {number|null} a @param {number|null} b @returns {number|null} */
const minus = (a, b) => (a === null || b === null ? null : a - b);
/** k3 of the KL from b to a: r - 1 - log r, r = e^(a - b). @param {number|null} d */
const k3 = (d) => (d === null ? null : Math.max(Math.expm1(d) - d, 0));
/** @param {Rollout} r @param {number} i */
const logRatio = (r, i) => minus(pick(r.new, i), pick(r.old, i));

/** Names of the variants of a replay, with a strip each; otherwise there is one without a name.
 * @type {string[]} */
const VARIANTS = DATA.replay ? DATA.replay.variants.map((/** @type {any} */ v) => visible(v.name)) : [""];
/** @param {Rollout} r @param {number} i @param {number} v */
const lossCredit = (r, i, v) => pick(r.credit?.[v] ?? null, i);
/** @type {Quantity} */
const LOSS_CREDIT = { name: "loss_credit", title: "credit, d loss / d log p", kind: "signed", of: lossCredit };
/** @type {Quantity} */
const DIFFERENCE = { name: "difference", title: "difference in credit from " + VARIANTS[0], kind: "signed", of: (r, i, v) => minus(lossCredit(r, i, v), lossCredit(r, i, 0)) };

/** @type {Quantity[]} */
const QUANTITIES = [
  ...(DATA.replay ? [LOSS_CREDIT, DIFFERENCE] : []),
  { name: "credit", title: "advantage × log-ratio", kind: "signed", of: (r, i) => { const a = advantageOf(r, i), d = logRatio(r, i); return a === null || d === null ? null : a * d; } },
  { name: "advantage", title: "advantage", kind: "signed", of: advantageOf },
  { name: "kl", title: "KL to the policy that sampled", kind: "amount", of: (r, i) => k3(logRatio(r, i)) },
  { name: "ref_kl", title: "KL to the reference", kind: "amount", of: (r, i) => k3(minus(pick(r.ref, i), pick(r.new, i) ?? pick(r.old, i))) },
  { name: "entropy", title: "entropy", kind: "amount", of: (r, i) => pick(r.entropy, i) },
  { name: "surprise", title: "surprise, −log p of the sampler", kind: "amount", of: (r, i) => { const x = pick(r.sampler, i); return x === null ? null : -x; } },
  { name: "gap", title: "sampler gap, trainer − sampler", kind: "signed", of: (r, i) => minus(pick(r.old, i), pick(r.sampler, i)) },
  { name: "clip", title: "clipped by the loss", kind: "class", of: (r, i) => pick(r.clipped, i) },
  { name: "why", title: "trained on, or why not", kind: "class", of: (r, i) => pick(r.why, i) },
];

/** @param {string} name @returns {Quantity} */
const byName = (name) => QUANTITIES.find((q) => q.name === name) ?? QUANTITIES[0];

/** Reasons in `untrained` by code: their words, and a colour of the palette. */
const REASONS = [["trained on", 1], ["written by a tool or a user", 6], ["group left out", 4], ["completion masked", 2], ["no advantage", 0], ["rejected by the loss", 3]];
const CLIPS = [["not clipped", 0], ["clipped high", 2], ["clipped low", 1]];

/** Characters of a call or an answer above the tokens of its turn. */
const BRIEF = 240;
/** Characters of a message in full, and those that a search looks through. */
const WHOLE = 200000, SEARCHED = 20000;
/** @param {string} stop */
const ending = (stop) => /** @type {Record<string, string>} */ (DATA.stops)[stop] ?? visible(stop);
/** @param {Message} m */
const wordsOf = (m) => [m.text.slice(0, SEARCHED), ...m.calls.map((call) => call.text)].filter(Boolean).join("\n");
/** All that was said after the prompt. @param {Rollout} r */
const said = (r) => (r.messages === null ? r.text : r.messages.map(wordsOf).join("\n"));
/** @param {Rollout} r */
const turnsOf = (r) => r.messages?.filter((m) => m.own).length ?? null;
/** @param {number} n @param {string} word */
const counted = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
/** The beginning of a text on one line. @param {string} text @param {number} most */
const brief = (text, most) => visible(text.slice(0, most).trim().replace(/\n/g, "↵")) + (text.length > most ? " …" : "");

/** The messages of each turn: the policy's, and what follows it.
 * @param {Rollout} r @returns {{own: Message, given: Message[]}[]} */
function conversation(r) {
  /** @type {{own: Message, given: Message[]}[]} */
  const turns = [];
  for (const m of r.messages ?? []) {
    if (m.own) turns.push({ own: m, given: [] });
    else turns.at(-1)?.given.push(m);
  }
  return turns;
}

/** Lines above the tokens of a turn: its calls, or who answers what.
 * @param {Message} m */
const linesOf = (m) => (m.own
  ? m.calls.map((call) => el("span", { class: "said" + (call.failed ? " failed" : ""), text: brief(call.text, BRIEF) }))
  : [el("span", { class: "said" + (m.failed ? " failed" : "") }, el("b", { text: brief(m.by, 40) + (m.failed ? " failed" : "") }), " ", brief(m.text, BRIEF))]);

/** Tokens of a completion shown at a time. */
const PAGE = 1500;
/** Characters of a prompt on its group's card. */
const CARD = 60;

/** How many characters at their ends all these prompts share: the lines of a system prompt, the marks of a chat.
 * @param {string[]} prompts @returns {[number, number]} */
function sharedEnds(prompts) {
  const [first, ...others] = new Set(prompts);
  /** @param {(text: string, i: number) => string} at_ */
  const same = (at_) => {
    let i = 0;
    while (i < first.length && others.every((text) => at_(text, i) === at_(first, i))) i++;
    return i;
  };
  if (!others.length) return [0, 0];
  const start = first.slice(0, same((text, i) => text[i])), end = first.slice(first.length - same((text, i) => text[text.length - 1 - i]));
  const mark = end.search(/[\s<[]/); // not within a word
  return [start.lastIndexOf("\n") + 1, mark < 0 ? 0 : end.length - mark];
}

/** A prompt on a card. Of a long one the end, which is where prompts differ, without what it shares with the others.
 * @param {string} prompt @param {[number, number]} shared */
function promptLine(prompt, [start, end]) {
  if (prompt.length <= CARD) return visible(prompt.replace(/\s+/g, " "));
  const own = [...visible(prompt.slice(start, prompt.length - end).replace(/\s+/g, " ").trim())];
  if (!own.length) return promptLine(prompt, [0, 0]); // it is the end of another
  return (start || own.length > CARD ? "…" : "") + own.slice(-CARD).join("") + (end ? "…" : "");
}

class Source {
  constructor() {
    /** @type {Map<string, Promise<Step>>} */
    this.cache = new Map();
  }

  /** @param {number} run @param {number} step @returns {Promise<Step>} */
  step(run, step) {
    const name = `${run}-${step}`;
    let found = this.cache.get(name);
    if (!found) {
      found = DATA.live ? this.fetched(`step/${run}/${step}.json`) : this.embedded("step-" + name);
      this.cache.set(name, found);
      found.catch(() => this.cache.delete(name));
      if (this.cache.size > 12) this.cache.delete(/** @type {string} */ (this.cache.keys().next().value));
    }
    return found;
  }

  /** The rollouts of a step for a search: group, sample, prompt's number, prompt, text, stop reason, reward, right, turns.
   * @param {number} run @param {number} step @returns {Promise<any[][]>} */
  async rows(run, step) {
    if (DATA.live) return this.fetched(`rows/${run}/${step}.json`);
    const data = await this.step(run, step);
    return data.groups.flatMap((g, i) => g.rollouts.map((r) => [i, r.sample, g.index, r.prompt ?? g.prompt, said(r), r.stop, r.reward, r.correct, turnsOf(r)]));
  }

  /** @param {string} path */
  async fetched(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  /** @param {string} id */
  async embedded(id) {
    const bytes = Uint8Array.from(atob(at(id).textContent || ""), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
}

class Viewer {
  constructor() {
    this.source = new Source();
    this.run = 0;
    this.number = 0;
    /** @type {Step|null} */
    this.data = null;
    this.group = -1;
    this.quantity = QUANTITIES[0];
    this.hasChosen = false;
    this.limit = 1;
    this.search = 0;
    /** @type {HTMLElement|null} */
    this.marked = null;
  }

  get steps() { return /** @type {number[]} */ (DATA.runs[this.run].steps_here); }

  // --- frame --------------------------------------------------------------------------------------------------------

  build() {
    if (!DATA.runs.some((/** @type {any} */ r) => r.steps_here.length)) {
      at("completions").replaceChildren(el("h2", { text: "Completions" }), el("p", { class: "note", text: "No completions recorded yet; completions_every sets how often they are." }));
      return false;
    }
    const change = () => this.showGroups();
    /** @param {string} id @param {[string, string][]} options @param {() => void} on */
    const select = (id, options, on) => el("select", { id, change: on }, ...options.map(([value, text]) => el("option", { value, text })));
    /** @param {string} text @param {Node} input */
    const label = (text, input) => el("label", {}, text, input);
    const runs = DATA.runs.map((/** @type {any} */ r, /** @type {number} */ i) => [String(i), r.name]);
    const tools = el("div", { class: "card tools" },
      DATA.runs.length > 1 ? label("run", select("v-run", runs, () => { this.run = Number(input("v-run").value); this.number = 0; this.update(); })) : null,
      el("label", { hidden: Boolean(DATA.replay) }, "step", el("span", { class: "steps" },
        el("button", { id: "v-back", type: "button", "aria-label": "Earlier step", text: "‹", click: () => this.move(-1) }),
        el("input", { id: "v-slider", type: "range", min: 0, "aria-label": "Step", input: () => this.go(this.steps[Number(input("v-slider").value)]) }),
        el("button", { id: "v-next", type: "button", "aria-label": "Later step", text: "›", click: () => this.move(1) }),
        el("b", { id: "v-step" }))),
      label("colour", select("v-color", QUANTITIES.map((q) => [q.name, q.title]), () => this.recolour(input("v-color").value))),
      label("sort groups by", select("v-sort", [["reward", "reward"], ["spread", "spread of reward"], ["moved", DATA.replay ? "difference in credit" : "largest KL"], ["drawn", "order drawn"]], change)),
      el("details", { class: "filters", open: innerWidth > 760 && !DATA.replay }, el("summary", { text: "filter and search" }), el("div", { class: "row" },
      label("text", el("input", { id: "v-text", type: "search", placeholder: "in all that was said", input: change })),
      label("reward from", el("input", { id: "v-low", type: "number", step: "any", input: change })),
      label("to", el("input", { id: "v-high", type: "number", step: "any", input: change })),
      label("answer", select("v-correct", [["", "any"], ["true", "right"], ["false", "wrong"]], change)),
      label("end", select("v-stop", [["", "any"], .../** @type {[string, string][]} */ (Object.entries(DATA.stops))], change)),
      DATA.replay ? null : el("button", { id: "v-all", type: "button", text: "Search all steps", click: () => this.searchAll() }))));
    at("completions").replaceChildren(
      el("h2", { text: "Completions, token by token" }),
      el("p", { class: "lede" }, `Choose a group to see ${DATA.replay ? "the credit that each loss gives" : "its completions"} side by side. Keys: `, el("kbd", { text: "←" }), " ", el("kbd", { text: "→" }), " token, ",
        el("kbd", { text: "↑" }), " ", el("kbd", { text: "↓" }), ...(DATA.replay ? [" loss and completion, "] : [" completion, ", el("kbd", { text: "[" }), " ", el("kbd", { text: "]" }), " step, "]), el("kbd", { text: "Esc" }), " back to the groups."),
      tools, el("p", { class: "legend", id: "v-legend" }), el("p", { class: "note", id: "v-note", role: "status" }),
      el("div", { class: "stage" },
        el("div", { class: "groups", id: "v-groups", role: "group", "aria-label": "Groups of this step", keydown: (/** @type {KeyboardEvent} */ e) => this.groupKey(e) }),
        el("div", { id: "v-panel" })),
      el("aside", { id: "token", hidden: true, "aria-live": "polite" }), el("div", { id: "v-results" }));
    if (DATA.replay) input("v-sort").value = "moved";
    const panel = at("v-panel");
    // Not pointerover, which also fires when scrolling moves a token under a resting pointer.
    panel.addEventListener("pointermove", (e) => { if (e.pointerType !== "touch") this.hover(e.target); });
    panel.addEventListener("focusin", (e) => this.focused(/** @type {HTMLElement} */ (e.target)));
    panel.addEventListener("keydown", (e) => this.tokenKey(e));
    at("completions").addEventListener("keydown", (e) => {
      const target = /** @type {HTMLElement} */ (e.target);
      if (["INPUT", "SELECT"].includes(target.tagName)) return;
      if (e.key === "[") this.move(-1);
      if (e.key === "]") this.move(1);
    });
    at("completions").addEventListener("click", (e) => {
      const link = e.target instanceof Element ? e.target.closest("a") : null;
      if (link?.hash && link.hash === location.hash) this.followLink(); // no hashchange comes
    });
    return true;
  }

  /** Called at the start, and when a running run has new steps. */
  async update() {
    if (!document.getElementById("v-groups") && !this.build()) return;
    const steps = this.steps;
    input("v-slider").max = String(Math.max(steps.length - 1, 0));
    if (!steps.includes(this.number)) await this.go(steps[steps.length - 1]);
    else this.showStep();
  }

  /** @param {number} by */
  move(by) {
    const next = this.steps.indexOf(this.number) + by;
    if (next >= 0 && next < this.steps.length) this.go(this.steps[next]);
  }

  /** Show a step, and a group and token in it if given.
   * @param {number|undefined} step @param {number} [group] @param {number} [sample] @param {number} [token] */
  async go(step, group, sample, token) {
    if (step === undefined) return;
    this.number = step;
    this.showStep();
    let data;
    try {
      data = await this.source.step(this.run, step);
    } catch (error) {
      at("v-note").textContent = "This step cannot be read: " + visible(String(error));
      return;
    }
    if (this.number !== step) return; // another step was chosen meanwhile
    this.data = data;
    if (!this.hasChosen) this.quantity = this.firstWithValues();
    input("v-color").value = this.quantity.name;
    this.group = group ?? this.liveliest();
    this.showGroups();
    if (sample !== undefined) this.focusToken(sample, token ?? 0);
  }

  showStep() {
    const i = this.steps.indexOf(this.number);
    at("v-step").textContent = String(this.number);
    input("v-slider").value = String(i);
    input("v-slider").setAttribute("aria-valuetext", "step " + this.number);
    const back = button("v-back"), next = button("v-next"), focused = document.activeElement;
    back.disabled = i <= 0;
    next.disabled = i >= this.steps.length - 1;
    // A disabled button loses the focus to the page.
    if (focused === back && back.disabled) next.focus();
    if (focused === next && next.disabled) back.focus();
  }

  firstWithValues() {
    for (const q of [QUANTITIES[0], ...["credit", "advantage", "entropy"].map(byName)]) if (this.largest(q) > 1e-9) return q;
    return QUANTITIES[QUANTITIES.length - 1];
  }

  // --- groups -------------------------------------------------------------------------------------------------------

  /** @param {any[]} row prompt, text, stop reason, reward, right */
  matches([prompt, text, stop, reward, correct]) {
    const words = input("v-text").value.toLowerCase(), low = input("v-low").value, high = input("v-high").value;
    const right = input("v-correct").value, ended = input("v-stop").value;
    return (!words || text.toLowerCase().includes(words) || prompt.toLowerCase().includes(words))
      && (low === "" || (reward !== null && reward >= Number(low))) && (high === "" || (reward !== null && reward <= Number(high)))
      && (!right || String(correct) === right) && (!ended || stop === ended);
  }

  /** @param {Group} g @param {Rollout} r */
  fits(g, r) { return this.matches([r.prompt ?? g.prompt, said(r), r.stop, r.reward, r.correct]); }

  /** Numbers of the groups that match the filters, in the chosen order. */
  order() {
    const groups = this.data?.groups ?? [];
    /** @param {Group} g */
    const rewards = (g) => g.rollouts.map((r) => r.reward ?? 0);
    /** @param {number[]} v */
    const mean = (v) => v.reduce((a, b) => a + b, 0) / (v.length || 1);
    const by = input("v-sort").value;
    /** @type {(g: Group) => number} */
    const key = by === "reward" ? (g) => -mean(rewards(g))
      : by === "spread" ? (g) => -(Math.max(...rewards(g)) - Math.min(...rewards(g)))
      : by === "moved" ? (g) => -this.topTokens([g], 1)[0]?.value || 0 : () => 0;
    const fitting = groups.map((g, i) => ({ i, k: key(g), ok: g.rollouts.some((r) => this.fits(g, r)) })).filter((x) => x.ok);
    return fitting.sort((a, b) => a.k - b.k || a.i - b.i).map((x) => x.i);
  }

  /** Draw the groups and the panel. If one of their elements had the focus, its replacement gets it. */
  showGroups() {
    if (!this.data) return;
    const had = /** @type {HTMLElement} */ (document.activeElement), panel = at("v-panel");
    const strips = () => [...panel.querySelectorAll(".strip")], alike = () => /** @type {HTMLElement[]} */ ([...panel.querySelectorAll(had.localName)]);
    const strip = had.dataset.i === undefined ? -1 : strips().findIndex((each) => each.contains(had)), place = alike().indexOf(had);
    this.drawGroups(this.data);
    if (had.isConnected) return;
    const inStrip = strip < 0 ? null : this.tokenAt(strips()[Math.min(strip, strips().length - 1)], Number(had.dataset.i));
    (inStrip ?? (strip < 0 ? alike()[place] : null) ?? this.chosenCard() ?? at("completions")).focus({ preventScroll: true });
  }

  /** @returns {HTMLElement|null} */
  chosenCard() { return at("v-groups").querySelector('[aria-pressed="true"]'); }

  /** @param {Step} data */
  drawGroups(data) {
    const order = this.order();
    if (!order.includes(this.group)) this.group = order[0] ?? -1;
    const total = data.groups.length, left = data.left_out;
    at("v-note").textContent = `${order.length} of ${total} groups` + (left ? ` · ${number(left)} rollouts of this step are not in this ${DATA.live ? "record" : "file"}` : "");
    const shared = sharedEnds(data.groups.map((g) => g.prompt));
    at("v-groups").replaceChildren(...order.map((i, place) => this.card(i, place === 0, shared)));
    const chosen = this.chosenCard();
    if (chosen) at("v-groups").scrollTop = chosen.offsetTop - 8;
    this.limit = this.scaleLimit();
    this.legend();
    this.showPanel();
  }

  /** Group whose policy moved most, else the one whose rewards differ most. */
  liveliest() {
    const order = this.order(), groups = this.data?.groups ?? [];
    /** @param {number} i */
    const life = (i) => {
      const rewards = groups[i].rollouts.map((r) => r.reward ?? 0);
      return (this.topTokens([groups[i]], 1)[0]?.value ?? 0) + 1e-9 * (Math.max(...rewards) - Math.min(...rewards));
    };
    return order.reduce((best, i) => (best < 0 || life(i) > life(best) ? i : best), -1);
  }

  /** @param {number} i @param {boolean} isFirst @param {[number, number]} shared */
  card(i, isFirst, shared) {
    const g = /** @type {Step} */ (this.data).groups[i];
    const known = g.rollouts.filter((r) => r.reward !== null);
    const mean = known.length ? known.reduce((a, r) => a + (r.reward ?? 0), 0) / known.length : null;
    const right = g.rollouts.filter((r) => r.correct).length;
    const sorted = [...g.rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    return el("button", { class: "group", type: "button", "data-group": i, tabindex: this.group === i || (this.group < 0 && isFirst) ? 0 : -1, "aria-pressed": this.group === i ? "true" : "false",
      click: (/** @type {MouseEvent} */ e) => this.choose(i, e.detail === 0) },
      el("span", { class: "prompt", text: promptLine(g.prompt, shared) }),
      el("span", { class: "dots", "aria-hidden": "true" }, ...sorted.slice(0, 64).map((r) => el("i", { class: r.correct ? "right" : r.correct === null ? "unjudged" : "" }))),
      el("span", { class: "line" }, el("span", { text: `reward ${number(mean, 3)}` }), el("span", { text: g.status === "kept" ? `${right}/${g.rollouts.length} right` : g.status.replace("_", " ") })));
  }

  /** @param {number} i @param {boolean} byKey */
  choose(i, byKey) {
    this.group = i;
    for (const card of at("v-groups").children) {
      const on = Number(card.getAttribute("data-group")) === i;
      card.setAttribute("aria-pressed", String(on));
      card.setAttribute("tabindex", on ? "0" : "-1");
    }
    this.showPanel();
    if (byKey) /** @type {HTMLElement|null} */ (at("v-panel").querySelector(".tok"))?.focus();
    else at("v-panel").scrollIntoView({ block: "nearest" });
  }

  /** @param {KeyboardEvent} e */
  groupKey(e) {
    const cards = /** @type {HTMLElement[]} */ ([...at("v-groups").children]);
    const here = cards.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const wide = cards.filter((c) => c.offsetTop === cards[0]?.offsetTop).length || 1;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide }[e.key];
    if (here < 0 || by === undefined) return;
    e.preventDefault();
    cards[Math.max(0, Math.min(cards.length - 1, here + by))].focus();
  }

  // --- one group ----------------------------------------------------------------------------------------------------

  showPanel() {
    at("token").hidden = true;
    document.documentElement.style.scrollPaddingBottom = "";
    this.marked = null;
    const g = this.data?.groups[this.group];
    if (!g) { at("v-panel").replaceChildren(el("p", { class: "note", text: "No group matches." })); return; }
    /** @type {Record<string, any>} */
    let columns = {};
    try { columns = JSON.parse(g.columns || "{}"); } catch { columns = { columns: g.columns }; }
    const top = this.topTokens([g], 8);
    const rollouts = g.rollouts.map((r, i) => ({ r, i })).sort((a, b) => (b.r.reward ?? -Infinity) - (a.r.reward ?? -Infinity) || a.i - b.i);
    const isLong = VARIANTS.length > 1 || rollouts.some(({ r }) => r.ids.length > 160 || (turnsOf(r) ?? 0) > 1);
    at("v-panel").replaceChildren(el("div", { class: "card panel" },
      el("h3", {}, `Prompt ${g.index}`, el("span", { class: "muted small", text: `  ·  ${g.status.replace("_", " ")}, ${g.rollouts.length} completions, best reward first ` }),
        DATA.replay ? null : el("button", { type: "button", id: "v-history", text: "This prompt over the run", click: () => this.history(g.index) })),
      el("div", { class: "prompt-text", text: visible(g.prompt) }),
      el("div", { class: "columns" }, ...Object.entries(columns).map(([name, value]) => el("span", {}, visible(name) + " ", el("b", { text: visible(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 2000) })))),
      top.length ? el("div", { class: "top-tokens" }, el("span", { class: "muted", text: DATA.replay ? "differ most:" : "moved most:" }), ...top.map((t) => this.topLink(t))) : null,
      el("div", { class: "rollouts" + (isLong ? " long" : "") }, ...rollouts.map(({ r }) => this.rolloutCard(g, r)))));
  }

  /** Tokens that moved most by KL; in a replay, those whose credit differs most.
   * @param {Group[]} groups @param {number} most */
  topTokens(groups, most) {
    const quantity = DATA.replay ? DIFFERENCE : byName("kl");
    const found = [];
    for (const g of groups) for (const r of g.rollouts) for (let i = 0; i < r.ids.length; i++) {
      const value = Math.max(...VARIANTS.map((_, v) => Math.abs(quantity.of(r, i, v) ?? 0)));
      if (value > 1e-9) found.push({ r, i, value });
    }
    return found.sort((a, b) => b.value - a.value).slice(0, most);
  }

  /** @param {{r: Rollout, i: number, value: number}} t */
  topLink(t) {
    const link = el("a", { href: `#t/${this.run}/${this.number}/${this.group}/${t.r.sample}/${t.i}` }, el("code", { text: this.piece(t.r.ids[t.i]) }));
    return el("span", {}, link, el("span", { class: "muted", text: ` #${t.r.sample}, ${DATA.replay ? "by" : "KL"} ${number(t.value, 3)}` }));
  }

  /** @param {number} id */
  piece(id) {
    const text = this.data?.texts[id];
    return text === undefined || text === "" ? `⟨${id}⟩` : visible(text);
  }

  /** @param {Group} g @param {Rollout} r */
  rolloutCard(g, r) {
    const mark = r.correct === null ? null : r.correct ? el("span", { class: "right-mark", text: "✓ right" }) : el("span", { class: "wrong-mark", text: "✗ wrong" });
    const facts = DATA.replay ? [] : [["advantage", r.advantages ? "per token" : number(r.advantage, 4)]];
    const parts = Object.entries(r.parts);
    if (parts.length > 1) facts.push(...parts.map(([name, value]) => [name, number(value, 4)]));
    if (r.shaped !== null && r.shaped !== r.reward) facts.push(["shaped", number(r.shaped, 4)]);
    const turns = turnsOf(r), calls = (r.messages ?? []).flatMap((m) => m.calls).length;
    if (turns !== null) facts.push([counted(turns, "turn") + (calls ? ", " + counted(calls, "call") : ""), ""]);
    else if (r.stop !== "stop") facts.push([ending(r.stop), ""]);
    facts.push(...Object.entries(r.extras).filter(([, v]) => v !== null).map(([name, value]) => [name, (typeof value === "string" ? value : JSON.stringify(value)).slice(0, 200)]));
    const head = el("div", { class: "head" }, el("span", { text: `#${r.sample}` }), el("b", { text: "reward " + number(r.reward, 4) }), mark,
      ...facts.map(([name, value]) => el("span", { text: `${visible(String(name))} ${visible(String(value))}` })));
    const strips = VARIANTS.map((name, v) => {
      const label = `Completion ${r.sample}, reward ${number(r.reward, 4)}` + (name && `, ${name}`);
      const strip = el("div", { class: "strip" + (r.messages === null ? "" : " episode"), "data-sample": r.sample, "data-variant": v, role: "group", "aria-label": label });
      this.fill(strip, r, 0);
      if (!name) return strip;
      return el("div", {}, el("div", { class: "label" }, el("b", { text: name }), "advantage " + number(r.given?.[v], 4)), strip);
    });
    const card = el("div", { class: "rollout" + (this.fits(g, r) ? "" : " dim") }, head,
      r.prompt === null ? null : el("div", { class: "prompt-text", text: visible(r.prompt) }), ...(DATA.replay ? [el("div", { class: "variants" }, ...strips)] : strips));
    if (turns !== null) card.append(this.end(r));
    const known = Object.keys(this.data?.texts ?? {}).length > 0;
    const cut = r.characters > r.text.length ? ` (the first ${number(r.text.length)} of ${number(r.characters)} characters)` : "";
    // A character split over several tokens is in none of them.
    const isSplit = r.ids.some((id) => this.piece(id).includes("\ufffd"));
    const isOpen = !known || (isSplit && r.ids.length <= 12);
    const text = el("details", { open: isOpen }, el("summary", { text: turns === null ? "text" + cut : "conversation" }));
    const show = () => {
      if (text.children.length > 1) return;
      if (r.messages === null) text.append(el("pre", { class: "small", text: visible(r.text.slice(0, WHOLE)) }));
      else text.append(...r.messages.map((m) => this.message(m)));
    };
    if (isOpen) show(); else text.addEventListener("toggle", show, { once: true });
    if (turns !== null || (r.text !== "" && (!known || r.ids.length > 12 || isSplit))) card.append(text);
    for (const [name, trace] of Object.entries(r.errors)) card.append(el("details", {}, el("summary", { text: `${visible(name)} failed` }), el("pre", { class: "small", text: visible(trace) })));
    return card;
  }

  /** How an episode ended, and why one was lost. @param {Rollout} r */
  end(r) {
    const words = ending(r.stop), isLost = words.startsWith("lost"), why = (r.errors.environment ?? "").trim().split("\n").at(-1) ?? "";
    return el("p", { class: "end" + (isLost ? " lost" : words.startsWith("cut") ? " cut" : ""), text: words + (isLost && why ? ": " + brief(why, BRIEF) : "") });
  }

  /** A message in full. @param {Message} m */
  message(m) {
    const left = m.characters > Math.min(m.text.length, WHOLE) ? ` (the first ${number(Math.min(m.text.length, WHOLE))} of ${number(m.characters)} characters)` : "";
    return el("div", { class: "message" + (m.own ? " own" : "") + (m.failed ? " failed" : "") },
      el("b", { text: brief(m.own ? "policy" : m.by, 40) + (m.failed ? ", failed" : "") + left }),
      m.text ? el("pre", { class: "small", text: visible(m.text.slice(0, WHOLE)) }) : null,
      ...m.calls.map((call) => el("pre", { class: "small call" + (call.failed ? " failed" : ""), text: visible(call.text) })));
  }

  /** Tokens from a given one on. Those of each turn, and those written by others, get a block of their own.
   * @param {HTMLElement} strip @param {Rollout} r @param {number} from */
  fill(strip, r, from) {
    const until = Math.min(from + PAGE, r.ids.length), talk = conversation(r);
    /** @param {number} i */
    const isSampled = (i) => r.sampled === null || r.sampled[i];
    const hasTurns = r.messages !== null || (r.sampled !== null && r.sampled.some((s) => !s));
    let block = strip, turn = 0;
    for (let i = 0; i <= from; i++) if (isSampled(i) && (i === 0 || !isSampled(i - 1))) turn++;
    for (let i = from; i < until; i++) {
      const isOwn = isSampled(i), begins = i === 0 || isOwn !== isSampled(i - 1);
      if (i > from && begins && isOwn) turn++;
      if (hasTurns && (i === from || begins)) {
        block = this.block(isOwn, turn, begins ? talk[turn - 1] : undefined, begins ? "" : ", continued");
        strip.append(block);
      }
      const text = this.piece(r.ids[i]);
      const token = el("span", { class: "tok" + (/^(<[^<>]*>|⟨\d+⟩)$/.test(text) ? " special" : ""), "data-i": i, tabindex: i === 0 ? 0 : -1, text: text.replace(/\n/g, isOwn ? "↵\n" : "↵") });
      this.paint(token, r, i, Number(strip.dataset.variant));
      block.append(token);
    }
    if (until < r.ids.length) {
      const more = el("button", { type: "button", text: `Show ${number(Math.min(PAGE, r.ids.length - until))} more of ${number(r.ids.length)} tokens` });
      more.addEventListener("click", () => {
        const hadFocus = document.activeElement === more;
        more.remove();
        this.fill(strip, r, until);
        if (hadFocus) this.tokenAt(strip, until)?.focus();
      });
      strip.append(more);
    } else if (r.length > r.ids.length) {
      strip.append(el("span", { class: "note", text: ` … ${number(r.length - r.ids.length)} more tokens are not in this file; gruppo view shows them` }));
    } else if (isSampled(until - 1) && talk[turn - 1]?.given.length) {
      strip.append(this.block(false, turn, talk[turn - 1], ", not seen by the policy"));
    }
  }

  /** A block for the tokens of a turn, or of what others say after it.
   * @param {boolean} isOwn @param {number} turn @param {{own: Message, given: Message[]}|undefined} talk @param {string} more */
  block(isOwn, turn, talk, more) {
    const messages = talk ? (isOwn ? [talk.own] : talk.given) : [];
    const label = isOwn ? `turn ${turn}${more}` : (messages.length ? "answer" : "tool or user") + more;
    return el("span", { class: "turn" + (isOwn ? " own" : "") + (messages.some((m) => m.failed) ? " failed" : "") },
      el("span", { class: "turn-label", text: label }), ...messages.flatMap(linesOf));
  }

  /** Colour by the chosen quantity. Hatching, and lines above or below, repeat what the colours say.
   * @param {HTMLElement} token @param {Rollout} r @param {number} i @param {number} v */
  paint(token, r, i, v) {
    const q = this.quantity, x = q.of(r, i, v);
    token.classList.remove("hatch", "under", "over");
    token.style.backgroundColor = "";
    if (x === null) return;
    if (q.kind === "class") {
      const [, color] = (q.name === "clip" ? CLIPS.at(x) : REASONS[x]) ?? ["", 0];
      if (color) token.style.backgroundColor = `color-mix(in srgb, var(--c${color}) 38%, transparent)`;
      if (q.name === "clip" && x) token.classList.add(x > 0 ? "over" : "under");
      if (q.name === "why" && x) token.classList.add("hatch");
      return;
    }
    const strength = Math.min(Math.abs(x) / this.limit, 1);
    const hue = q.kind === "amount" ? "heat" : x >= 0 ? "plus" : "minus";
    token.style.backgroundColor = strength < 0.01 ? "" : `rgba(var(--${hue}), ${(0.08 + 0.57 * strength).toFixed(3)})`;
    if (q.kind === "signed" && x < 0 && strength >= 0.05) token.classList.add("under");
  }

  /** @param {string} name */
  recolour(name) {
    this.quantity = byName(name);
    this.hasChosen = true;
    this.limit = this.scaleLimit();
    this.legend();
    const g = this.data?.groups[this.group];
    for (const token of /** @type {NodeListOf<HTMLElement>} */ (at("v-panel").querySelectorAll(".tok"))) {
      const strip = /** @type {HTMLElement} */ (token.closest(".strip"));
      const r = g?.rollouts.find((each) => String(each.sample) === strip.dataset.sample);
      if (r) this.paint(token, r, Number(token.dataset.i), Number(strip.dataset.variant));
    }
  }

  /** @param {Quantity} q */
  values(q) {
    const found = [];
    for (const g of this.data?.groups ?? []) for (const r of g.rollouts) for (let i = 0; i < r.ids.length; i++) {
      for (let v = 0; v < VARIANTS.length; v++) {
        const x = q.of(r, i, v);
        if (x !== null) found.push(Math.abs(x));
      }
    }
    return found;
  }

  /** @param {Quantity} q */
  largest(q) { return this.values(q).reduce((a, b) => Math.max(a, b), 0); }

  /** Amount drawn in full colour: the 99th percentile of the step's tokens. */
  scaleLimit() {
    if (this.quantity.kind === "class") return 1;
    const values = this.values(this.quantity).filter((x) => x > 1e-9).sort((a, b) => a - b);
    return values.length ? values[Math.min(values.length - 1, Math.floor(values.length * 0.99))] : 1;
  }

  legend() {
    const q = this.quantity, values = this.values(q);
    /** @type {(Node|string)[]} */
    const parts = [el("b", { text: q.title })];
    if (!values.length) parts.push("is not recorded in this step");
    else if (q.kind === "class") {
      for (const [i, [text, color]] of (q.name === "clip" ? CLIPS : REASONS).entries()) {
        const sample = el("span", { class: "tok" + (q.name === "why" && i ? " hatch" : q.name === "clip" && i === 1 ? " over" : q.name === "clip" && i === 2 ? " under" : ""), text: "  a  " });
        if (color) sample.style.backgroundColor = `color-mix(in srgb, var(--c${color}) 38%, transparent)`;
        parts.push(el("span", {}, sample, " " + text));
      }
    } else if (values.every((x) => x <= 1e-9)) {
      parts.push(q.name === "gap" ? "is 0 at every token: sampler and trainer agree" : "is 0 at every token" + (["credit", "kl"].includes(q.name) ? ": the step was a single on-policy update" : ""));
    } else {
      const shades = q.kind === "signed" ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
      const ramp = shades.map((x) => {
        const box = el("i");
        box.style.background = x ? `rgba(var(--${q.kind === "amount" ? "heat" : x > 0 ? "plus" : "minus"}), ${0.08 + 0.57 * Math.abs(x)})` : "transparent";
        return box;
      });
      const high = number(this.limit, 2);
      parts.push(el("span", { class: "ramp" }, q.kind === "signed" ? "−" + high : "0", el("span", {}, ...ramp), high));
      if (q.kind === "signed") parts.push("below 0 also underlined" + (q === LOSS_CREDIT ? ": the token becomes likelier" : ""));
    }
    at("v-legend").replaceChildren(...parts);
  }

  // --- one token ----------------------------------------------------------------------------------------------------

  /** @param {EventTarget|null} target */
  hover(target) {
    const token = target instanceof Element ? /** @type {HTMLElement|null} */ (target.closest(".tok")) : null;
    const g = this.data?.groups[this.group];
    if (!token || !g || !this.data || token === this.marked) return;
    const sample = token.closest(".strip")?.getAttribute("data-sample");
    const r = g.rollouts.find((each) => String(each.sample) === sample);
    if (!r) return;
    this.marked = token;
    for (const each of at("v-panel").querySelectorAll(".tok.on")) each.classList.remove("on");
    for (const each of at("v-panel").querySelectorAll(`.strip[data-sample="${sample}"] .tok[data-i="${token.dataset.i}"]`)) each.classList.add("on");
    const i = Number(token.dataset.i), d = logRatio(r, i), why = pick(r.why, i);
    /** @type {[string, string, any][]} */
    const credits = [];
    for (const [v, name] of DATA.replay ? VARIANTS.entries() : []) {
      credits.push([`credit-${v}`, `credit, ${name}`, lossCredit(r, i, v)]);
      if (v) credits.push([`difference-${v}`, `difference, ${name}`, DIFFERENCE.of(r, i, v)]);
    }
    /** @type {[string, string, any][]} */
    const facts = [
      ...credits, ["sampler", "log p, sampler", pick(r.sampler, i)], ["old", "log p, before", pick(r.old, i)], ["new", "log p, now", pick(r.new, i)],
      ["ref", "log p, reference", pick(r.ref, i)], ["advantage", "advantage", advantageOf(r, i)], ["ratio", "ratio", d === null ? null : Math.exp(d)],
      ["log_ratio", "log-ratio", d], ["credit", "advantage × log-ratio", byName("credit").of(r, i, 0)], ["kl", "KL, before to now", byName("kl").of(r, i, 0)],
      ["ref_kl", "KL to the reference", byName("ref_kl").of(r, i, 0)], ["entropy", "entropy", pick(r.entropy, i)], ["gap", "sampler gap", byName("gap").of(r, i, 0)],
      ["clip", "clipped", r.clipped === null ? null : (CLIPS.at(pick(r.clipped, i) ?? 0) ?? CLIPS[0])[0]],
      ["why", "trained on", why === null ? null : why === 0 ? "yes" : "no: " + REASONS[why][0]],
    ];
    at("token").hidden = false;
    at("token").replaceChildren(
      el("div", {}, el("span", { class: "piece", text: this.piece(r.ids[i]).replace(/\n/g, "↵") }), el("span", { class: "muted", text: `  token ${r.ids[i]} · position ${i + 1} of ${number(r.length)} · completion ${r.sample} · policy after ${r.versions?.[1] ?? "?"} updates` })),
      el("dl", { class: "numbers" }, ...facts.map(([name, title, value]) => el("div", {}, el("dt", { text: title }), el("dd", { "data-name": name, text: number(value, 5) })))));
  }

  /** Focus a token: Tab then reaches it in its strip, and nothing covers it.
   * @param {HTMLElement} token */
  focused(token) {
    if (!token.classList.contains("tok")) return;
    for (const other of /** @type {NodeListOf<HTMLElement>|undefined} */ (token.closest(".strip")?.querySelectorAll('.tok[tabindex="0"]')) ?? []) other.tabIndex = -1;
    token.tabIndex = 0;
    this.hover(token);
    document.documentElement.style.scrollPaddingBottom = at("token").offsetHeight + 8 + "px";
    token.scrollIntoView({ block: "nearest" });
  }

  /** Token of a strip by number, else its last; shows further tokens up to it.
   * @param {Element|undefined} strip @param {number} i @returns {HTMLElement|undefined} */
  tokenAt(strip, i) {
    const shown = strip?.getElementsByClassName("tok") ?? [];
    for (let more = strip?.querySelector("button"); more && shown.length <= i; more = strip?.querySelector("button")) more.click();
    return /** @type {HTMLElement|undefined} */ (shown[Math.max(0, Math.min(i, shown.length - 1))]);
  }

  /** @param {number} sample @param {number} i */
  focusToken(sample, i) {
    const strip = at("v-panel").querySelector(`.strip[data-sample="${sample}"]`);
    const token = this.tokenAt(strip ?? undefined, i);
    token?.scrollIntoView({ block: "center" });
    token?.focus();
  }

  /** @param {KeyboardEvent} e */
  tokenKey(e) {
    const token = /** @type {HTMLElement} */ (e.target);
    if (!token.classList.contains("tok")) return;
    const strips = [...at("v-panel").querySelectorAll(".strip")].filter((each) => each.querySelector(".tok"));
    const strip = strips.findIndex((each) => each.contains(token)), i = Number(token.dataset.i);
    /** @type {HTMLElement|null|undefined} */
    let next;
    if (e.key === "ArrowRight") next = this.tokenAt(strips[strip], i + 1);
    else if (e.key === "ArrowLeft") next = this.tokenAt(strips[strip], i - 1);
    else if (e.key === "Home") next = this.tokenAt(strips[strip], 0);
    else if (e.key === "End") next = this.tokenAt(strips[strip], Infinity);
    else if (e.key === "ArrowDown") next = this.tokenAt(strips[strip + 1], i);
    else if (e.key === "ArrowUp") next = this.tokenAt(strips[strip - 1], i);
    else if (e.key === "Escape") next = this.chosenCard();
    else return;
    e.preventDefault();
    next?.focus();
  }

  // --- over all steps -----------------------------------------------------------------------------------------------

  /** @param {(row: any[]) => boolean} fits @param {string} title @param {number} most */
  async walk(fits, title, most) {
    const search = ++this.search, status = el("p", { class: "note", role: "status" }), body = el("tbody");
    at("v-results").replaceChildren(el("div", { class: "card panel results" }, el("h3", { text: title }), status,
      el("table", {}, el("thead", {}, el("tr", {}, ...["step", "prompt", "reward", "completion"].map((text) => el("th", { text })))), body)));
    at("v-results").scrollIntoView({ block: "nearest" });
    let found = 0;
    for (const [at_, step] of this.steps.entries()) {
      const rows = await this.source.rows(this.run, step).catch(() => []);
      if (search !== this.search) return; // another search began
      for (const row of rows) {
        if (!fits(row)) continue;
        if (found++ >= most) continue;
        const [group, sample, , prompt, text, , reward, correct, turns] = row;
        const words = input("v-text").value.toLowerCase(), from = words ? Math.max(text.toLowerCase().indexOf(words) - 100, 0) : 0;
        body.append(el("tr", {}, el("td", {}, el("a", { href: `#t/${this.run}/${step}/${group}/${sample}/0`, text: String(step) })), el("td", {}, el("code", { text: visible(prompt.slice(-80)) })),
          el("td", { class: "n", text: number(reward, 4) + (correct === null ? "" : correct ? " ✓" : " ✗") }), el("td", {}, turns === null ? null : el("span", { class: "muted", text: counted(turns, "turn") + "  " }), (from ? "… " : "") + visible(text.slice(from, from + 300)))));
      }
      status.textContent = `${number(found)} found in ${at_ + 1} of ${this.steps.length} steps` + (found > most ? `; the first ${most} are shown` : "");
    }
    const all = DATA.runs[this.run].steps_recorded.length;
    if (this.steps.length < all) status.textContent += `; ${number(all - this.steps.length)} more steps are not in this file; gruppo view has them`;
  }

  searchAll() { return this.walk((row) => this.matches(row.slice(3)), "Matching completions in all steps", 200); }

  /** @param {number} index */
  history(index) { return this.walk((row) => row[2] === index, `Prompt ${index} over the run`, 500); }

  followLink() {
    const found = /^#t\/(\d+)\/(\d+)\/(\d+)\/(\d+)\/(\d+)$/.exec(location.hash);
    if (!found) return;
    const [run, step, group, sample, token] = found.slice(1).map(Number);
    if (!DATA.runs[run]?.steps_here.includes(step)) return;
    this.run = run;
    this.go(step, group, sample, token);
  }
}

/** @param {string} id @returns {HTMLInputElement} */
const input = (id) => /** @type {HTMLInputElement} */ (at(id));
/** @param {string} id @returns {HTMLButtonElement} */
const button = (id) => /** @type {HTMLButtonElement} */ (at(id));

const viewer = new Viewer();

async function start() {
  applyTheme();
  at("theme").addEventListener("click", () => {
    chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("gruppo-theme", chosenTheme); } catch { /* a browser without storage */ }
    applyTheme();
    drawCharts();
    drawLedger();
  });
  prefersDark.addEventListener("change", () => { applyTheme(); drawCharts(); drawLedger(); });
  addEventListener("hashchange", () => viewer.followLink());
  if (DATA.live) {
    take(await (await fetch("data.json", { cache: "no-store" })).json());
    drawCharts();
  } else drawAll();
  await viewer.update();
  viewer.followLink();
  document.documentElement.dataset.ready = "";
  if (DATA.live) {
    await fetchVega();
    await fetchCharts();
    refresh();
    setInterval(refresh, 5000);
  }
}

start();
