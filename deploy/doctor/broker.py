"""What the broker is, allows and holds, seen from here. Reads; leaves nothing behind."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ...pipeline.clock import server_time_offset_ns
from ...pipeline.connection import Bus
from ...pipeline.jetstream import api
from ...pipeline.registry import Registry
from ...pipeline.settings import BrokerSettings, TopologySettings
from ...pipeline.topology import drift
from ...schemas.errors import BrokerUnavailable, BusError, NotPermitted, SetupError
from ...schemas.workers import WorkerCard
from ..configuration_view import masked
from .finding import Finding
from .permissions import has_users, permissions

CONNECT_TIMEOUT_S = 3.0
REACH_TIMEOUT_S = 1.0
MONITOR_PORT = 8222
OLDEST_SERVER = (2, 11)
"""Streams whose messages expire one by one came with it."""
WANTED_PAYLOAD_BYTES = 8 << 20
SMALL_PAYLOAD_BYTES = 1 << 20
OFFSET_S = 0.5
GIB = 2**30


async def broker_findings(
    settings: BrokerSettings, topology: TopologySettings, role: str, monitor_port: int = MONITOR_PORT
) -> list[Finding]:
    settings = settings.model_copy(update={"connect_timeout_s": CONNECT_TIMEOUT_S})
    try:
        async with Bus.connect(settings, name="doctor") as bus:
            return await _of_bus(bus, topology, role, monitor_port)
    except NotPermitted as error:
        return [Finding("broker", "wrong", str(error), "give the user's own --nats-credentials, or user and password in --nats-url")]
    except SetupError as error:
        return [Finding("broker", "wrong", str(error), "see the --nats-* options: files and certificates must fit the server")]
    except BrokerUnavailable as error:
        return [Finding("broker", "wrong", str(error), "is nats-server running there, is the port open from here, does it want TLS?")]


async def _of_bus(bus: Bus, topology: TopologySettings, role: str, monitor_port: int) -> list[Finding]:
    findings = [version(bus.server_version, bus.settings.url), payload(bus.max_payload_bytes)]
    jetstream, is_on = await _jetstream(bus, topology)
    findings.append(jetstream)
    if is_on:
        findings.append(await _sync(bus.settings.url, monitor_port))
        findings += [await _streams(bus, topology), await _clock(bus)]
        if has_users(role):
            findings.append(await permissions(bus, role))
        if role in ("", "prefill", "decode", "aggregated", "up"):
            findings += await _workers(bus)
    return findings


def version(told: tuple[int, int, int], url: str) -> Finding:
    text = f"nats-server {'.'.join(map(str, told))} at {masked('url', url)}"
    if told < OLDEST_SERVER:
        return Finding("broker", "wrong", text, f"take {'.'.join(map(str, OLDEST_SERVER))} or later; 2.15 was tested")
    return Finding("broker", "ok", text)


def payload(max_payload_bytes: int) -> Finding:
    text = f"messages of at most {max_payload_bytes / 2**20:.1f} MiB"
    cure = "max_payload: 8MB in the server's configuration; long prompts and answers travel in one message"
    if max_payload_bytes < SMALL_PAYLOAD_BYTES:
        return Finding("payload", "wrong", text, cure)
    if max_payload_bytes < WANTED_PAYLOAD_BYTES:
        return Finding("payload", "warning", text, cure)
    return Finding("payload", "ok", text)


async def _jetstream(bus: Bus, topology: TopologySettings) -> tuple[Finding, bool]:
    try:
        info = await api(bus, "INFO")
    except NotPermitted:
        return Finding("JetStream", "skipped", "this user may not see the account: ask as operator or observer"), True
    except BusError as error:
        if isinstance(error, BrokerUnavailable) and "not enabled" not in str(error):
            return Finding("JetStream", "wrong", str(error), "in a cluster: do a majority of the servers run and see each other?"), False
        return Finding(
            "JetStream", "wrong", f"off: {error}", "jetstream { store_dir: ... } in the server's configuration, enabled for this account"
        ), False
    limits = account_limits(info, file_bytes(topology), memory_bytes(topology))
    return limits, True


def file_bytes(topology: TopologySettings) -> int:
    """What all queues and stores on disk may grow to."""
    sized = [spec for spec in topology.streams() if spec.storage == "file"] + list(topology.objects())
    return sum(spec.max_bytes for spec in sized if spec.max_bytes > 0) * topology.replicas


def memory_bytes(topology: TopologySettings) -> int:
    return sum(spec.max_bytes for spec in topology.streams() if spec.storage == "memory" and spec.max_bytes > 0) * topology.replicas


def account_limits(info: Mapping[str, Any], needed_file_bytes: int, needed_memory_bytes: int) -> Finding:
    """Bounds of streams are reservations: what does not fit is refused when the stream is made."""
    limits = info.get("limits", {})
    tight = [
        f"{kind} {limit / GIB:.2f} GiB, the queues reserve {needed / GIB:.2f} GiB"
        for kind, limit, needed in (
            ("storage", limits.get("max_storage", -1), needed_file_bytes),
            ("memory", limits.get("max_memory", -1), needed_memory_bytes),
        )
        if 0 <= limit < needed
    ]
    if tight:
        return Finding(
            "JetStream",
            "wrong",
            f"on, with too little for this account: {'; '.join(tight)}",
            "raise the account's limits, or lower [limits] in the configuration",
        )
    return Finding(
        "JetStream",
        "ok",
        f"on; {info.get('streams', 0)} streams, {int(info.get('storage', 0)) / GIB:.2f} GiB on disk, {int(info.get('memory', 0)) / GIB:.2f} GiB in memory",
    )


async def _sync(url: str, port: int) -> Finding:
    """Only the monitoring port tells it."""
    host = urlsplit(url.split(",")[0]).hostname or "127.0.0.1"
    what = "sync to disk"

    def read() -> Any:
        with urllib.request.urlopen(f"http://{host}:{port}/varz", timeout=REACH_TIMEOUT_S) as answer:
            return json.load(answer)

    try:
        told = await asyncio.to_thread(read)
        config = told["jetstream"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return Finding(what, "skipped", f"not to be seen: no monitoring port {port} at {host}")
    if config.get("sync_always"):
        return Finding(what, "ok", "always: what was accepted survives a power cut")
    interval_s = int(config.get("sync_interval", 0)) / 1e9
    return Finding(
        what,
        "warning",
        f"every {interval_s:g} s: a power cut loses what was accepted since",
        "sync_interval: always in the jetstream block, unless the cluster's replicas are enough for you",
    )


async def _streams(bus: Bus, topology: TopologySettings) -> Finding:
    try:
        lines = await drift(bus, topology)
    except NotPermitted as error:
        return Finding("streams", "skipped", f"{error}: ask as operator or observer")
    except BusError as error:
        return Finding("streams", "wrong", str(error), "in a cluster: do a majority of the servers run and see each other?")
    missing = [line for line in lines if line.endswith(": missing")]
    other = [line for line in lines if line not in missing]
    if other:
        return Finding(
            "streams",
            "wrong",
            "; ".join(other),
            "give all parts the same [limits]; the next start of a router makes streams as its own say",
        )
    if missing:
        return Finding("streams", "warning", f"{len(missing)} are missing", "the first router, worker or gateway that starts makes them")
    return Finding("streams", "ok", f"{len(topology.streams())} streams and their consumers as declared")


async def _clock(bus: Bus) -> Finding:
    try:
        return clock_offset((await server_time_offset_ns(bus) + time.monotonic_ns() - time.time_ns()) / 1e9)
    except NotPermitted as error:
        return Finding("clock", "skipped", str(error))
    except BusError as error:
        return Finding("clock", "skipped", f"needs the streams: {error}")


def clock_offset(offset_s: float) -> Finding:
    """Deadlines go by the broker's clock; certificates, logs and traces by this machine's."""
    text = f"{abs(offset_s) * 1e3:.0f} ms {'behind' if offset_s > 0 else 'ahead of'} the broker's"
    if abs(offset_s) > OFFSET_S:
        return Finding("clock", "warning", text, "run NTP (chrony, systemd-timesyncd) on both machines")
    return Finding("clock", "ok", text)


async def _workers(bus: Bus) -> list[Finding]:
    registry = Registry(bus)
    try:
        await registry.start()
    except BusError as error:
        return [Finding("workers", "skipped", f"cannot be seen: {error}")]
    cards = sorted(registry.workers.values(), key=lambda card: card.worker)
    if not cards:
        return [Finding("workers", "ok", "none is running")]
    unreached = [text for text in await asyncio.gather(*map(_reach, cards)) if text]
    if unreached:
        cure = "decode workers connect there: give the worker an address that others reach (--engine-option side_channel_host=...), open the port"
        return [Finding("workers", "wrong", "; ".join(unreached), cure)]
    return [Finding("workers", "ok", f"the side channels of {len(cards)} are reached from here")]


async def _reach(card: WorkerCard) -> str:
    if not card.side_channel_port:
        return ""
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(card.side_channel_host, card.side_channel_port)
    except (OSError, TimeoutError) as error:
        words = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        return f"{card.worker} at {card.side_channel_host}:{card.side_channel_port}: {words}"
    writer.close()
    return ""
