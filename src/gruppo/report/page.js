// @ts-check
"use strict";
// The page of a report: overview, charts, ledger, options. Model text reaches the page through textContent alone.

/** Data of the page, from `page_data` in page.py. @type {any} */
let DATA = JSON.parse(at("data").textContent || "{}");

/** @param {string} id @returns {HTMLElement} */
function at(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/**
 * Create an element. `text` is its text, `class` its class, a function a listener, anything else an attribute.
 * @param {string} tag @param {Record<string, any>} [facts] @param {...(Node | string | null)} children
 * @returns {HTMLElement}
 */
function el(tag, facts = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null) made.append(child);
  return made;
}

/** Details element, open if the one it replaces (with the same id) is open.
 * @param {string} id @param {HTMLElement} summary @param {...(Node | string | null)} children */
function details(id, summary, ...children) {
  summary.id = id + "-summary";
  return el("details", { id, open: document.getElementById(id)?.hasAttribute("open") }, summary, ...children);
}

/** Refill a part of the page. The focus moves to the new element with the same id.
 * @param {string} id @param {Node[]} parts */
function refill(id, parts) {
  const focused = document.activeElement;
  at(id).replaceChildren(...parts);
  if (focused?.id && !focused.isConnected) document.getElementById(focused.id)?.focus({ preventScroll: true });
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Text with control characters and direction marks escaped: they could hide or reverse what follows.
 * @param {string} text */
function visible(text) {
  const lone = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  /** @param {string} c */
  const escaped = (c) => {
    const code = c.charCodeAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  };
  return text.replace(HIDDEN, escaped).replace(lone, escaped);
}

/** Runs are named after folders, whose names may have such marks too. @param {any} data */
function escapeNames(data) {
  for (const run of data.runs ?? []) run.name = visible(run.name);
}
escapeNames(DATA);
document.title = visible(document.title);

/** Number to some significant digits, with a real minus sign; adding 0 removes it from −0. @param {any} x @param {number} digits */
function number(x, digits = 4) {
  if (typeof x !== "number") return x === null || x === undefined ? "–" : String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return (x + 0).toLocaleString("en").replace("-", "−");
  const small = Math.abs(x) < 1e-4 || Math.abs(x) >= 1e6;
  return (small ? x.toExponential(digits - 2) : String(Number(x.toPrecision(digits)))).replace(/-/g, "−");
}

/** @param {number} x */
const percent = (x) => (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + " %";

/** @param {number} s */
function duration(s) {
  if (s < 90) return s.toFixed(0) + " s";
  if (s < 5400) return (s / 60).toFixed(0) + " min";
  return (s / 3600).toFixed(1) + " h";
}

// --- light and dark -------------------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = "";
try { chosenTheme = localStorage.getItem("gruppo-theme") || ""; } catch { /* a browser without storage */ }

function applyTheme() {
  const dark = chosenTheme ? chosenTheme === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").textContent = dark ? "☀" : "☾";
  at("theme").title = dark ? "Light" : "Dark";
}

/** @param {string} name */
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

/** Colour of a run or key. @param {number} i */
const colour = (i) => variable("c" + ((i % 8) + 1));

function vegaConfig() {
  const [muted, line, card] = ["muted", "line", "card"].map(variable);
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: "transparent", font, padding: { left: 0, right: 4, top: 2, bottom: 0 },
    axis: { labelColor: muted, titleColor: muted, gridColor: line, domain: false, ticks: false, labelPadding: 5,
            labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", labelFont: font, titleFont: font },
    axisX: { grid: false, domain: true, domainColor: line },
    view: { stroke: null },
    range: { category: [0, 1, 2, 3, 4, 5, 6, 7].map(colour) },
    style: {
      usual: { color: variable("usual"), fillOpacity: Number(variable("usual-alpha")) },
      finding: { color: variable("bad"), strokeDash: [4, 3] }, // Vega-Lite's colour of rules overrides `stroke`
    },
    bar: { cornerRadiusEnd: 3, fill: card },
  };
}

// --- tooltip --------------------------------------------------------------------------------------------------------

/** @param {any} handler @param {MouseEvent} event @param {any} item @param {any} value */
function showTip(handler, event, item, value) {
  const tip = at("tip");
  if (!value || typeof value !== "object") { tip.hidden = true; return; }
  const list = el("dl");
  for (const [name, text] of Object.entries(value)) {
    if (text !== "null" && text !== "NaN") list.append(el("dt", { text: name }), el("dd", { text: visible(String(text)) }));
  }
  tip.replaceChildren(list);
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = Math.max(4, event.clientY - height - 12) + "px";
}

// --- charts ---------------------------------------------------------------------------------------------------------

/** @type {Map<Element, any>} charts waiting to be drawn */
const waiting = new Map();
/** @type {any[]} */
let drawn = [];

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "600px" });

