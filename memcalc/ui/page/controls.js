// The controls ⇄ the query of an address, in the words of the command line.

const form = document.getElementById("controls");
const model = document.getElementById("model");
const more = document.getElementById("more");
const configText = document.getElementById("config-text");
const configFile = document.getElementById("config-file");
const USUAL = "model=gpt2&batch-size=8&precision=amp-bf16&gpu=a100-80gb";
const CONFIG = "@config", SIZE = "@size";

let configName = "my-model", aliases = {};
/** The control that a person changed last: where an error is shown that names no other. */
let last = null;

const controls = () => [...form.querySelectorAll("[data-option]")];
const control = (option) => form.querySelector(`[data-option="${CSS.escape(option)}"]`);

/** Fill the lists from /api/catalog. */
export function fill(catalog) {
  aliases = Object.assign({}, ...Object.values(catalog.aliases));
  const groups = new Map();
  for (const row of catalog.models) {
    if (!groups.has(row.summary)) groups.set(row.summary, []);
    groups.get(row.summary).push(new Option(row.name, row.name));
  }
  const own = [new Option("a config.json of mine", CONFIG), new Option("known by its size alone", SIZE)];
  for (const [label, options] of [["Another", own], ...groups]) {
    const group = document.createElement("optgroup");
    group.label = label;
    group.append(...options);
    model.append(group);
  }
  model.value = "gpt2";
  choices("gpu", catalog.gpus, "none: any", (row) => `${row.name} (${row.summary})`);
  choices("strategy", catalog.strategies, "usual: ddp on several GPUs");
  choices("precision", catalog.precisions, "usual: fp32");
  choices("optimizer", catalog.optimizers, "usual: adamw");
  choices("offload-optimizer", catalog.places);
  choices("offload-parameters", catalog.places);
}

function choices(id, rows, unsaid, label = (row) => row.name) {
  const list = document.getElementById(id);
  if (unsaid) list.append(new Option(unsaid, ""));
  for (const row of rows) {
    const option = new Option(label(row), row.name);
    option.dataset.summary = row.summary;
    list.append(option);
  }
}

/** What the controls say: `query`, and `config` where the model is a config.json. */
export function read() {
  const pairs = [];
  for (const each of controls()) {
    if (each === model && [CONFIG, SIZE].includes(model.value)) continue;
    if (each.closest("[hidden]") || each.value === "" || each.value === each.dataset.usual) continue;
    pairs.push([each.dataset.option, each.value]);
  }
  const config = model.value === CONFIG ? { name: configName, text: configText.value } : null;
  return { pairs: [...pairs, ...others(more.value)], config };
}

/** `--name value --flag` as pairs; a flag has an empty value. */
function others(text) {
  const pairs = [];
  for (const word of text.split(/\s+/).filter(Boolean)) {
    if (word.startsWith("--")) {
      const [, name, value] = word.match(/^--([^=]*)=?(.*)$/s);
      pairs.push([name, value]);
    } else if (pairs.length && pairs.at(-1)[1] === "") pairs.at(-1)[1] = word;
    else pairs.push([word, ""]);
  }
  return pairs;
}

/** The other options without one that a control says now. */
const without = (option, text) => others(text).filter(([name]) => name !== option)
  .map(([name, value]) => (value === "" ? `--${name}` : `--${name} ${value}`)).join(" ");

export const encode = (pairs) => pairs.map((pair) => pair.map(encodeURIComponent).join("=")).join("&");

