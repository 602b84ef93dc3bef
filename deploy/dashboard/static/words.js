// Numbers as people read them. The same rules as words.py.

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value < 9.95 ? value.toFixed(1) : count(value);
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${Math.round(share * 100)} %`;
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return NONE;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.5) return `${bytes.toFixed(bytes >= 99.5 || unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export const STAGES = {
  accept: "accepted",
  earlier_attempts: "earlier attempts",
  queue: "request queue",
  routing: "routing",
  prefill_queue: "prefill queue",
  prefill: "prefill",
  handoff_wait: "handoff wait",
  transfer: "KV transfer",
  first_step: "first decode step",
  generation: "generation",
};
