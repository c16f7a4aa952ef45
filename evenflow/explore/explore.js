// The page of `evenflow explore`: sliders and a text box ask, and what is told is drawn.
const page = PAGE, byId = id => document.getElementById(id), live = !page.points;
const token = new URLSearchParams(location.search).get("token");
const MOVE_MS = 60, TYPE_MS = 350, SWEPT = 7;
let state = {text: page.text, others: page.others}, told = {}, runs = [], pinned = null, stop = null;
let swept = null, view = sharedView(), seen = false, progress = {};

const make = (tag, about = {}, ...inside) => {
  const found = Object.assign(document.createElement(tag), about);
  found.append(...inside);
  return found;
};

// -- numbers in words ---------------------------------------------------------------------------

const digits = value => {
  const size = Math.abs(value);
  return size >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
};
function inWords(metric, value) {
  if (value === undefined) return "\u2013";
  if (metric.key.endsWith("_share")) return `${digits(100 * value)} %`;
  if (metric.key.endsWith("_ms")) return value >= 1000 ? `${digits(value / 1000)} s` : `${digits(value)} ms`;
  return digits(value);
}
const title = metric => metric.words.replace(/ \(ms\)$/, "");

// -- asking -------------------------------------------------------------------------------------

// Yield the messages of an answer, a line each.
async function* messages(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST", body: JSON.stringify(body), signal,
    headers: {"x-token": token, "content-type": "application/json"},
  });
  if (!answer.ok) {
    yield {error: (await answer.text()).trim()};
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    const lines = (rest + (value || "")).split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
    if (done) return;
  }
}

// Simulate what the page says, with the keys that were moved; whatever was asked before stops.
async function ask() {
  const set = {...moved};
  stop?.abort();
  const mine = stop = new AbortController();
  const started = asked = performance.now();
  byId("error").textContent = "";
  byId("status").textContent = "simulating ...";
  progress = {};
  document.body.dataset.state = "asked";
  try {
    for await (const message of messages("/simulate", {question: {...state, set}}, mine.signal)) {
      if (mine !== stop) return;
      if (message.error) byId("error").textContent = message.error;
      if (message.error || message.document)  // now it has them, or never will
        for (const key in set) if (moved[key] === set[key]) delete moved[key];
      if (message.document) settle(message.document);
      if (message.progress) tellProgress(message.progress);
      if (message.run) show(message.run, performance.now() - started);
    }
    byId("status").textContent = byId("error").textContent ? "not simulated" : inAll();
    document.body.dataset.state = "done";
  } catch (error) {
    if (mine !== stop || error.name === "AbortError") return;
    byId("error").textContent = "the server does not answer: is evenflow explore still running?";
    document.body.dataset.state = "done";
  }
}

function tellProgress({side, done, of}) {
  progress[side] = done;
  const all = Object.values(progress).reduce((sum, each) => sum + each, 0);
  const whole = of * (1 + state.others.length);
  byId("status").textContent = `${all.toLocaleString("en")} of ${whole.toLocaleString("en")} requests are done ...`;
}

function inAll() {
  const all = runs.map(run => run.setup);
  if (new Set(all).size < 2) return all[0] ?? "";
  return all.map((each, at) => `${"ABCD"[at]} ${each}`).join("; ");
}

let later = 0;
const soon = (call, ms) => { clearTimeout(later); later = setTimeout(call, ms); };

let moved = {}, waits = 0, asked = 0;  // keys that the document does not have yet
function move(key, value) {
  if (!live) return pick(key, value);
  moved[key] = value;
  waits ||= setTimeout(() => { waits = 0; ask(); }, Math.max(asked + MOVE_MS - performance.now(), 0));
}

// -- the document and its controls --------------------------------------------------------------

function settle(found) {
  told = found;
  state = {text: found.text, others: found.others};
  if (byId("text").value !== found.text) byId("text").value = found.text;
  byId("command").textContent = found.command;
  remember();
  const several = found.schedulers.length > 1;
  drawControls([...found.schedulers.map((controls, side) =>
    [several ? `Scheduler ${"ABCD"[side]}` : "Scheduler", controls]), ["The run", found.controls]]);
  runs.length = Math.min(runs.length, found.schedulers.length);
}