/** @param {Element} plot */
async function draw(plot) {
  const spec = waiting.get(plot);
  const embed = /** @type {any} */ (window).vegaEmbed;
  if (!spec || !embed) return;
  waiting.delete(plot);
  seen.unobserve(plot);
  const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, config: vegaConfig(), tooltip: showTip };
  const result = await embed(plot, { autosize: { type: "fit-x", contains: "padding" }, ...spec }, options);
  drawn.push(result);
  plot.setAttribute("data-drawn", "");
}

/** @param {any} chart @param {string} [place] */
function chartCard(chart, place = "chart") {
  const plot = el("div", { class: "plot" });
  const summary = el("summary");
  const what = details(`${place} ${chart.keys.map((/** @type {any} */ k) => k.key)}`, summary);
  what.className = "what";
  for (const [i, key] of chart.keys.entries()) {
    const expect = key.expect.split(";")[0];
    summary.append(i ? ", " : "", el("code", { text: key.key }));
    if (expect) summary.append(" ", el("span", { class: key.range ? "range" : "", text: expect }));
    if (key.what) what.append(el("p", {}, el("code", { text: key.key }), ` ${key.what}${key.over ? ", over " + key.over : ""}${key.expect ? "; expect " + key.expect : ""}.`));
  }
  waiting.set(plot, chart.spec);
  seen.observe(plot);
  return el("article", { class: "card chart", "data-keys": chart.keys.map((/** @type {any} */ k) => k.key).join(" ") },
    el("h3", { text: chart.title }), chart.legend.length ? el("div", { class: "legend" }, ...chart.legend.map(legendItem)) : null, plot, what);
}

/** Legend line with its name. @param {any} item */
function legendItem(item) {
  const [svg, line] = ["svg", "line"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of [["width", 28], ["height", 8]]) svg.setAttribute(String(name), String(value));
  for (const [name, value] of [["x2", 28], ["y1", 4], ["y2", 4], ["stroke-width", item.dash ? 2.5 : 5], ["stroke-dasharray", (item.dash ?? []).join(" ")]]) line.setAttribute(String(name), String(value));
  line.style.stroke = item.color === null ? variable("fg") : colour(item.color);
  svg.append(line);
  return el("span", {}, svg, el("span", { text: visible(item.name) }));
}

function drawCharts() {
  for (const result of drawn) result.finalize();
  drawn = [];
  waiting.clear();
  const parts = [];
  if (!DATA.questions) return void at("charts").replaceChildren(el("p", { class: "note", text: "Drawing the charts …" }));
  for (const [i, question] of DATA.questions.entries()) {
    const part = el("div", { id: "question-" + i }, el("h2", { text: question.title }), el("p", { class: "lede", text: question.answer }));
    if (question.charts.length) part.append(el("div", { class: "grid" }, ...question.charts.map((/** @type {any} */ c) => chartCard(c))));
    else part.append(el("p", { class: "note", text: question.none || "This run has none of these numbers." }));
    if (question.further.length) {
      const more = details("more-" + i, el("summary", { text: `${question.further.length} further metrics` }));
      const fill = () => { if (more.children.length < 2) more.append(el("div", { class: "grid" }, ...question.further.map((/** @type {any} */ c) => chartCard(c)))); };
      if (more.hasAttribute("open")) fill(); else more.addEventListener("toggle", fill, { once: true });
      part.append(more);
    }
    if (question.zero.length) part.append(el("p", { class: "note" }, "Always 0: ", el("code", { text: question.zero.join(", ") })));
    parts.push(part);
  }
  refill("charts", parts);
}

