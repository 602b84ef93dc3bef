"""The clients of a chaos run: requests of all kinds, at times of their own, each with a nonce in its prompt and a known right answer.

Writes what its clients saw into `Record`s. A request that fails does not hold up the others, and none is sent again here.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...producers.client import Client, Submitted
from ...schemas.errors import (
    BrokerUnavailable,
    BusError,
    DeadlineExceeded,
    JetwakeError,
    RequestCancelled,
    RequestFailed,
)
from ...schemas.requests import PriorityClass
from .ledger import Record, Wish

log = logging.getLogger(__name__)

LONG_TIMEOUT_S = 300.0
NONCE_TOKENS = 4


@dataclass(frozen=True)
class LoadSettings:
    """`pool`: prompts to choose from; empty: each request has one of its own."""

    rate_per_s: float
    vocabulary_size: int
    longest_prompt_tokens: int
    longest_answer_tokens: int
    pool: Sequence[tuple[int, ...]] = ()
    prefixes: int = 6
    is_seeded: bool = True
    wishes: dict[Wish, float] = field(default_factory=lambda: {"answer": 0.80, "cancel": 0.08, "leave": 0.04, "deadline": 0.08})
    batch_share: float = 0.12


@dataclass(frozen=True)
class Draft:
    """One request to be sent. `after_tokens`: when a client that cancels or leaves does so."""

    number: int
    at_s: float
    client: int
    prompt: tuple[int, ...]
    wish: Wish
    after_tokens: int
    priority_class: PriorityClass
    session: str
    timeout_s: float
    sampling: dict[str, Any]


def drafts(settings: LoadSettings, seed: int, clients: int) -> Iterator[Draft]:
    """Without an end. Pure."""
    dice = random.Random(seed)
    prefixes = [_tokens(dice, settings, dice.randrange(settings.longest_prompt_tokens // 2 + 1)) for _ in range(settings.prefixes)]
    at_s, number = 0.0, 0
    while True:
        at_s += dice.expovariate(settings.rate_per_s)
        yield _draft(dice, settings, prefixes, number, at_s, clients)
        number += 1


def _draft(dice: random.Random, settings: LoadSettings, prefixes: Sequence[list[int]], number: int, at_s: float, clients: int) -> Draft:
    family = dice.randrange(len(prefixes))
    prompt = dice.choice(settings.pool) if settings.pool else tuple(new_prompt(dice, settings, prefixes[family]))
    [wish] = dice.choices(list(settings.wishes), list(settings.wishes.values()))
    max_tokens = 1 + int((settings.longest_answer_tokens - 1) * dice.random() ** 2)  # mostly short, some long
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    if settings.is_seeded and dice.random() < 0.3:
        sampling |= {"temperature": 1.0, "seed": dice.randrange(1 << 30)}
    return Draft(
        number=number,
        at_s=at_s,
        client=dice.randrange(clients),
        prompt=prompt,
        wish=wish,
        after_tokens=dice.randrange(max_tokens + 1),
        priority_class="batch" if dice.random() < settings.batch_share else "interactive",
        session=f"session-{family}" if dice.random() < 0.3 else "",
        timeout_s=dice.uniform(0.02, 3.0) if wish == "deadline" else LONG_TIMEOUT_S,
        sampling=sampling,
    )


def new_prompt(dice: random.Random, settings: LoadSettings, prefix: Sequence[int]) -> list[int]:
    """A shared prefix, a nonce, and some more: all of different lengths."""
    room = settings.longest_prompt_tokens - len(prefix) - NONCE_TOKENS
    return [*prefix, *_tokens(dice, settings, NONCE_TOKENS), *_tokens(dice, settings, int(room * dice.random() ** 2))]


def _tokens(dice: random.Random, settings: LoadSettings, count: int) -> list[int]:
    return [dice.randrange(1, settings.vocabulary_size) for _ in range(count)]


class Load:
    """`expect` gives the right answer of a draft. `records` has every request that was tried, by id."""

    def __init__(self, clients: Sequence[Client], model: str, expect: Callable[[Draft], list[int]], run_id: str) -> None:
        self.records: dict[str, Record] = {}
        self._clients = clients
        self.model = model
        self._expect = expect
        self._run_id = run_id
        self._started_s = time.monotonic()
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def after_s(self) -> float:
        return time.monotonic() - self._started_s

    def counts(self) -> tuple[int, int]:
        """Accepted so far, and of them those that have ended for their client."""
        accepted = [record for record in self.records.values() if record.submission == "accepted"]
        return len(accepted), sum(bool(record.outcome) for record in accepted)

    async def send(self, source: Iterator[Draft], stopping: asyncio.Event) -> None:
        """Sends each draft when it is due, until `stopping`."""
        self._started_s = time.monotonic()
        for draft in source:
            try:
                async with asyncio.timeout(max(0.0, draft.at_s - self.after_s)):
                    await stopping.wait()
            except TimeoutError:
                task = asyncio.create_task(self._converse(draft))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
            else:
                return

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Until every client has heard the end of all its requests, or long enough: who waits then has heard nothing."""
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=timeout_s)
        left = list(self._waiting)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _converse(self, draft: Draft) -> None:
        client = self._clients[draft.client]
        record = Record(
            request_id=f"{self._run_id}-{draft.number}",
            client=client.name,
            sent_after_s=round(self.after_s, 3),
            prompt_tokens=len(draft.prompt),
            wish=draft.wish,
            expected=self._expect(draft),
        )
        self.records[record.request_id] = record
        try:
            submitted = await client.submit(
                list(draft.prompt),
                model=self.model,
                timeout_s=draft.timeout_s,
                priority_class=draft.priority_class,
                session=draft.session,
                request_id=record.request_id,
                **draft.sampling,
            )
        except BrokerUnavailable:
            record.submission = "unknown"
            return
        except JetwakeError as error:
            record.submission, record.refusal = "refused", error.code
            return
        record.submission, record.deadline_ns = "accepted", submitted.request.deadline_ns
        await self._hear(draft, record, submitted)
        record.ended_after_s = round(self.after_s, 3)

    async def _hear(self, draft: Draft, record: Record, submitted: Submitted) -> None:
        try:
            if draft.wish in ("cancel", "leave") and draft.after_tokens == 0:
                await self._cancel(record, submitted)
            async with aclosing(aiter(submitted)) as pieces:
                async for piece in pieces:
                    record.tokens += piece.token_ids
                    if draft.wish in ("cancel", "leave") and len(record.tokens) >= draft.after_tokens and not record.has_cancelled:
                        await self._cancel(record, submitted)
                    if draft.wish == "leave" and record.has_cancelled:
                        record.outcome = "left"
                        return
            await submitted.answer()
            record.outcome = "finished"
        except RequestFailed as error:
            record.outcome, record.outcome_text = "failed", str(error)
        except RequestCancelled:
            record.outcome = "cancelled"
        except DeadlineExceeded as error:
            record.outcome, record.outcome_text = "expired", str(error)

    async def _cancel(self, record: Record, submitted: Submitted) -> None:
        record.has_cancelled = True
        try:
            await submitted.cancel()
        except BusError as error:  # the broker is away for long: then the answer goes on, and is heard
            log.info("%s was not cancelled: %s", record.request_id, error)
