// Asks while a person moves a control: one question at a time, and after it the newest one that has come up meanwhile.

import { blame, encode, fill, fragmentOf, listen, read, refresh, take, write } from "/controls.js";
import { draw, element, look, plans } from "/draw.js";

const $ = (id) => document.getElementById(id);
const REST_MS = 300; // after the last move: the address, what a screen reader says, the recommendation
let order = [];

async function ask(path, { pairs, config }) {
  const query = encode(config ? [["config-name", config.name], ...pairs] : pairs);
  const how = config ? { method: "POST", body: config.text } : {};
  const response = await fetch(`${path}?${query}`, how);
  return [response.ok, await response.json()];
}

/** A function that runs `work`; called while it runs, it runs once more. It promises the end of all that was asked. */
function newest(work) {
  let running = null, again = false;
  const all = async () => {
    do {
      again = false;
      try { await work(); } catch (error) { gone(error); }
    } while (again);
    running = null;
  };
  return () => {
    again = running !== null;
    running ??= all();
    return running;
  };
}

function gone(error) {
  $("general-error").textContent = error instanceof TypeError ? "memcalc ui does not answer; is it still running?" : String(error);
}

const estimate = newest(async () => {
  const started = performance.now();
  const [good, answer] = await ask("/api/picture", read());
  $("general-error").textContent = "";
  $("verdict").classList.toggle("stale", !good);
  if (good) {
    refresh({ ...answer.model, unsaid: answer.unsaid });
    draw(answer, order);
    blame(null);
  } else if (!blame(answer.error, answer.options)) $("general-error").textContent = answer.error;
  document.body.dataset.answered = Number(document.body.dataset.answered ?? 0) + 1;
  document.body.dataset.ms = (performance.now() - started).toFixed(1);
});

// What recommend chooses itself.
const CHOSEN = ["strategy", "batch-size", "checkpointing", "accumulation", "optimizer-kind", "offload-optimizer", "offload-parameters"];
let recommended = null;

const recommend = newest(async () => {
  const { pairs, config } = read();
  const kept = pairs.filter(([name]) => !CHOSEN.includes(name));
  const asked = encode(kept) + (config?.text ?? "");
  if (asked === recommended) return;
  if (!kept.some(([name]) => name === "gpu")) { $("choices-said").textContent = "Choose a GPU."; return; }
  $("choices-said").textContent = "searching …";
  const [good, answer] = await ask("/api/choices", { pairs: kept, config });
  recommended = asked;
  if (good) plans(answer, chosen);
  else { $("choices").hidden = true; $("choices-said").textContent = answer.error; }
});

function chosen(query) {
  take(query);
  changed();
  $("answer").focus();
  $("verdict").scrollIntoView({ block: "nearest" });
}

let resting = 0;
function changed() {
  estimate();
  clearTimeout(resting);
  resting = setTimeout(rested, REST_MS);
}

async function rested() {
  const { pairs, config } = read();
  history.replaceState(null, "", `?${encode(pairs)}${fragmentOf(config)}`);
  await estimate();
  $("live").textContent = document.querySelector("#control-error")?.textContent
    ?? `${$("verdict-text").textContent}, ${$("peak-text").textContent}`;
  recommend();
}

$("cursor").addEventListener("input", (event) => look(Number(event.target.value)));
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("command").textContent);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("command"));
    $("copy").textContent = "Press Ctrl-C";
  }
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
});

const catalog = await (await fetch("/api/catalog")).json();
order = catalog.order;
fill(catalog);
write(location.search.slice(1), location.hash);
listen(changed);
changed();
