"""What the numbers mean, in words: which pool is short, whether routing helps, whether the network is the limit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...schemas.workers import Role
from .history import Slot
from .pools import LATELY_S, ROOM, WAIT_S, Leg, PoolReading, waited_s
from .state import Known
from .words import counted, of_time, percent, size, waits

Level = Literal["bad", "warn", "good", "info"]

REUSE_OFF = 0.1
"""Found and expected shares that differ by more than this are worth a word."""
PULL_SHARE = 0.5


@dataclass(frozen=True)
class Finding:
    """`about`: pools, decode, routing, network, workers or broker. `advice`: what to do or to look at; may be empty."""

    about: str
    level: Level
    text: str
    advice: str = ""


def findings(known: Known, pools: list[PoolReading], lately: Slot, by_model: Mapping[str, Slot]) -> list[Finding]:
    """`lately`: of all models. What matters most comes first: what is broken, then what is short, then whether routing and network do their part."""
    if not known.connected:
        return [Finding("broker", "bad", "The broker does not answer: what is shown is what was known before.")]
    found = [*_workers(known), *(finding for pool in pools for finding in _pool(pool, by_model[pool.model], several=len(pools) > 1))]
    if lately.requests == 0:
        if not any(pool.waiting_first or pool.waiting_decode for pool in pools) and pools:
            found.append(Finding("pools", "info", "Idle: nothing ended in the last minute, and nothing waits."))
        return found
    found += [*_failures(known, lately), *_routing(known, lately), *_network(lately)]
    return found


def _workers(known: Known) -> list[Finding]:
    found: list[Finding] = []
    waiting = known.gauges().waiting_requests
    if not known.cards:
        text = f"No worker is here, and {waits(waiting, 'request')}." if waiting else "No worker is here."
        found.append(Finding("workers", "bad", text, "Start some: they take what waits. `jetwake up` starts a whole system."))
    for pool in known.pools:
        prefill, decode = known.workers("prefill", pool), known.workers("decode", pool)
        if bool(prefill) != bool(decode):
            there, missing = ("prefill", "decode") if prefill else ("decode", "prefill")
            found.append(Finding("workers", "bad", f"Pool {pool} has {there} workers and no {missing} worker: it can serve nothing."))
        unmet = [card.worker for card in decode if prefill and not card.peers]
        if unmet:
            text = f"{', '.join(unmet[:3])} has shaken hands with no prefill worker."
            found.append(Finding("network", "warn", text, "Can the machines reach each other? The worker's log names the address."))
    stalled = [card.worker for card in known.cards.values() if card.state == "stalled"]
    if stalled:
        text = f"{', '.join(sorted(stalled)[:3])} makes no progress, and is about to give its work to others."
        found.append(Finding("workers", "bad", text, "Its log says what it was doing."))
    if not known.routers and known.cards:
        found.append(Finding("workers", "bad", "No router answers: requests wait.", "Start one: `jetwake router`."))
    if known.dead_letters:
        text = f"{counted(known.dead_letters, 'dead letter')}: messages or requests that could not be processed."
        found.append(Finding("workers", "warn", text, "`jetwake dead list` says what and why."))
    return found


def _pool(pool: PoolReading, lately: Slot, several: bool) -> list[Finding]:
    short, where = pool.short(lately), f" in {pool.pool}" if several else ""
    first = "Prefill" if pool.decode.workers else "The pool"
    wait_s = waited_s(lately) if lately.stage_requests["prefill"] else None
    queued = _queue(pool.waiting_first, "request", wait_s)
    stuck = _queue(pool.waiting_decode, "handoff", lately.stage_mean_s("handoff_wait"))
    room = f"{_has(pool.decode)} ({percent(pool.decode.used)} in use)"
    if short == ["prefill", "decode"]:
        text = f"Both legs are short{where}: {queued} for prefill; {stuck} for decode."
        return [Finding("pools", "bad", text, "Add workers of both roles, or take fewer requests.")]
    if short == ["prefill"]:
        if not pool.decode.workers:
            return [Finding("pools", "bad", f"Workers are short{where}: {queued}.", "Add aggregated workers.")]
        advice = "Add a prefill worker, or make one of a decode worker." if pool.decode.used < ROOM / 2 else "Add a prefill worker."
        return [Finding("pools", "bad", f"Prefill is short{where}: {queued}; decode {room}.", advice)]
    if short == ["decode"]:
        advice = "Add a decode worker, or give those there more KV blocks."
        return [
            Finding(
                "pools", "bad", f"Decode is short{where}: {stuck}; prefill {_has(pool.first)} ({percent(pool.first.used)} in use).", advice
            )
        ]
    if not pool.first.workers or wait_s is None:
        return []
    late = pool.late(lately)
    if late:
        what = (
            f"requests waited {of_time(wait_s)}" if "prefill" in late else f"handoffs waited {of_time(lately.stage_mean_s('handoff_wait'))}"
        )
        text = f"Slow, but not short of workers{where}: in the last minute {what} each, and workers have room."
        advice = "Look at the processes themselves: CPU of routers and workers, the disk of the broker, the way to it."
        return [Finding("pools", "warn", text, advice)]
    kept = f"a prompt waits {of_time(wait_s)} for its turn" + (f", decode {room}" if pool.decode.workers else "")
    return [Finding("pools", "good", f"{first} keeps up{where}: {kept}.")]


def _queue(waiting: int, noun: str, wait_s: float | None) -> str:
    now = waits(waiting, noun) if waiting else f"no {noun} waits this second"
    return now if wait_s is None else f"{now}, those of the last minute waited {of_time(wait_s)} each"


def _has(leg: Leg) -> str:
    return "has room" if leg.used < ROOM else "is full"


def _failures(known: Known, lately: Slot) -> list[Finding]:
    failed, expired = lately.ended["failed"], lately.ended["expired"]
    found: list[Finding] = []
    if failed:
        text = f"{counted(failed, 'request')} of {lately.requests} failed in the last minute."
        found.append(Finding("workers", "bad", text, "Open one below to see its error."))
    if expired:
        text = f"{counted(expired, 'request')} of {lately.requests} ran past the deadline in the last minute."
        found.append(Finding("pools", "warn", text, "They waited too long: see which pool is short."))
    again = lately.attempts / lately.requests
    if again > 1.1:
        text = f"Requests take {again:.1f} attempts each: workers come and go, or break."
        found.append(Finding("workers", "warn", text, "The rows with more than one attempt name their workers."))
    return found


def _routing(known: Known, lately: Slot) -> list[Finding]:
    if not lately.prompt_tokens:
        return []
    real, expected = lately.cached_tokens / lately.prompt_tokens, lately.predicted_tokens / lately.prompt_tokens
    saved = f"{percent(real)} of prompt tokens came from caches"
    if expected - real > REUSE_OFF:
        text = f"Caches hold less than routers expect: {percent(expected)} expected, {percent(real)} found."
        advice = (
            "Prefixes are evicted before they are used: more KV blocks, or more prefill workers. `jetwake status` names silent workers."
        )
        return [Finding("routing", "warn", text, advice)]
    if real - expected > REUSE_OFF:
        text = f"Caches hold more than routers expect: {percent(expected)} expected, {percent(real)} found."
        return [Finding("routing", "warn", text, "Routers do not hear all cache events, or one has just started.")]
    blind = sorted({router.policy for router in known.routers if router.policy != "kv_aware"})
    if blind:
        return [
            Finding(
                "routing", "info", f"{saved}, by chance: the policy {', '.join(blind)} does not look at caches.", "Try `--policy kv_aware`."
            )
        ]
    if real < 0.05:
        return [
            Finding("routing", "info", f"Prompts share next to nothing: {saved}.", "Then policies differ little, and caches cannot help.")
        ]
    worth = _worth(known, lately)
    return [Finding("routing", "good", f"Routing helps: {saved} ({percent(expected)} expected){worth}.")]


def _worth(known: Known, lately: Slot) -> str:
    """What the cached tokens would have cost, by what workers say of their own pace."""
    role: Role = "prefill" if known.workers("prefill") else "aggregated"
    timings = [timing for card in known.workers(role) if (timing := known.load(card).prefill_timing) is not None]
    if not timings:
        return ""
    per_token_s = sum(timing.per_token_s for timing in timings) / len(timings)
    workers = lately.cached_tokens * per_token_s / LATELY_S
    return f", the work of {workers:.1f} more workers" if workers >= 0.1 else ""


def _network(lately: Slot) -> list[Finding]:
    pull_s, wait_s, step_s = (lately.stage_mean_s(stage) for stage in ("transfer", "handoff_wait", "first_step"))
    if pull_s is None or not lately.moved:
        return []
    each = size(lately.moved_bytes / lately.moved)
    rate = size(lately.moved_bytes / lately.moving_s) + "/s" if lately.moving_s else ""
    pulls = f"a pull of {each} takes {of_time(pull_s)}" + (f" ({rate})" if rate else "")
    gap_s = pull_s + (wait_s or 0.0) + (step_s or 0.0)
    if pull_s >= WAIT_S and pull_s >= PULL_SHARE * gap_s:
        advice = "Check the transport of NIXL, place workers nearer to each other, or serve short prompts without a handoff."
        return [Finding("network", "bad", f"The network is the limit of the second token: {pulls}, of {of_time(gap_s)} in all.", advice)]
    return [Finding("network", "good", f"The network is not the limit: {pulls}; a handoff waits {of_time(wait_s or 0.0)} for room.")]