// --- overview -------------------------------------------------------------------------------------------------------

/** @param {any} tile */
function tileCard(tile) {
  /** @param {number} x */
  const shown = (x) => (tile.format === "share" ? percent(x) : tile.format === "length" ? number(x, 3) : number(x, 3));
  const spread = typeof tile.low === "number" ? `interval ${percent(tile.low).replace(" %", "")}–${percent(tile.high)}` : "";
  return el("div", { class: "tile" }, el("div", { class: "name", text: tile.title }), el("div", { class: "value", text: shown(tile.last) }),
    el("div", { class: "from" }, el("span", { text: "from " + shown(tile.first) }), spread ? " · " : "", el("span", { text: spread })));
}

const MOODS = { learning: "good", finished: "good", done: "good", running: "calm", stopped: "calm", stalled: "warn", collapsed: "bad", failed: "bad", killed: "bad" };

/** @param {any} run @param {number} i */
function runHead(run, i) {
  const several = DATA.runs.length > 1;
  const title = el(several ? "h2" : "h1", {}, several ? el("span", { class: "swatch" }) : null, run.name);
  if (several) /** @type {HTMLElement} */ (title.firstChild).style.background = colour(i);
  const mood = /** @type {Record<string, string>} */ (MOODS)[run.state.name] || "calm";
  const facts = [["model", run.model], ["data", run.data], ["rewards", run.rewards.join(", ")], ["loss", run.loss], ["advantage", run.advantage],
    ["group size", run.group_size], ["seed", run.seed], ["time", duration(run.seconds)], ["device", run.device]];
  // The pill already shows the first word.
  const text = run.state.text.startsWith(run.state.name + " ") ? run.state.text.slice(run.state.name.length + 1) : run.state.text;
  const list = facts.filter((f) => f[1] !== "" && f[1] !== null);
  return el("div", { class: "run" }, title,
    el("p", { class: "state" }, el("span", { class: "pill " + mood, text: run.state.name.replace("_", " ") }), el("span", { text: visible(text).replace(/(\d) -> (-?\d)/g, "$1 → $2") })),
    el("div", { class: "facts" }, ...list.map(([name, value]) => el("span", {}, name + " ", el("b", { text: visible(String(value)) })))),
    el("div", { class: "tiles" }, ...run.tiles.map(tileCard)),
    run.findings.length ? el("ul", { class: "findings" }, ...run.findings.map((/** @type {any} */ finding) => findingItem(finding, i))) : null);
}

/** @param {any} finding @param {number} i number of its run */
function findingItem(finding, i) {
  const chart = [...document.querySelectorAll("#charts .chart")].find((c) => (c.getAttribute("data-keys") || "").split(" ").includes(finding.metric));
  const item = el("li", { class: finding.severity },
    el("div", { class: "title" }, el("span", { class: "pill " + (finding.severity === "problem" ? "bad" : "warn"), text: finding.severity }), el("b", { text: visible(finding.text) }),
      el("span", { class: "muted small" }, el("code", { text: finding.rule }), finding.step === null ? "" : ` from step ${finding.step}`),
      chart ? el("button", { id: `finding-${i} ${finding.rule} ${finding.metric}`, type: "button", text: "Show its chart", click: () => chart.scrollIntoView({ block: "center" }) }) : null),
    el("p", { class: "muted", text: visible(finding.evidence) }),
    // Text in backticks is a command or an option.
    el("p", {}, ...visible(finding.remedy).split("`").map((part, i) => (i % 2 ? el("code", { text: part }) : part))));
  return item;
}

