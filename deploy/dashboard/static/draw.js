// Elements made of text alone, and the picture of the pipeline. Nothing here reads or writes HTML.

import { count, percent, rate, size, time } from "./words.js";

/** An element. `attributes`: `class`, `title`, `data-…`, handlers as functions; `vars` sets custom properties. Children are elements or text. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "vars") for (const [variable, set] of Object.entries(value)) element.style.setProperty(variable, set);
    else if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const MANY = 6;
const VERY_MANY = 18;
const MOST_TICKS = 14;

/** Everything between the request queue and the last decode worker. */
export function pipeline(now) {
  const all = now.totals;
  // A request that its router keeps back, or has given back for want of a worker, waits as much as one that nobody took.
  const queued = now.queues.reduce((sum, queue) => sum + queue.waiting + queue.held, 0);
  const short = new Set(now.pools.flatMap((pool) => pool.short));
  const intake = h(
    "div",
    { class: "intake" },
    queueNode("Requests", queued, now.queues.map((queue) => [queue.priority_class, queue.waiting + queue.held]), short.has("prefill"), [
      now.durable_jobs ? `${count(now.durable_jobs)} durable jobs` : null,
    ]),
    flow(`${rate(all.requests_per_s)}/s`, all.requests_per_s),
    routerNode(now),
  );
  const pools = now.pools.map((pool) => poolRow(pool, all, now.pools.length > 1));
  const answers = h(
    "div",
    { class: "outlet" },
    flow("", all.output_tokens_per_s),
    h("div", { class: "node" }, h("h3", {}, "Answers"), h("p", { class: "big" }, rate(all.output_tokens_per_s)), h("p", { class: "quiet" }, "tokens/s")),
  );
  return [intake, h("div", { class: "pools" }, pools.length ? pools : h("p", { class: "quiet" }, "No workers.")), answers];
}

function poolRow(pool, all, several) {
  const first = pool.prefill.length + pool.aggregated.length;
  const legs = [];
  if (pool.prefill.length || pool.decode.length) {
    legs.push(
      flow("", all.requests_per_s),
      group("Prefill", "prefill", pool.prefill, pool.short.includes("prefill")),
      flow(pool.decode.length ? `${size(all.moved_bytes_per_s)}/s` : "", all.moved_bytes_per_s, "KV cache through NIXL"),
      queueNode("Handoffs", pool.handoffs_waiting, [["held for a pull", pool.handoffs_held]], pool.short.includes("decode"), []),
      flow("", all.moved_bytes_per_s),
      group("Decode", "decode", pool.decode, pool.short.includes("decode")),
    );
  }
  const whole = pool.aggregated.length
    ? [h("div", { class: "legs alone" }, flow("", all.requests_per_s), group("Prefill + decode", "aggregated", pool.aggregated, first > 0 && pool.short.includes("prefill")))]
    : [];
  return h(
    "div",
    { class: "pool" },
    several && h("h3", {}, pool.model, h("small", {}, ` ${pool.pool}, ${pool.engine}`)),
    legs.length > 0 && h("div", { class: "legs" }, legs),
    whole,
  );
}

function flow(label, amount, title = "") {
  const speed = amount > 0 ? Math.max(0.5, 2.4 - Math.log10(1 + amount) * 0.6) : 0;
  return h("div", { class: "flow", "data-moving": speed > 0, title, vars: { "--speed": `${speed.toFixed(1)}s` } }, h("span", {}, label));
}

function queueNode(title, waiting, parts, hurts, notes) {
  const ticks = Array.from({ length: Math.min(waiting, MOST_TICKS) }, () => h("i"));
  return h(
    "div",
    { class: "node queue", "data-hurts": hurts },
    h("h3", {}, title),
    h("p", { class: "big" }, count(waiting), h("small", {}, waiting === 1 ? " waits" : " wait")),
    h("div", { class: "ticks", "aria-hidden": "true" }, ticks),
    h("dl", {}, parts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, count(value))])),
    notes.filter(Boolean).map((note) => h("p", { class: "quiet" }, note)),
  );
}

function routerNode(now) {
  const held = now.queues.reduce((sum, queue) => sum + queue.held, 0);
  return h(
    "div",
    { class: "node router", "data-hurts": now.routers.length === 0 },
    h("h3", {}, now.routers.length === 1 ? "Router" : "Routers"),
    now.routers.length
      ? now.routers.map((router) => h("p", { class: "name" }, router.name, h("small", {}, router.policy)))
      : h("p", { class: "name" }, "none answers"),
    h("dl", {}, h("dt", { title: "of those that wait: decided on, or kept back until a worker is almost free" }, "in hand"), h("dd", {}, count(held))),
  );
}

function group(title, role, workers, hurts) {
  const density = workers.length > VERY_MANY ? "cells" : workers.length > MANY ? "small" : "cards";
  const waiting = workers.reduce((sum, worker) => sum + worker.waiting, 0);
  const running = workers.reduce((sum, worker) => sum + worker.running, 0);
  return h(
    "div",
    { class: "group", "data-role": role, "data-hurts": hurts },
    h("h3", {}, title, h("small", {}, ` ${workers.length} · ${count(running)} running${role === "decode" ? "" : ` · ${count(waiting)} queued`}`)),
    h("div", { class: density }, workers.map((worker) => (density === "cells" ? cell(worker) : card(worker)))),
    workers.length === 0 && h("p", { class: "quiet" }, "none"),
  );
}

const told = (worker) =>
  `${worker.worker} (${worker.incarnation}): ${worker.state}, ${worker.running} of ${worker.slots} slots, ${worker.waiting} queued, ` +
  `KV blocks ${worker.used_blocks} used, ${worker.held_blocks} held, of ${worker.blocks}` +
  (worker.role === "decode" ? `, ${worker.peers} peers` : `, prefill left ${time(worker.prefill_left_s)}`);

function card(worker) {
  const share = worker.slots ? worker.running / worker.slots : 0;
  const used = worker.blocks ? Math.min(1, worker.used_blocks / worker.blocks) : 0;
  const held = worker.blocks ? Math.min(1 - used, worker.held_blocks / worker.blocks) : 0;
  return h(
    "article",
    { class: "worker", "data-state": worker.state, title: told(worker) },
    h("h4", {}, h("i", { class: "dot" }), worker.worker, worker.state !== "ready" && h("em", {}, worker.state)),
    meter("slots", share, 0, worker.told ? `${worker.running}/${worker.slots}` : "?"),
    meter("KV", used, held, worker.told ? percent(used + held) : "?"),
    worker.waiting > 0 && h("p", { class: "badge" }, `${count(worker.waiting)} queued`),
  );
}

function meter(name, used, held, text) {
  return h(
    "div",
    { class: "meter", "data-full": used + held > 0.92, vars: { "--used": `${(used * 100).toFixed(1)}%`, "--held": `${(held * 100).toFixed(1)}%` } },
    h("span", {}, name),
    h("b", {}, h("i", { class: "used" }), h("i", { class: "held" })),
    h("span", {}, text),
  );
}

function cell(worker) {
  const used = Math.max(worker.slots ? worker.running / worker.slots : 0, worker.blocks ? (worker.used_blocks + worker.held_blocks) / worker.blocks : 0);
  return h("i", { class: "cell", title: told(worker), "data-state": worker.state, "data-queued": worker.waiting > 0, vars: { "--used": Math.min(1, used).toFixed(2) } });
}