function drawControls(groups) {
  const layout = JSON.stringify(groups.map(([, all]) => all.map(each => [each.key, each.choices])));
  if (byId("controls").dataset.layout !== layout) {
    byId("controls").dataset.layout = layout;
    byId("controls").replaceChildren(...groups.map(([name, all]) => make("fieldset", {},
      make("legend", {textContent: name}), ...all.map(control))));
  }
  for (const [, all] of groups) for (const each of all) byId(idOf(each.key)).refresh(each);
}

const idOf = key => `set-${key.replaceAll(".", "-")}`;

function control(each) {
  const id = idOf(each.key), name = each.key.split(".").pop();
  const label = make("label", {htmlFor: `${id}-in`, textContent: name});
  const box = make("div", {id, className: "control"}, label);
  const words = each.words.replaceAll("`", "");  // the reference's Markdown
  const about = make("small", {textContent: words, title: words, id: `${id}-about`});
  if (each.choices) {
    const select = make("select", {id: `${id}-in`}, ...each.choices.map(choice =>
      make("option", {textContent: choice === null ? "as the machine has it" : choice})));
    select.onchange = () => move(each.key, each.choices[select.selectedIndex]);
    select.setAttribute("aria-describedby", about.id);
    box.append(select, about);
    box.refresh = now => { select.selectedIndex = each.choices.indexOf(now.value); };
    return box;
  }
  let now = each;
  const slider = make("input", {type: "range", min: 0, max: 1000, id: `${id}-in`});
  const exact = make("input", {type: "text", inputMode: "decimal", size: 7, ariaLabel: `${name}, exactly`});
  const sweeps = make("button", {textContent: "sweep", title: `Draw the metrics over ${name}`});
  slider.setAttribute("aria-describedby", about.id);
  slider.oninput = () => {
    exact.value = String(valueAt(now, slider.value / 1000));
    slider.ariaValueText = exact.value;
    move(each.key, valueAt(now, slider.value / 1000));
  };
  exact.onchange = () => move(each.key, exact.value.trim() === "" || isNaN(exact.value) ? exact.value : +exact.value);
  sweeps.onclick = () => sweep(now);
  box.append(slider, exact, ...(live ? [sweeps] : []), about);
  box.refresh = found => {
    now = found;
    if (now.value === null) exact.placeholder = "null";
    else if (document.activeElement !== exact) exact.value = String(now.value);
    if (document.activeElement !== slider || !slider.matches(":active"))
      slider.value = 1000 * shareOf(now, now.value ?? now.high);
    slider.ariaValueText = exact.value;
  };
  return box;
}

function valueAt({low, high, log, whole, values}, share) {
  if (values) return values[Math.round(share * (values.length - 1))];
  const value = log ? low * (high / low) ** share : low + share * (high - low);
  return whole ? Math.round(value) : +value.toPrecision(3);
}
function shareOf({low, high, log, values}, value) {
  if (values) return values.indexOf(value) / Math.max(values.length - 1, 1);
  return high === low ? 0 : log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

// -- what is shown ------------------------------------------------------------------------------

function show(run, ms) {
  runs[run.side] = run;
  byId("sample").textContent = run.requests < run.of
    ? `The first ${run.requests} of ${run.of.toLocaleString("en")} requests, in ${Math.round(ms)} ms; the rest is on its way.`
    : `${run.of.toLocaleString("en")} requests, simulated and drawn in ${(ms / 1000).toFixed(2)} s.`;
  draw1();
}

const lettered = () => [...runs.filter(Boolean).map((run, at) =>
  ({...run, called: runs.length > 1 || pinned ? `${"ABCD"[at]}: ${run.label}` : run.label})),
  ...(pinned ? [{...pinned, called: `pinned: ${whatDiffers() || pinned.label}`}] : [])];

// The settings of the pinned run that are others by now: kv_thresh 0.05.
const settings = found => [...found.schedulers[0], ...found.controls];
function whatDiffers() {
  const now = new Map(settings(told).map(each => [each.key, each.value]));
  return settings(pinned.told).filter(each => now.get(each.key) !== each.value)
    .map(each => `${each.key.split(".").pop()} ${each.value}`).join(", ");
}

let frame = 0;
function draw1() {
  const all = lettered();
  drawTiles(all);
  drawTimelines(all);
  byId("notes").replaceChildren(...all.flatMap(run => run.notes.map(note =>
    make("li", {}, make("b", {textContent: run.called}), `: ${note}`))));
  document.body.dataset.shown = String(+(document.body.dataset.shown || 0) + 1);
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => setTimeout(() => drawFigures(all)));
}

