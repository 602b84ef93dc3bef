// Asks once a second what is known, and shows it. All that is shown came as JSON from the server of this page.

import { Chart } from "./charts.js";
import { h, pipeline } from "./draw.js";
import { follow, open } from "./request.js";
import { STAGES, clock, count, percent, rate, size, time } from "./words.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 10_000;
const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const last = new Map();
const rows = new Map();
let charts = null;

/** Draws a part of the page anew when it has changed. */
function put(id, value, draw) {
  const text = JSON.stringify(value);
  if (last.get(id) === text) return;
  last.set(id, text);
  byId(id).replaceChildren(...draw(value));
}

function show(now) {
  main.hidden = false;
  state(now.connected ? "good" : "bad", now.connected ? "live" : "broker away");
  byId("summary").textContent = summary(now);
  models(now);
  put("findings", now.findings, findings);
  put("pipeline", [now.queues, now.routers, now.pools, now.durable_jobs, Math.round(now.totals.requests_per_s * 10), now.totals.moved_bytes_per_s], () => pipeline(now));
  put("totals", now.totals, totals);
  put("stage-bars", [now.totals.ttft_stages, now.totals.gap_stages], () => stages(now.totals));
  lines(now.lines);
  table(now.requests);
}

function summary(now) {
  const workers = now.pools.reduce((sum, pool) => sum + pool.prefill.length + pool.decode.length + pool.aggregated.length, 0);
  const names = now.models.length === 1 ? now.models[0] : `${now.models.length} models`;
  return `${names} · ${workers} workers`;
}

function models(now) {
  const choice = byId("model");
  byId("model-choice").hidden = now.models.length < 2;
  const there = new Set([...choice.options].map((option) => option.value));
  for (const model of now.models) if (!there.has(model)) choice.append(h("option", { value: model }, model));
}

function findings(found) {
  return found.map((finding) =>
    h("div", { class: "finding", "data-level": finding.level, "data-about": finding.about }, h("p", {}, finding.text), finding.advice && h("p", { class: "advice" }, finding.advice)),
  );
}

function totals(all) {
  const bad = ["failed", "expired", "cancelled"].filter((name) => all.ended[name]).map((name) => `${count(all.ended[name])} ${name}`);
  const tiles = [
    ["Requests", `${rate(all.requests_per_s)}/s`, bad.length ? bad.join(", ") : `${count(all.ended.finished ?? 0)} finished`],
    ["Time to first token", time(all.ttft.p50_s), `p90 ${time(all.ttft.p90_s)} · p99 ${time(all.ttft.p99_s)}`, "ttft"],
    ["Between tokens", time(all.itl.p50_s), `p90 ${time(all.itl.p90_s)} · p99 ${time(all.itl.p99_s)}`, "itl"],
    ["Output", `${rate(all.output_tokens_per_s)} tok/s`, `prompts ${rate(all.prompt_tokens_per_s)} tok/s`],
    ["From cache", percent(all.reuse_real), `${percent(all.reuse_predicted)} expected`],
    ["KV transfer", `${size(all.moved_bytes_per_s)}/s`, `${size(all.bytes_per_transfer)} in ${time(all.transfer_s)} each`],
  ];
  return tiles.map(([name, value, note, id]) => h("div", { class: "tile", id: id ?? false }, h("h2", {}, name), h("p", { class: "big" }, value), h("p", { class: "quiet" }, note)));
}

function stages(all) {
  return [stack("To the first token", all.ttft_stages, "first"), stack("To the second", all.gap_stages, "gap")];
}

function stack(title, parts, kind) {
  const whole = parts.reduce((sum, part) => sum + part.mean_s, 0);
  return h(
    "div",
    { class: "stack", "data-kind": kind },
    h("p", { class: "title" }, title, h("b", {}, parts.length ? time(whole) : "–")),
    h(
      "div",
      { class: "bar" },
      parts.filter((part) => part.mean_s > 0).map((part) => h("i", { "data-stage": part.stage, title: `${STAGES[part.stage]}: ${time(part.mean_s)}`, vars: { "--width": `${(part.mean_s / whole) * 100}%` } })),
    ),
    h("ul", {}, parts.map((part) => h("li", { "data-stage": part.stage }, h("span", {}, STAGES[part.stage] ?? part.stage), h("b", {}, time(part.mean_s))))),
  );
}