/** Losses of a replayed step, compared with the first, which is the run's own. @param {any} found */
function replayHead(found) {
  const norm = found.weights ? "gradient norm" : "norm of d/dlogp";
  /** @param {number} x */
  const share = (x) => (100 * x).toFixed(1) + " %";
  /** @type {[string, (v: any, i: number) => string][]} */
  const columns = [
    ["value", (v) => number(v.value, 4)], [norm, (v) => number(v.grad_norm, 5)], ["cosine", (v, i) => number(found.cosine[0][i], 5)],
    ["clipped", (v) => (v.clipped === null ? "–" : share(v.clipped))], ["masked", (v) => share(v.masked)],
    ["credit moved", (v) => share(v.moved)], ["tokens lose it", (v) => number(v.lost)],
    ["gain it", (v) => number(v.gained)], ["flip it", (v) => number(v.flipped)],
  ];
  const rows = found.variants.map((/** @type {any} */ v, /** @type {number} */ i) => el("tr", { class: i ? "" : "sum" },
    el("td", { text: visible(v.loss) + (i ? "" : " (of the run)") }), el("td", { text: visible(v.advantage) }),
    ...columns.map(([, of]) => el("td", { class: "n", text: of(v, i) }))));
  const facts = [["weights", found.weights || "none, from recorded log-probs"], ["completions of the update", number(found.completions)],
    ["gradient norm, recorded", number(found.recorded_norm, 6)], ["replayed", number(found.replayed_norm, 6)]];
  return [el("h1", { text: `Step ${found.step} of ${DATA.runs[0].name}, replayed` }),
    el("p", { class: "lede", text: "Losses and advantages on the same rollouts, each compared with the first." }),
    el("div", { class: "run" }, el("div", { class: "facts" }, ...facts.map(([name, value]) => el("span", {}, name + " ", el("b", { text: visible(value) }))))),
    el("div", { class: "card pad scroll" }, el("table", { id: "replay" },
      el("thead", {}, el("tr", {}, el("th", { text: "loss" }), el("th", { text: "advantage" }), ...columns.map(([text]) => el("th", { class: "n", text })))),
      el("tbody", {}, ...rows))),
    ...found.notes.map((/** @type {string} */ text) => el("p", { class: "note", text: visible(text) }))];
}

function drawOverview() {
  if (DATA.replay) return void at("overview").replaceChildren(...replayHead(DATA.replay));
  refill("overview", [...(DATA.runs.length > 1 ? [el("h1", { text: `${DATA.runs.length} runs` })] : []), ...DATA.runs.map(runHead)]);
}

// --- ledger ---------------------------------------------------------------------------------------------------------

function drawLedger() {
  const parts = [el("h2", { text: "What happened to the tokens?" }),
    el("p", { class: "lede", text: "From generated tokens to those in the policy term, and what the loss divides by." })];
  for (const [i, run] of DATA.runs.entries()) {
    const ledger = run.ledger;
    if (ledger?.note && !ledger.generated) parts.push(el("p", { class: "note", text: visible(ledger.note) }));
    if (!ledger || !ledger.generated) continue;
    const body = el("tbody", {}, el("tr", { class: "sum" }, el("td", { text: "generated" }), el("td", { class: "n", text: number(ledger.generated) }), el("td", { class: "n", text: "100 %" })));
    for (const row of ledger.lines) {
      body.append(el("tr", {}, el("td", {}, "− " + row.title, el("div", { class: "muted small", text: visible(row.what) })),
        el("td", { class: "n", text: row.count ? "−" + number(row.count) : "0" }), el("td", { class: "n", text: percent(row.count / ledger.generated) })));
    }
    body.append(el("tr", { class: "sum" }, el("td", { text: "= trained on" }), el("td", { class: "n", text: number(ledger.trained) }), el("td", { class: "n", text: percent(ledger.trained / ledger.generated) })));
    const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { text: "tokens" }), el("th", { class: "n", text: "number" }), el("th", { class: "n", text: "share" }))), body);
    const right = el("div", { class: "stack" }, ledger.chart ? chartCard(ledger.chart, "ledger-" + i) : null,
      el("div", { class: "card pad divisor" }, el("h3", { text: "Divided by" }), ...ledger.divisor.map((/** @type {string} */ t) => el("p", { class: "small", text: visible(t) })),
        run.loss_text ? details("loss-" + i, el("summary", { text: "The loss in words" }), el("pre", { class: "small", text: visible(run.loss_text) })) : null));
    if (DATA.runs.length > 1) parts.push(el("h3", { text: run.name }));
    parts.push(el("div", { class: "split" }, el("div", { class: "card pad" }, table, el("p", { class: "note", text: ledger.note })), right));
  }
  refill("ledger", parts.length > 2 ? parts : []);
}