const colour = at => page.colours[at % page.colours.length];
const mark = at => `<svg width="26" height="6" aria-hidden="true"><path d="M0 3H26" stroke="${colour(at)}" `
  + `stroke-width="3" stroke-dasharray="${page.dashes[at % page.dashes.length]}"/></svg>`;

function drawTiles(all) {
  byId("tiles").replaceChildren(...page.metrics.filter(metric =>
    all.some(run => run.summary[metric.key] !== undefined)).map(metric => {
    const rows = all.map((run, at) => {
      const value = run.summary[metric.key], row = make("p", {innerHTML: mark(at)});
      row.append(make("b", {textContent: inWords(metric, value)}));
      const base = pinned?.summary[metric.key];
      if (base && value !== undefined && at < runs.length) row.append(" ", difference(metric, value, base));
      if (metric.bound !== null && value !== undefined) {
        const kept = metric.least ? value >= metric.bound : value <= metric.bound;
        row.append(" ", make("span", {className: kept ? "better" : "worse", textContent: kept ? "kept" : "missed"}));
      }
      return row;
    });
    const limit = metric.bound === null ? "" : make("small",
      {textContent: `${metric.least ? "at least" : "at most"} ${inWords(metric, metric.bound)}`});
    return make("div", {className: "tile"}, make("p", {className: "name", textContent: title(metric)}), limit, ...rows);
  }));
  byId("runs").innerHTML = "";
  all.forEach((run, at) => byId("runs").append(make("span", {innerHTML: mark(at)}, ` ${run.called}`)));
}

function difference(metric, value, base) {
  const share = 100 * (value / base - 1);
  const same = Math.abs(share) < 0.05, good = metric.best && (share > 0) === (metric.best === "high");
  return make("span", {
    className: same || !metric.best ? "" : good ? "better" : "worse",
    textContent: same ? "=" : `${share > 0 ? "\u25b2+" : "\u25bc\u2212"}${+Math.abs(share).toPrecision(2)} %`,
    title: `against ${inWords(metric, base)}`,
  });
}

function drawTimelines(all) {
  view.shown = [];
  view.whole = Math.max(...all.flatMap(run => run.timelines.map(([, data]) => data.until_s)), 1e-3);
  const places = [], made = [];
  all.forEach(run => run.timelines.forEach(([name, data]) => {
    const called = run.timelines.length > 1 ? `${run.called} (${name})` : run.called;
    const place = make("div", {className: "timeline"});
    places.push(make("div", {}, make("p", {className: "head"}, make("b", {textContent: called})), place));
    made.push([place, data]);
  }));
  byId("timelines").replaceChildren(...places);
  const drawn = made.map(([place, data]) => timeline(place, data, view));
  if (!drawn.length) return;
  if (!seen) {
    const {at} = drawn[0].run.stages[0], count = Math.max(drawn[0].run.prefill.length, 1);
    drawn[0].near(Math.min(50 / count, 1) * (at.at(-1) - at[0]));
  } else view.show(view.from, view.to);
  if (all.every(run => run.requests === run.of)) seen = true;
}