function lines(all) {
  const place = byId("charts");
  charts ??= {
    ttft: new Chart(place, "Time to first token", time, [["p50", "--c1", true], ["p99", "--c2"]]),
    itl: new Chart(place, "Between tokens", time, [["p50", "--c1", true], ["p99", "--c2"]]),
    waiting: new Chart(place, "Waiting", count, [["prefill", "--prefill", true], ["decode", "--decode"]], { whole: true }),
    tokens: new Chart(place, "Tokens per second", count, [["prompt", "--prefill", true], ["output", "--decode"]]),
    reuse: new Chart(place, "Prompt tokens from cache", percent, [["found", "--c1", true], ["expected", "--c3", false, true]], { most: 1 }),
    moved: new Chart(place, "KV transfer per second", size, [["moved", "--c4", true]]),
  };
  charts.ttft.show(all.time_s, all.ttft_p50_s, all.ttft_p99_s);
  charts.itl.show(all.time_s, all.itl_p50_s, all.itl_p99_s);
  charts.waiting.show(all.time_s, all.waiting_prefill, all.waiting_decode);
  charts.tokens.show(all.time_s, all.prompt_tokens_per_s, all.output_tokens_per_s);
  charts.reuse.show(all.time_s, all.reuse_real, all.reuse_predicted);
  charts.moved.show(all.time_s, all.moved_bytes_per_s);
}

/** Rows stay the same elements, so that the keyboard's place in them is kept. */
function table(requests) {
  const ids = new Set(requests.map((request) => request.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  const body = byId("rows");
  let before = body.firstElementChild;
  for (const request of requests) {
    const row = rows.get(request.id);
    if (row === undefined) {
      const made = requestRow(request);
      rows.set(request.id, made);
      body.insertBefore(made, before);
    } else if (row === before) before = before.nextElementSibling;
    else body.insertBefore(row, before);
  }
  byId("no-rows").hidden = requests.length > 0;
}

function requestRow(request) {
  const cell = (text, kind = null) => h("td", { class: kind }, text);
  return h(
    "tr",
    { click: () => open(request.id) },
    cell(clock(request.ended_ms)),
    h("td", {}, h("a", { href: `#request=${encodeURIComponent(request.id)}`, title: request.id }, request.id.length > 18 ? `${request.id.slice(0, 8)}…${request.id.slice(-6)}` : request.id)),
    h("td", {}, h("span", { class: "chip", "data-outcome": request.outcome }, request.outcome === "failed" ? request.code : request.outcome)),
    cell(count(request.prompt_tokens), "n"),
    cell(request.prompt_tokens ? percent(request.cached_tokens / request.prompt_tokens) : "–", "n"),
    cell(count(request.completion_tokens), "n"),
    cell(time(request.ttft_s), "n"),
    cell(time(request.total_s), "n"),
    cell(request.prefill_worker),
    cell(request.decode_worker),
    cell(count(request.attempt), request.attempt > 1 ? "n again" : "n"),
  );
}

function state(level, text) {
  byId("state").dataset.level = level;
  byId("state").textContent = text;
}

function trouble(text) {
  byId("trouble").hidden = text === "";
  byId("trouble").textContent = text;
  if (text) state("bad", "not live");
}

async function ask() {
  const window = document.querySelector("input[name=window]:checked").value;
  try {
    const answer = await fetch(`now?window=${window}&model=${encodeURIComponent(byId("model").value)}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    const now = await answer.json();
    if (!answer.ok) return trouble(now.error);
    trouble("");
    show(now);
  } catch (error) {
    trouble(`The server of this page does not answer: ${error.message}`);
  }
}

let running = false;
async function loop() {
  if (running) return;
  running = true;
  while (!document.hidden) {
    await ask();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
  running = false;
}

document.addEventListener("visibilitychange", loop);
for (const input of document.querySelectorAll("input[name=window]")) input.addEventListener("change", ask);
byId("model").addEventListener("change", ask);
follow();
loop();
