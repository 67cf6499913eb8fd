// What an answer looks like. All text goes in as text, never as HTML.

const $ = (id) => document.getElementById(id);
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
// A card that holds more than so many times the plan is named, and not drawn to scale.
const NEAR = 20, NEAR_STEP = 4;
let shown = null;

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

/** Bytes as memcalc writes them: three decimals of the largest decimal unit. */
export function bytes(size) {
  let unit = 0, factor = 1;
  // The unit is chosen after rounding: 999,999,999 B are 1 GB.
  while (unit < UNITS.length - 1 && Number((size / factor).toFixed(3)) >= 1000) { factor *= 1000; unit += 1; }
  return `${Number((size / factor).toFixed(3))} ${UNITS[unit]}`;
}

export function draw(answer, order) {
  shown = answer;
  const { estimate, said, verdict, model } = answer;
  $("verdict").dataset.state = verdict.state;
  $("verdict-text").textContent = verdict.text;
  const same = model.name === `${model.parameters} parameters`;
  $("model-text").textContent = `${model.name}${same ? "" : `: ${model.trained ? `${model.trained} of ` : ""}${model.parameters} parameters${model.trained ? " trained" : ""}`}, ` +
    `${estimate.plan.precision}, ${estimate.plan.optimizer} (${estimate.plan.optimizer_kind}), ` +
    `${estimate.plan.strategy} on ${estimate.plan.ranks} rank${estimate.plan.ranks > 1 ? "s" : ""}`;
  $("peak-text").textContent = `peak ${said.peak} in ${estimate.allocated.moment}` +
    (said.capacity ? `; torch can use ${said.capacity}` : "");
  const meters = [
    ["Allocated by torch", said.peak],
    ["Reserved by torch", said.reserved],
    ["Shown by nvidia-smi", said.device],
    ["Host, counted buffers", said.host],
  ];
  $("meters").replaceChildren(...meters.map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
  bars(answer, order);
  parts(answer, order);
  timeline(answer, order);
  $("command").textContent = answer.command;
  $("assumptions").replaceChildren(...estimate.assumptions.map((line) => element("li", { textContent: line })));
}

function bars({ estimate, bars, capacity }, order) {
  const high = estimate.device.high_bytes;
  const near = capacity && capacity <= NEAR * high;
  const top = Math.max(high, near ? capacity : 0, ...bars.map((bar) => total(bar.bytes))) * 1.02;
  const peak = estimate.allocated;
  const rows = [
    bar("at the peak", peak.by_category, order, top, capacity, high - peak.peak_bytes),
    ...bars.map((each) => bar(each.moment, each.bytes, order, top, capacity, 0)),
  ];
  rows[0].classList.add("first");
  const limit = !capacity ? "" : near ? `; the dashed line is what torch can use, ${bytes(capacity)}`
    : `; torch can use ${bytes(capacity)}, far to the right of this figure`;
  const note = `hatched: what the allocator keeps beside it and the CUDA context, at most${limit}`;
  $("bars").replaceChildren(...rows, element("p", { className: "scale", textContent: note }));
}

const total = (held) => Object.values(held).reduce((sum, size) => sum + size, 0);

function bar(name, held, order, top, capacity, beside) {
  const track = element("div", { className: "track" });
  let left = 0;
  const add = (kind, size, title) => {
    const part = element("div", { className: `part ${kind}`, title });
    part.style.left = `${(100 * left) / top}%`;
    part.style.width = `${(100 * size) / top}%`;
    left += size;
    track.append(part);
  };
  for (const category of order) if (held[category]) add(category, held[category], `${category} ${bytes(held[category])}`);
  const said = bytes(left);
  if (beside > 0) add("beside", beside, `allocator and context, at most ${bytes(beside)}`);
  if (capacity && capacity <= top) {
    const limit = element("div", { className: "limit" });
    limit.style.left = `${(100 * capacity) / top}%`;
    track.append(limit);
  }
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${name}: ${said}`);
  return element("div", { className: "bar" }, element("span", { textContent: name }), track);
}

/** Every category that the figures show, also one of which nothing is there at the peak. */
function parts({ estimate, bars, figure }, order) {
  const { by_category: held, peak_bytes: peak } = estimate.allocated;
  const row = (name, size, kind) => element("tr", {},
    element("th", { scope: "row" }, element("span", { className: `swatch ${kind}` }), name),
    element("td", { textContent: bytes(size) }),
    element("td", { textContent: kind === "beside" ? "" : `${((100 * size) / peak).toFixed(1)} %` }));
  const drawn = (name) => held[name] || figure.held[name] || bars.some((each) => each.bytes[name]);
  const rows = [...order].reverse().filter(drawn).map((name) => row(name, held[name] ?? 0, name));
  const beside = estimate.device.high_bytes - peak;
  if (beside > 0) rows.push(row("allocator and context, at most", beside, "beside"));
  $("parts").tBodies[0].replaceChildren(...rows);
}

const svg = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

function timeline({ figure, capacity }, order) {
  const columns = figure.names.length, names = order.filter((name) => figure.held[name]);
  const totals = Array.from({ length: columns }, (_, i) => names.reduce((sum, name) => sum + figure.held[name][i], 0));
  const most = Math.max(...totals, 1);
  const top = 1.04 * (capacity && capacity <= NEAR_STEP * most ? Math.max(capacity, most) : most);
  const y = (size) => (100 - (100 * size) / top).toFixed(3);
  const picture = svg("svg", { viewBox: `0 0 ${columns} 100`, preserveAspectRatio: "none", role: "img", "aria-label": figure.text });
  const below = new Array(columns).fill(0);
  for (const name of names) {
    const up = [], down = [];
    for (let i = 0; i < columns; i += 1) {
      down.unshift(`${i + 1},${y(below[i])} ${i},${y(below[i])}`);
      below[i] += figure.held[name][i];
      up.push(`${i},${y(below[i])} ${i + 1},${y(below[i])}`);
    }
    picture.append(svg("path", { class: name, d: `M${up.join(" ")} ${down.join(" ")}Z` }));
  }
  const upright = (x, kind) => svg("line", { x1: x, x2: x, y1: 0, y2: 100, class: kind });
  for (const phase of figure.phases.slice(1)) picture.append(upright(phase.left * columns, "edge"));
  if (capacity && capacity <= top) picture.append(svg("line", { x1: 0, x2: columns, y1: y(capacity), y2: y(capacity), class: "limit-line" }));
  picture.append(upright(figure.peak + 0.5, "peak"), upright(0, "cursor"));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    look(Math.floor(((event.clientX - box.left) / box.width) * columns));
  });
  $("timeline").replaceChildren(picture);
  $("phases").replaceChildren(...figure.phases.map((phase) => {
    const label = element("span", { textContent: phase.moment });
    label.style.left = `${100 * phase.left}%`;
    label.style.width = `${100 * (phase.right - phase.left)}%`;
    return label;
  }));
  fit();
  $("cursor").max = columns - 1;
  look(figure.peak);
}

/** Leave out the names of moments that are wider than their place: cut off, they run into one another. */
function fit() {
  for (const label of $("phases").children) {
    label.style.visibility = "";
    if (label.scrollWidth > label.clientWidth) label.style.visibility = "hidden";
  }
}
addEventListener("resize", fit);

/** Say what is alive in one column of the timeline. */
export function look(column) {
  if (!shown) return;
  const { figure } = shown;
  const at = Math.max(0, Math.min(figure.names.length - 1, column));
  const held = Object.entries(figure.held).map(([name, sizes]) => [name, sizes[at]]).filter(([, size]) => size);
  const sum = held.reduce((all, [, size]) => all + size, 0);
  const split = held.sort((a, b) => b[1] - a[1]).map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  const peak = at === figure.peak ? ", the peak" : "";
  $("readout").textContent = `${figure.moments[at]}${peak}: ${bytes(sum)} in use, after ${figure.names[at]}. ${split}`;
  $("cursor").value = at;
  $("cursor").setAttribute("aria-valuetext", `${figure.moments[at]}${peak}, ${bytes(sum)}`);
  const line = document.querySelector("#timeline .cursor");
  line?.setAttribute("x1", at + 0.5);
  line?.setAttribute("x2", at + 0.5);
}

/** A range of seconds as the command line writes it: three digits; none are known of cores that were not measured. */
const seconds = (low, high) => {
  if (low === null) return "–";
  const [factor, unit] = high < 1 ? [1000, "ms"] : [1, "s"];
  return `${[low, high].map((each) => Number((each * factor).toPrecision(3))).join(" to ")} ${unit}`;
};

/** The recommended plans; `take` is called with the query of the one a person takes. */
export function plans(answer, take) {
  const table = $("choices");
  table.hidden = !answer.plans.length;
  $("choices-said").textContent = answer.said;
  $("choices-command").textContent = answer.command;
  const every = ({ checkpoint_every: blocks, checkpointing }) => (blocks && checkpointing.policy !== "recompute-all" ? "selective"
    : blocks < 2 ? ["none", "full"][blocks] : `every-${blocks}`);
  table.tBodies[0].replaceChildren(...answer.plans.flatMap((row) => {
    const { plan } = row;
    const button = element("button", { type: "button", textContent: "Take" });
    const times = plan.accumulation > 1 ? ` × ${plan.accumulation}` : "";
    const name = `${plan.strategy}, ${plan.precision}`;
    button.setAttribute("aria-label", `Take ${name}, micro batch ${plan.micro_batch}`);
    button.addEventListener("click", () => take(row.query));
    const rate = row.tokens_per_second === null ? "–" : Math.round(row.tokens_per_second).toLocaleString("en");
    const cells = [name, `${plan.micro_batch}${times}`, every(plan), row.peak, row.headroom,
      seconds(row.seconds_per_step_low, row.seconds_per_step_high), rate, row.relative_speed.toFixed(2)];
    return [
      element("tr", { className: "numbers" }, ...cells.map((text) => element("td", { textContent: text })), element("td", {}, button)),
      element("tr", { className: "why" }, element("td", { colSpan: cells.length + 1 }, element("p", { textContent: row.why }))),
    ];
  }));
}