// The figures of several runs in one: each run's lines in a colour and dashes of its own.
function merged(all, name) {
  const found = all.map(run => run.figures.find(each => each[0] === name)).map(each => each?.[1]);
  const first = found.find(Boolean);
  if (!first) return null;
  const layout = structuredClone(first.layout), bars = name === "causes";
  const data = found.flatMap((figure, at) => (figure?.data || []).map(trace => {
    const copy = structuredClone(trace);
    if (bars) copy.y = copy.y.map(each => each.replace(all[at].label, all[at].called));
    else {
      copy.line = {...copy.line, color: colour(at), dash: page.dashes[at % page.dashes.length].replace(/^0$/, "solid")};
      if (copy.fillcolor) copy.fillcolor = colour(at) + "26";
      copy.hovertemplate = copy.hovertemplate?.replace(/<extra>.*/, `<extra>${all[at].called}</extra>`);
    }
    return copy;
  }));
  if (bars) layout.height = 90 + 34 * new Set(data.flatMap(trace => trace.y)).size;
  else if (layout.xaxis) {
    delete layout.xaxis.range;
    const logs = found.some(figure => figure?.layout.xaxis?.type === "log");
    if (logs) Object.assign(layout.xaxis, found.find(figure => figure?.layout.xaxis?.type === "log").layout.xaxis);
  }
  return {data, layout};
}

function plot(id, figure) {
  const place = byId(id);
  place.parentElement.hidden = !figure;
  if (figure) Plotly.react(place, figure.data, {...figure.layout, template: template()}, config);
}

function drawFigures(all) {
  for (const place of document.querySelectorAll("[data-figure]")) {
    const name = place.dataset.figure;
    if (!name.startsWith("tokens")) plot(place.id, merged(all, name));
  }
  drawTokens(all);
}

function drawTokens(all) {
  const rows = all.flatMap(run => run.figures.filter(([name]) => name.startsWith("tokens")).map(each => [run, each]));
  const tops = steady => Math.max(...rows.filter(([, [name]]) => name.endsWith("steady") === steady)
    .map(([, [, figure]]) => figure.layout.yaxis.range[1]), 1);
  // All places first: a picture is as wide as its place when it is drawn.
  for (let at = byId("tokens").children.length; at < rows.length; at++)
    byId("tokens").append(make("div", {}, make("p", {className: "head"}), make("div", {id: `tokens-of-${at}`})));
  for (const place of [...byId("tokens").children].slice(rows.length)) place.remove();
  rows.forEach(([run, [name, figure]], at) => {
    const steady = name.endsWith("steady"), id = `tokens-of-${at}`;
    byId(id).previousSibling.textContent = steady ? "\u00a0" : run.called;
    const layout = {...figure.layout, yaxis: {...figure.layout.yaxis, range: [0, tops(steady)]}};
    plot(id, {data: figure.data, layout});
  });
}

// -- a slider's sweep ---------------------------------------------------------------------------

async function sweep(control) {
  swept?.stop.abort();
  const mine = swept = {stop: new AbortController(), control, points: []};
  const shares = Array.from({length: SWEPT}, (_, at) => at / (SWEPT - 1));
  const values = [...new Set(shares.map(share => valueAt(control, share)))];
  byId("swept").hidden = false;
  byId("swept-told").textContent = `${control.key}: simulating ${values.length} values, three seeds each ...`;
  drawSweep();
  byId("swept").scrollIntoView({block: "nearest"});
  try {
    const body = {question: state, key: control.key, values};
    for await (const message of messages("/sweep", body, mine.stop.signal)) {
      if (mine !== swept) return;
      if (message.error) byId("swept-told").textContent = message.error;
      if (message.point) { mine.points.push(message.point); drawSweep(); }
    }
    byId("swept-told").textContent = `${control.key}: mean and 95 % interval of three seeds; the line is where the slider is.`;
  } catch (error) {
    if (error.name !== "AbortError") byId("swept-told").textContent = "the server does not answer";
  }
}

