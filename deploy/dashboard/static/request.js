// One request: its waterfall and the router's reasons, in a dialog that has an address of its own.

import { h } from "./draw.js";
import { STAGES, clock, count, percent, size, time } from "./words.js";

const dialog = document.getElementById("request");
let shown = null;

const addressOf = (id) => `#request=${encodeURIComponent(id)}`;

export function open(id) {
  if (location.hash !== addressOf(id)) location.hash = addressOf(id);
  else follow();
}

/** Opens what the address names, now and whenever it changes. */
export function follow() {
  const match = /^#request=(.+)$/.exec(location.hash);
  if (match) show(decodeURIComponent(match[1]));
  else if (dialog.open) dialog.close();
}

dialog.addEventListener("close", () => {
  if (dialog.open) return; // this word comes late: by now it may show another request, or the address may name one
  const left = shown;
  shown = null;
  if (left !== null && location.hash === addressOf(left)) history.replaceState(null, "", location.pathname + location.search);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // beside it
});
addEventListener("hashchange", follow);

async function show(id) {
  shown = id;
  dialog.replaceChildren(head(id), h("p", { class: "quiet" }, "…"));
  if (!dialog.open) dialog.showModal();
  let answer, story;
  try {
    answer = await fetch(`requests/${encodeURIComponent(id)}`);
    story = await answer.json();
  } catch (error) {
    story = { error: `The page cannot reach its server: ${error.message}` };
  }
  if (shown !== id) return;
  dialog.replaceChildren(head(id, story), ...(answer?.ok ? parts(story) : [h("p", { class: "error" }, story.error)]));
}

function head(id, story = {}) {
  return h(
    "div",
    { class: "head" },
    h("h2", { id: "request-title" }, h("code", {}, id), story.outcome && h("span", { class: "chip", "data-outcome": story.outcome }, story.outcome)),
    h("button", { type: "button", "aria-label": "Close", click: () => dialog.close() }, "×"),
  );
}

function parts(story) {
  const facts = [
    ["model", story.model],
    ["received", story.received_ms ? clock(story.received_ms) : null],
    ["first token after", story.ttft_s === null ? null : time(story.ttft_s)],
    ["total", story.total_s === null ? null : time(story.total_s)],
    ["ended with", story.reason],
    ["prompt", story.prompt_tokens ? `${count(story.prompt_tokens)} tokens` : null],
    ["from cache", story.prompt_tokens ? `${count(story.cached_tokens)} (${percent(story.cached_tokens / story.prompt_tokens)}), ${count(story.predicted_cached_tokens)} expected` : null],
    ["output", story.outcome === "running" ? null : `${count(story.completion_tokens)} tokens`],
    ["KV moved", story.kv_bytes ? size(story.kv_bytes) + (story.kv_transfer_s ? ` in ${time(story.kv_transfer_s)}` : "") : null],
    ["prefill", story.prefill_worker],
    ["decode", story.decode_worker],
    ["attempts", story.attempt > 1 ? count(story.attempt) : null],
    ...Object.entries(story.labels ?? {}),
  ].filter(([, value]) => value);
  return [
    story.error && h("p", { class: "error" }, story.error),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h3", {}, "Where the time went"),
    story.bars.length ? waterfall(story) : h("p", { class: "quiet" }, story.outcome === "running" ? "It runs: its times are told when it ends." : "No times are known of it."),
    h("h3", {}, "Why it went there"),
    ...reasons(story.routing),
  ].filter(Boolean);
}

/** A long generation would hide everything before it: then it fades out at the right end. */
function waterfall(story) {
  const last = story.bars.at(-1);
  const end = last.start_s + last.length_s;
  const long = last.stage === "generation" && last.length_s > 2 * last.start_s;
  const scale = long ? last.start_s * 1.35 || end : end || 1;
  const rows = story.bars.map((bar) => {
    const left = Math.min(100, (bar.start_s / scale) * 100);
    const width = Math.min(100 - left, (bar.length_s / scale) * 100);
    return h(
      "li",
      { title: bar.meaning },
      h("span", { class: "stage" }, STAGES[bar.stage] ?? bar.stage, h("small", {}, bar.meaning)),
      h("span", { class: "track" }, h("i", { "data-part": bar.part, "data-fades": long && bar === last, vars: { "--left": `${left}%`, "--width": `${width}%` } })),
      h("span", { class: "n" }, time(bar.length_s)),
    );
  });
  const first = story.ttft_s !== null && story.ttft_s <= scale;
  return h("ol", { class: "waterfall", "data-first": first, vars: { "--first": first ? String(story.ttft_s / scale) : "0" } }, rows);
}

function reasons(routing) {
  if (!routing) return [h("p", { class: "quiet" }, "No router remembers this decision: it was made too long ago, or its router was restarted.")];
  const best = Math.max(...routing.considered.map((lane) => Math.abs(lane.score)), 1e-9);
  return [
    h("p", {}, routing.reason),
    h("p", { class: "quiet" }, `${routing.router}, policy ${routing.policy}`),
    routing.considered.length > 0 &&
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "lanes" },
          h("thead", {}, h("tr", {}, h("th", {}, "Worker"), h("th", { class: "n" }, "Score"), h("th", {}), h("th", {}, "What the router knew"))),
          h(
            "tbody",
            {},
            routing.considered.map((lane) =>
              h(
                "tr",
                { "data-chosen": lane.lane === routing.lane },
                h("td", {}, lane.lane),
                h("td", { class: "n" }, lane.score.toFixed(4)),
                h("td", {}, h("i", { class: "score", vars: { "--width": `${(Math.abs(lane.score) / best) * 100}%` } })),
                h("td", {}, lane.words),
              ),
            ),
          ),
        ),
      ),
  ].filter(Boolean);
}
