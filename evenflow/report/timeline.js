// A pipeline's timeline: a row a stage, a block a micro-batch, a slim bar idle time by its cause.
const look = LOOK, timelines = [];
const ROW = 30, LEFT = 62, AXIS = 24, LEAST_S = 2e-5;

const numbers = (text, Kind) => new Kind(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
const hex = (colour, at) => parseInt(colour.slice(1 + 2 * at, 3 + 2 * at), 16);
const blend = share => "#" + [0, 1, 2].map(at => Math.round(hex(look.decode, at)
  + share * (hex(look.prefill, at) - hex(look.decode, at))).toString(16).padStart(2, "0")).join("");
const blends = Array.from({length: 11}, (_, at) => blend(at / 10));

// The last place of a sorted array whose value is not above x; 0 where all are.
function placeOf(sorted, x) {
  let low = 0, high = sorted.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// The arrays of `timeline_data` as they are drawn: a stage's pieces, from at[i] to at[i + 1].
function unpacked(data) {
  const run = {...data, shares: data.bins && numbers(data.shares, Uint8Array)};
  for (const name of ["prefill", "decode", "used"]) run[name] = numbers(data[name], Uint32Array);
  if (data.prompt_counts) {
    let next = 0;
    const ids = numbers(data.prompt_ids, Uint32Array);
    run.prompts = Array.from(numbers(data.prompt_counts, Uint32Array),
      count => ids.subarray(next, next += count));
  }
  run.mix = Array.from(run.prefill, (tokens, b) => tokens / Math.max(tokens + run.decode[b], 1));
  run.stages = data.stages.map(stage => {
    const lengths = numbers(stage.lengths, Uint32Array), kind = numbers(stage.kinds, Uint8Array);
    const at = new Float64Array(kind.length + 1), batch = new Uint32Array(kind.length);
    at[0] = stage.from_s;
    for (let i = 0, b = 0; i < kind.length; i++) {
      at[i + 1] = at[i] + lengths[i] * 1e-6;
      batch[i] = b;  // of idle time, the micro-batch that comes next
      if (!kind[i]) b++;
    }
    return {at, kind, batch};
  });
  return run;
}

// What draws rectangles and words: on a canvas, or as the elements of an SVG.
function canvasPen(context, text) {
  return {
    rect(x, y, width, height, colour) {
      context.fillStyle = colour;
      context.fillRect(x, y, width, height);
    },
    words(x, y, words, anchor) {
      context.fillStyle = text;
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.fillText(words, x, y);
    },
  };
}
function svgPen(parts, text) {
  const two = value => +value.toFixed(2);
  return {
    rect: (x, y, width, height, colour) => parts.push(`<rect x="${two(x)}" y="${two(y)}" `
      + `width="${two(width)}" height="${two(height)}" fill="${colour}"/>`),
    words: (x, y, words, anchor) => parts.push(
      `<text x="${two(x)}" y="${two(y)}" text-anchor="${anchor}" fill="${text}">${words}</text>`),
  };
}

// Draw the seconds [from, to] of a run, `width` pixels wide.
function drawStages(pen, run, width, from, to, lane) {
  const scale = (width - LEFT - 8) / (to - from), right = width - 8;
  const x = s => Math.min(Math.max(LEFT + (s - from) * scale, LEFT), right);
  const idle = (a, b, y, kind) => pen.rect(a, y + 9, b - a, 8, look.parts[kind][1]);
  const stacked = (column, wide, y, sums, total, busy) => {
    let top = y + 26;
    for (let kind = sums.length - 1; kind >= 0; kind--) {
      const high = 26 * sums[kind] / total;
      if (high > 0.01) pen.rect(column, top -= high, wide, high, kind ? look.parts[kind][1] : busy);
    }
  };
  run.stages.forEach(({at, kind, batch}, stage) => {
    const y = stage * ROW + 2, count = look.parts.length;
    pen.rect(LEFT, y, right - LEFT, 26, lane);
    pen.words(LEFT - 8, y + 17, `stage ${stage}`, "end");
    const step = run.until_s / (run.bins || 1);
    for (let bin = Math.max(0, Math.floor(from / step)); bin < (run.bins || 0); bin++) {
      const [a, b] = [x(bin * step), x((bin + 1) * step)];
      if (bin * step > to) break;
      const shares = run.shares.subarray((stage * run.bins + bin) * count, (stage * run.bins + bin + 1) * count);
      if (b > a) stacked(a, b - a, y, shares, 250, look.parts[0][1]);
    }
    if (run.bins && at.at(-1) > from && at[0] < to)
      pen.rect(x(at[0]), y, x(at.at(-1)) - x(at[0]), 26, lane);
    const sums = new Float64Array(count);
    let column = -1, total = 0, mixed = 0;
    const flush = () => {
      if (total) stacked(column, 1, y, sums, total, blends[Math.round(10 * mixed / sums[0]) || 0]);
      sums.fill(0);
      total = mixed = 0;
    };
    for (let i = placeOf(at, from); i < kind.length && at[i] < to; i++) {
      const a = x(at[i]), b = x(at[i + 1]), mix = kind[i] ? 0 : run.mix[batch[i]];
      if (b - a >= 1) {
        flush();
        if (kind[i]) idle(a, b, y, kind[i]);
        else pen.rect(a, y, b - a - (b - a > 3), 26, blends[Math.round(10 * mix)]);
      } else if (b > a) {
        if (Math.floor(a) !== column) flush();
        column = Math.floor(a);
        sums[kind[i]] += b - a;
        total += b - a;
        mixed += mix * (b - a);
      }
    }
    flush();
  });
  const raw = (to - from) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(each => each * power >= raw);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const bottom = run.stages.length * ROW + 2;
  for (let s = Math.ceil(from / step) * step; s <= to; s += step) {
    pen.rect(x(s), bottom, 1, 4, "#7B8794");
    if (x(s) < right - 24) pen.words(x(s), bottom + 17, `${s.toFixed(digits)} s`, "middle");
  }
}

// Say what is at piece i of a stage.
function pieceInWords(run, stage, i) {
  const {at, kind, batch} = run.stages[stage];
  const ms = (at[i + 1] - at[i]) * 1e3, long = `${+ms.toPrecision(3)} ms`;
  const b = batch[i], number = run.first + b;
  const why = each => `${look.parts[each][0]} (${look.parts[each][2]})`;
  if (kind[i]) return `stage ${stage} idle ${long}: ${why(kind[i])}; micro-batch ${number} is next`;
  const prompts = run.prompts ? Array.from(run.prompts[b]) : [];
  const whose = prompts.length ? ` of request${prompts.length > 1 ? "s" : ""} `
    + prompts.slice(0, 6).join(", ") + (prompts.length > 6 ? ", ..." : "") : "";
  const next = kind[i + 1] ? `; then the stage waits ${+((at[i + 2] - at[i + 1]) * 1e3).toPrecision(3)}`
    + ` ms: ${why(kind[i + 1])}` : "";
  const used = run.used[b].toLocaleString("en"), pages = run.pages.toLocaleString("en");
  return `micro-batch ${number} on stage ${stage}, ${long}: ${run.prefill[b]} prompt tokens${whose}, `
    + `${run.decode[b]} decodes; ${used} of ${pages} KV pages in use${next}`;
}

// The part of the runs that several timelines show together.
function sharedView() {
  const view = {from: 0, to: 1, whole: 1, shown: []};
  view.show = (from, to) => {
    const span = Math.min(Math.max(to - from, LEAST_S), view.whole);
    view.from = Math.min(Math.max(from, 0), view.whole - span);
    view.to = view.from + span;
    view.shown.forEach(draw => draw());
  };
  view.zoom = (factor, at = (view.from + view.to) / 2) =>
    view.show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  view.pan = share => view.show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  return view;
}

function save(name, kind, content) {
  const link = document.createElement("a");
  link.href = content instanceof Blob ? URL.createObjectURL(content) : content;
  link.download = `${name}.${kind}`;
  link.click();
}

// Draw a timeline in an element, with buttons, keys and words on what is under the pointer.
function timeline(place, data, view = sharedView()) {
  const run = unpacked(data), height = run.stages.length * ROW + AXIS + 4;
  place.innerHTML = `<canvas tabindex="0" role="img" aria-label="What ${run.stages.length} stages do `
    + `over time. Arrow keys move and choose a stage, plus and minus zoom, n and p go from piece to `
    + `piece, 0 shows the whole run."></canvas><p class="tools"><button>+</button><button>&minus;</button>`
    + `<button>whole run</button><button>SVG</button><button>PNG</button> `
    + `<output aria-live="polite">Drag to move, Ctrl + wheel to zoom, hover for what is in it.</output></p>`;
  const canvas = place.firstChild, told = place.querySelector("output");
  const chosen = {stage: 0, piece: -1};
  const colours = () => {
    const style = getComputedStyle(place);
    return [style.color, style.getPropertyValue("--lane").trim() || "#F3F6F9"];
  };
  const draw = () => {
    const ratio = devicePixelRatio || 1, width = place.clientWidth, [text, lane] = colours();
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    drawStages(canvasPen(context, text), run, width, view.from, view.to, lane);
    if (chosen.piece < 0) return;
    const {at} = run.stages[chosen.stage], scale = (width - LEFT - 8) / (view.to - view.from);
    context.strokeStyle = text;
    context.lineWidth = 2;
    context.strokeRect(LEFT + (at[chosen.piece] - view.from) * scale, chosen.stage * ROW + 1,
      Math.max((at[chosen.piece + 1] - at[chosen.piece]) * scale, 2), 28);
  };
  const seconds = event => view.from + (view.to - view.from)
    * (event.clientX - canvas.getBoundingClientRect().left - LEFT) / (canvas.clientWidth - LEFT - 8);
  const tell = (stage, i) => {
    const there = i >= 0 && i < run.stages[stage].kind.length;
    if (there) told.textContent = pieceInWords(run, stage, i);
  };
  let grabbed = null;
  canvas.onpointerdown = event => {
    grabbed = {x: event.clientX, from: view.from, to: view.to};
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointerup = canvas.onpointercancel = () => grabbed = null;
  canvas.onpointermove = event => {
    if (grabbed) {
      const moved = (event.clientX - grabbed.x) * (grabbed.to - grabbed.from) / (canvas.clientWidth - LEFT - 8);
      return view.show(grabbed.from - moved, grabbed.to - moved);
    }
    const stage = Math.floor((event.clientY - canvas.getBoundingClientRect().top) / ROW);
    if (run.stages[stage]) tell(stage, placeOf(run.stages[stage].at, seconds(event)));
  };
  canvas.ondblclick = () => view.show(0, view.whole);
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    view.zoom(event.deltaY > 0 ? 1.25 : 0.8, seconds(event));
  }, {passive: false});
  const step = by => {
    const {at} = run.stages[chosen.stage];
    const here = chosen.piece < 0 ? placeOf(at, view.from) : chosen.piece;
    chosen.piece = Math.min(Math.max(here + by, 0), at.length - 2);
    const middle = at[chosen.piece];
    if (middle < view.from || middle > view.to)
      view.show(middle - (view.to - view.from) / 2, middle + (view.to - view.from) / 2);
    tell(chosen.stage, chosen.piece);
    draw();
  };
  const keys = {
    ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2),
    ArrowUp: () => { chosen.stage = Math.max(chosen.stage - 1, 0); chosen.piece = -1; step(0); },
    ArrowDown: () => { chosen.stage = Math.min(chosen.stage + 1, run.stages.length - 1); chosen.piece = -1; step(0); },
    "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2),
    0: () => view.show(0, view.whole), n: () => step(1), p: () => step(-1),
  };
  canvas.onkeydown = event => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  };
  const picture = () => {
    const parts = [], [text, lane] = colours();
    drawStages(svgPen(parts, text), run, place.clientWidth, view.from, view.to, lane);
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${place.clientWidth}" height="${height}" `
      + `font-family="system-ui, sans-serif" font-size="12">${parts.join("")}</svg>`;
  };
  const does = [() => view.zoom(0.5), () => view.zoom(2), () => view.show(0, view.whole),
    () => save("timeline", "svg", new Blob([picture()], {type: "image/svg+xml"})),
    () => canvas.toBlob(blob => save("timeline", "png", blob))];
  place.querySelectorAll("button").forEach((button, at) => button.onclick = does[at]);
  view.shown.push(draw);
  view.whole = Math.max(view.whole, run.until_s);
  const [first] = run.stages, middle = (first.at[0] + first.at.at(-1)) / 2;
  return {run, view, draw, near: span => view.show(middle - span / 2, middle + span / 2)};
}

addEventListener("DOMContentLoaded", () => {
  const view = sharedView();
  view.whole = 0;
  const all = timelines.map(([name, data]) => timeline(document.getElementById(name), data, view));
  if (all.length) all[0].near(all[0].run.stages[0].at.at(-1) - all[0].run.stages[0].at[0]);
  addEventListener("resize", () => view.shown.forEach(draw => draw()));
  dark.addEventListener("change", () => view.shown.forEach(draw => draw()));
});
