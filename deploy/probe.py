"""`jetwake probe`: how fast the way from each prefill worker to each decode worker is, by real transfers, one pair at a time."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from ..pipeline.connection import Bus
from ..pipeline.registry import Registry
from ..pipeline.settings import BrokerSettings
from ..schemas import subjects
from ..schemas.codec import decode, encode
from ..schemas.errors import BrokerUnavailable, NoWorker, StreamMissing
from ..schemas.link_probe import LinkProbe, LinkProbed
from ..schemas.workers import WorkerCard
from .capacity.link_model import MeasuredPair, fitted, write_link_model

ANSWER_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class PairProbed:
    """`state` slow: less than a share of the median of all. `latency_ms`: until the smallest read (64 KiB) was here, as measured; `setup_ms`: what the
    fit leaves for a transfer of nothing.
    """

    prefill: str
    decode: str
    prefill_domain: str
    decode_domain: str
    state: Literal["ok", "slow", "refused", "broken"]
    why: str = ""
    gbytes_per_s: float = 0.0
    latency_ms: float = 0.0
    setup_ms: float = 0.0
    connect_ms: float = 0.0


async def probe(
    broker: BrokerSettings, model: str | None, slow_share: float, force: bool, report: Callable[[str], None]
) -> list[PairProbed]:
    """Raises NoWorker: there is no pair."""
    async with Bus.connect(broker, name="probe") as bus:
        registry = Registry(bus)
        await registry.start()
        pairs = pairs_of(list(registry.workers.values()), model)
        if not pairs:
            raise NoWorker("no prefill worker and decode worker of one pool are here: `jetwake status` shows the workers")
        found = list[PairProbed]()
        name = f"p{secrets.token_hex(8)}"
        for prefill, decoders in pairs:
            report(f"{prefill.worker}: {len(decoders)} links")
            found += await _from(bus, LinkProbe(step="open", probe=name, pattern=secrets.randbits(32), force=force), prefill, decoders)
        return judged(found, slow_share)


def pairs_of(cards: Sequence[WorkerCard], model: str | None) -> list[tuple[WorkerCard, list[WorkerCard]]]:
    """Pure. Those that leave are not asked."""
    there = sorted((card for card in cards if card.state == "ready" and model in (None, card.model)), key=lambda card: card.worker)
    found = [
        (prefill, [card for card in there if card.role == "decode" and card.pool == prefill.pool])
        for prefill in there
        if prefill.role == "prefill"
    ]
    return [(prefill, decoders) for prefill, decoders in found if decoders]


async def _from(bus: Bus, opening: LinkProbe, prefill: WorkerCard, decoders: Sequence[WorkerCard]) -> list[PairProbed]:
    opened = await _ask(bus, prefill, opening)
    if opened.refused or opened.broken:
        why = f"{prefill.worker}: {opened.refused or opened.broken}"
        return [_pair(prefill, card, "refused" if opened.refused else "broken", why) for card in decoders]
    try:
        pulling = opening.model_copy(update={"step": "pull", "host": opened.host, "port": opened.port, "engine_id": opened.engine_id})
        return [_measured(prefill, card, await _ask(bus, card, pulling)) for card in decoders]
    finally:
        await _ask(bus, prefill, opening.model_copy(update={"step": "close"}))


async def _ask(bus: Bus, card: WorkerCard, question: LinkProbe) -> LinkProbed:
    try:
        answer = await bus.request(subjects.probe(card.worker), encode(question), timeout_s=ANSWER_TIMEOUT_S)
    except StreamMissing:
        return LinkProbed(worker=card.worker, broken="it does not answer: has it gone, or is it of an older version?")
    except BrokerUnavailable as error:
        return LinkProbed(worker=card.worker, broken=str(error))
    return decode(answer.data, LinkProbed)


def _measured(prefill: WorkerCard, card: WorkerCard, answer: LinkProbed) -> PairProbed:
    if answer.refused or answer.broken:
        return _pair(prefill, card, "refused" if answer.refused else "broken", f"{card.worker}: {answer.refused or answer.broken}")
    took_s = [median(size.took_us) / 1e6 for size in answer.sizes]
    bytes_per_s, setup_s = fitted([size.size_bytes for size in answer.sizes], took_s)
    return PairProbed(
        prefill.worker, card.worker, prefill.domain, card.domain, "ok", "", bytes_per_s / 1e9, took_s[0] * 1e3, setup_s * 1e3, answer.connect_us / 1e3
    )  # fmt: skip


def _pair(prefill: WorkerCard, card: WorkerCard, state: Literal["refused", "broken"], why: str) -> PairProbed:
    return PairProbed(prefill.worker, card.worker, prefill.domain, card.domain, state, why)


def judged(pairs: Sequence[PairProbed], slow_share: float) -> list[PairProbed]:
    """Which are slow, among those that were measured. Pure."""
    measured = [pair.gbytes_per_s for pair in pairs if pair.state == "ok"]
    if not measured:
        return list(pairs)
    limit = slow_share * median(measured)
    return [PairProbed(**{**asdict(pair), "state": "slow"}) if pair.state == "ok" and pair.gbytes_per_s < limit else pair for pair in pairs]


def save(path: Path, pairs: Sequence[PairProbed]) -> None:
    """Raises SetupError."""
    measured = [pair for pair in pairs if pair.state in ("ok", "slow")]
    keys = ("prefill", "decode", "prefill_domain", "decode_domain", "gbytes_per_s")
    write_link_model(path, [MeasuredPair(**{key: getattr(pair, key) for key in keys}, latency_ms=pair.setup_ms) for pair in measured])


def print_probed(pairs: Sequence[PairProbed], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"pairs": [asdict(pair) for pair in pairs]}))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "slow": "yellow", "refused": "dim", "broken": "red"}
    by_place = {(pair.prefill, pair.decode): pair for pair in pairs}
    table = Table(box=SIMPLE, title="prefill → decode: GB/s, and ms until 64 KiB are there", title_justify="left")
    table.add_column("")
    decoders = sorted({pair.decode for pair in pairs})
    for name in decoders:
        table.add_column(name)
    for name in sorted({pair.prefill for pair in pairs}):
        cells: list[Text] = []
        for decoder in decoders:
            pair = by_place.get((name, decoder))
            text = (
                ""
                if pair is None
                else f"{pair.gbytes_per_s:.2f} GB/s  {pair.latency_ms:.2f} ms"
                if pair.state in ("ok", "slow")
                else pair.state
            )
            cells.append(Text(text, style="" if pair is None else styles[pair.state]))
        table.add_row(name, *cells)
    console = Console(highlight=False)
    console.print(table)
    for pair in pairs:
        if pair.why:
            console.print(f"{pair.prefill} → {pair.decode}: {pair.state}: {pair.why}", style=styles[pair.state], markup=False)
    slow = [f"{pair.prefill} → {pair.decode}" for pair in pairs if pair.state == "slow"]
    if slow:
        console.print(f"slow: {', '.join(slow)}", style="yellow", markup=False)