// --- options --------------------------------------------------------------------------------------------------------

function drawOptions() {
  /** @param {any[]} rows */
  const table = (rows) => el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { text: "option" }), ...DATA.runs.map((/** @type {any} */ r) => el("th", { text: r.name })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, el("td", {}, el("code", { text: visible(row.name) })),
      ...row.values.map((/** @type {string} */ v) => el("td", {}, el("code", { text: visible(v) }))))))));
  const differ = DATA.config.filter((/** @type {any} */ row) => row.differs);
  const parts = [el("h2", { text: DATA.runs.length > 1 ? "Which options differ?" : "Options" })];
  if (DATA.runs.length > 1) {
    parts.push(differ.length ? el("div", { class: "card pad" }, table(differ)) : el("p", { class: "note", text: "All options are the same." }));
  }
  parts.push(details("all-options", el("summary", { text: `All ${DATA.config.length} options` }), el("div", { class: "card pad" }, table(DATA.config))));
  refill("options", parts);
}

function drawNav() {
  const questions = (DATA.questions ?? []).map((/** @type {any} */ question, /** @type {number} */ i) => ["question-" + i, question.name]);
  const links = DATA.replay ? [["overview", "Losses"], ["completions", "Completions"], ["options", "Options"]]
    : [["overview", "Overview"], ...questions, ["ledger", "Tokens"], ["completions", "Completions"], ["options", "Options"]];
  refill("nav", links.map(([id, text]) => el("a", { id: "nav-" + id, href: "#" + id, text })));
  at("foot").textContent = `Made by gruppo ${DATA.version}. ` + (DATA.live ? "This page follows the run directory while it is open." : visible(DATA.note));
}

function drawAll() {
  drawCharts();
  drawOverview();
  drawLedger();
  drawOptions();
  drawNav();
}

// --- a run that goes on ---------------------------------------------------------------------------------------------

/** Take new data, keeping the old charts and ledgers until the new ones arrive. @param {any} data */
function take(data) {
  escapeNames(data);
  data.questions = DATA.questions;
  for (const [i, run] of data.runs.entries()) run.ledger = DATA.runs?.[i]?.ledger;
  const hasNewOptions = JSON.stringify(data.config) !== JSON.stringify(DATA.config);
  DATA = data;
  drawOverview();
  if (hasNewOptions) drawOptions(); // else a scrolled table would jump back to its start
  drawNav();
}

async function fetchCharts() {
  const answer = await fetch("charts.json", { cache: "no-store" });
  if (!answer.ok) return void at("charts").replaceChildren(el("p", { class: "note", text: "The charts cannot be drawn: " + visible(await answer.text()) }));
  const { questions, ledgers } = await answer.json();
  DATA.questions = questions;
  for (const [i, ledger] of ledgers.entries()) DATA.runs[i].ledger = ledger;
  const scrolled = scrollY;
  at("charts").style.minHeight = at("charts").offsetHeight + "px";
  drawCharts();
  drawLedger();
  drawOverview();
  drawNav();
  at("charts").style.minHeight = "";
  scrollTo(0, scrolled);
}

/** Chart library, for a page that does not include it. */
function fetchVega() {
  return new Promise((done) => document.body.append(el("script", { src: "vega.js", load: done, error: done })));
}

let isRefreshing = false;

async function refresh() {
  if (document.hidden || isRefreshing) return;
  isRefreshing = true;
  try {
    const answer = await fetch("data.json?seen=" + encodeURIComponent(DATA.seen || ""), { cache: "no-store" });
    if (answer.status === 200) {
      take(await answer.json());
      viewer.update();
      await fetchCharts();
    }
    const run = DATA.runs[0];
    at("live").textContent = answer.ok ? `${run.status} · step ${run.step}${run.steps ? " of " + run.steps : ""}` : "no answer";
  } catch {
    at("live").textContent = "gruppo view has stopped";
  }
  isRefreshing = false;
}