function drawSweep() {
  const metric = page.metrics[byId("swept-metric").selectedIndex], {control, points} = swept;
  const scale = metric.key.endsWith("_share") ? 100 : 1;
  const known = points.filter(point => point.metrics[metric.key]).sort((a, b) => a.value - b.value);
  const [means, halves] = [0, 1].map(at => known.map(point => scale * point.metrics[metric.key][at]));
  const data = [{
    type: "scatter", mode: "lines+markers", x: known.map(point => point.value), y: means,
    error_y: {type: "data", array: halves, thickness: 1.2, width: 3}, line: {color: colour(0), width: 2},
  }];
  const at = {type: "line", x0: control.value, x1: control.value, yref: "paper", y0: 0, y1: 1,
    line: {color: "#7B8794", dash: "dash", width: 1.5}};
  const layout = {height: 280, margin: {l: 72, r: 12, t: 12, b: 46}, showlegend: false,
    shapes: control.value === null ? [] : [at],
    xaxis: {title: {text: control.key}, type: control.log ? "log" : "linear"},
    yaxis: {title: {text: metric.words.replace(/^stages busy$/, "stages busy (%)")}, rangemode: "tozero", automargin: true}};
  plot("swept-figure", {data, layout});
}

// -- out of the page ----------------------------------------------------------------------------

const coded = data => btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(data))));
function decoded(text) {
  try {
    return JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(text), c => c.charCodeAt(0))));
  } catch {
    return {...state};  // it is no link of ours
  }
}
const remember = () => history.replaceState(null, "", `#${coded({...state, pinned: pinned?.state})}`);

async function copy(text, button) {
  const words = button.textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
  catch { byId("status").textContent = text; }
  setTimeout(() => button.textContent = words, 1200);
}

function pin() {
  pinned = pinned || !runs[0] ? null : {...runs[0], state: {...state}, told};
  byId("pin").textContent = pinned ? "unpin" : "pin A";
  byId("pin").ariaPressed = String(Boolean(pinned));
  if (live) remember();
  draw1();
}

const blobOf = (content, type) => new Blob([content], {type});
const does = {
  pin,
  copy: () => copy(told.command, byId("copy")),
  link: () => copy(location.href, byId("link")),
  yaml: () => save("RUN", "yaml", blobOf(state.text, "application/yaml")),
  data: () => save("explore", "json", blobOf(JSON.stringify({...state, command: told.command, runs}), "application/json")),
};

// -- a page without a server --------------------------------------------------------------------

let chosen = {};
function pick(key, value) {
  chosen[key] = value;
  const at = page.axes.map(axis => axis.values.indexOf(chosen[axis.key]));
  const point = page.told[at.join()];
  const axes = page.axes.map(axis => ({...axis, value: chosen[axis.key], low: 0, high: 1}));
  told = {...point, schedulers: [axes], controls: []};
  state = {text: point.text, others: []};
  byId("text").value = point.text;
  byId("command").textContent = point.command;
  runs = point.runs;
  drawControls([["Settings that were simulated", axes]]);
  byId("status").textContent = inAll();
  byId("error").textContent = point.error || "";
  draw1();
  document.body.dataset.state = "done";
}

async function unpack() {
  const bytes = Uint8Array.from(atob(page.points), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  page.told = await new Response(stream).json();
  chosen = Object.fromEntries(page.axes.map(axis => [axis.key, axis.value]));
  pick(page.axes[0].key, page.axes[0].value);
}

addEventListener("DOMContentLoaded", async () => {
  for (const [id, call] of Object.entries(does)) if (byId(id)) byId(id).onclick = call;
  byId("swept-metric").replaceChildren(...page.metrics.map(each => make("option", {textContent: title(each)})));
  byId("swept-metric").onchange = drawSweep;
  for (const box of document.querySelectorAll("[data-figure]"))
    for (const kind of ["SVG", "PNG"]) {
      const button = make("button", {textContent: kind, ariaLabel: `${kind} of ${box.dataset.words}`});
      button.onclick = () => Plotly.downloadImage(box, {format: kind.toLowerCase(), filename: box.dataset.figure});
      box.nextElementSibling.append(button);
    }
  if (!live) return unpack();
  byId("text").oninput = () => { state.text = byId("text").value; soon(() => ask(), TYPE_MS); };
  const kept = location.hash.length > 1 ? decoded(location.hash.slice(1)) : {...state};
  const {pinned: held, ...now} = kept;
  if (held) { state = held; await ask(); pin(); }
  state = now;
  byId("text").value = state.text;
  return ask();
});