/** Set the controls to what a query and a fragment say. */
export function write(query, fragment = "") {
  const said = new URLSearchParams(query || USUAL);
  const own = new URLSearchParams(fragment.replace(/^#/, ""));
  for (const each of controls()) if (each !== model) each.value = each.dataset.usual ?? "";
  if (own.has("config")) {
    configText.value = own.get("config");
    configName = own.get("name") || "my-model";
    model.value = CONFIG;
  } else if (!said.has("model")) model.value = said.has("params") ? SIZE : model.value;
  const rest = [];
  for (const [name, given] of said) {
    const found = control(name), value = found?.tagName === "SELECT" ? aliases[given.toLowerCase()] ?? given : given;
    if (found) found.value = value;
    // What a list does not have, or is no number, stands among the other options, and is refused there.
    if (found?.value !== value) {
      if (found) found.value = found === model ? "" : found.dataset.usual ?? "";
      rest.push(value === "" ? `--${name}` : `--${name} ${value}`);
    }
  }
  more.value = rest.join(" ");
  refresh();
}

/** Leaves the model as it is: for a plan that was recommended for it. */
export function take(query) {
  const { config } = read();
  write(query, config ? fragmentOf(config) : "");
}

export const fragmentOf = (config) => (config ? `#${encode([["name", config.name], ["config", config.text]])}` : "");

/** Show the fields that apply, and each slider where its number is. */
export function refresh(about) {
  document.getElementById("config-field").hidden = model.value !== CONFIG;
  document.getElementById("size-field").hidden = model.value !== SIZE;
  const tokens = document.getElementById("tokens");
  if (about) {
    document.getElementById("tokens-field").hidden = about.reads !== "tokens";
    const range = document.getElementById("tokens-range");
    range.max = about.context || 1;
    range.step = about.context >= 1024 ? 64 : 1;
    range.min = range.step;
    tokens.placeholder = about.context || "";
    if (tokens.value === "") range.value = about.context;
  }
  for (const range of form.querySelectorAll("[data-for]")) {
    const number = document.getElementById(range.dataset.for);
    range.value = number.value || number.placeholder || range.min;
    range.setAttribute("aria-valuetext", number.value || number.placeholder || range.value);
  }
  for (const id of ["strategy", "precision"]) {
    const list = document.getElementById(id);
    document.getElementById(`${id}-hint`).textContent = list.selectedOptions[0]?.dataset.summary ?? "";
  }
  if (about && document.getElementById("precision").value === "") document.getElementById("precision-hint").textContent = about.unsaid;
}

/** Calls `changed` whenever a person moves a control. */
export function listen(changed) {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", async (event) => {
    const moved = event.target;
    last = moved;
    if (moved.dataset.for) document.getElementById(moved.dataset.for).value = moved.value;
    if (moved.dataset.for) last = document.getElementById(moved.dataset.for);
    if (moved === model) document.getElementById("tokens").value = "";
    if (last.dataset.option) more.value = without(last.dataset.option, more.value);
    if (moved === configFile && moved.files.length) {
      configName = moved.files[0].name.replace(/\.json$/, "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "");
      configName = configName.slice(0, 60) || "my-model";
      if (configName === "config") configName = "my-model";
      configText.value = await moved.files[0].text();
    }
    refresh();
    changed();
  });
}

/** Put a message beside the control of one of `options`, or beside the other options where one of it stands there, or
 * beside the control that was changed last; null takes it away. False where there is no such control. */
export function blame(message, options = []) {
  for (const old of form.querySelectorAll(".field > .error")) old.remove();
  for (const old of form.querySelectorAll("[aria-invalid]")) {
    old.removeAttribute("aria-invalid");
    old.removeAttribute("aria-describedby");
  }
  if (message === null) return true;
  const there = (found) => found && !found.closest("[hidden]");
  const others_ = others(more.value).some(([name]) => options.includes(name)) ? more : null;
  const target = [...options.map(control), others_, last].find(there);
  const field = target?.closest(".field:not([hidden])");
  if (!field) return false;
  const line = document.createElement("p");
  line.className = "error";
  line.id = "control-error";
  line.setAttribute("role", "alert");
  line.textContent = message;
  field.append(line);
  target.setAttribute("aria-invalid", "true");
  target.setAttribute("aria-describedby", line.id);
  return true;
}
