"""The accounts of a chaos run: what was accepted, how it ended, and everything that should not be. Pure.

The broker's store is the truth of how a request ended; what its client heard and what went over the wire must agree with it, and
every token must be the one that the prompt's right answer has at that place.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...schemas.replies import AnyTerminal, Finished
from ...schemas.tokens import unpack_tokens

Wish = Literal["answer", "cancel", "leave", "deadline"]
Submission = Literal["", "accepted", "refused", "unknown"]
TokenFault = Literal["duplicate", "gap", "foreign"]
CLOCK_TOLERANCE_NS = 500_000_000
"""Between a deadline as the client wrote it and as a worker's clock read it: each knows the broker's time to within a round trip."""
LOOK_AHEAD_TOKENS = 64


@dataclass(frozen=True)
class Heard:
    """One reply as it went over the wire. `text` is empty for tokens."""

    after_s: float
    attempt: int
    offset: int
    tokens: int
    text: str = ""


@dataclass
class Record:
    """One request as its client saw it. `outcome` is empty while it waits for an end."""

    request_id: str
    client: str
    sent_after_s: float
    prompt_tokens: int
    wish: Wish
    expected: list[int]
    submission: Submission = ""
    refusal: str = ""
    deadline_ns: int = 0
    has_cancelled: bool = False
    tokens: list[int] = field(default_factory=list[int])
    outcome: str = ""
    outcome_text: str = ""
    ended_after_s: float = 0.0
    wire: list[Heard] = field(default_factory=list[Heard])
    wire_faults: list[tuple[TokenFault, str]] = field(default_factory=list[tuple[TokenFault, str]])


@dataclass(frozen=True)
class Violation:
    """`kind`: lost, unheard, disagreement, unasked, duplicate, gap, foreign."""

    kind: str
    request_id: str
    text: str


@dataclass(frozen=True)
class Aftermath:
    """What the system looks like when it should be idle again, and after it was stopped. `leftovers`: a line for each difference."""

    blocks_held: int = 0
    orphans: Sequence[str] = ()
    leftovers: Sequence[str] = ()


@dataclass(frozen=True)
class Ledger:
    accepted: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    refused: int
    unknown: int
    open: int
    duplicates: int
    gaps: int
    foreign_tokens: int
    blocks_held: int
    orphans: int
    leftovers: list[str]
    other_violations: int
    failed_by_code: dict[str, int]
    refused_by_code: dict[str, int]
    ended_by_attempt: dict[str, int]
    violations: list[Violation]

    @property
    def is_clean(self) -> bool:
        return not self.violations and not self.blocks_held and not self.orphans and not self.leftovers

    @property
    def is_balanced(self) -> bool:
        return self.accepted == self.finished + self.failed + self.cancelled + self.expired

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "balanced": self.is_balanced, "clean": self.is_clean}

    def line(self) -> str:
        sides = f"{self.finished} finished + {self.failed} failed + {self.cancelled} cancelled + {self.expired} expired"
        parts = [f"{self.accepted} accepted {'=' if self.is_balanced else '!='} {sides}"]
        parts.append(f"{self.duplicates} duplicates, {self.gaps} gaps, {self.foreign_tokens} foreign tokens")
        parts.append(f"{self.blocks_held} blocks held, {self.orphans} orphans, {len(self.leftovers)} leftovers")
        if self.open:
            parts.append(f"{self.open} without an end")
        if self.other_violations:
            parts.append(f"{self.other_violations} other violations")
        return "ledger: " + "; ".join(parts)


def account(
    records: Sequence[Record], ends: Mapping[str, AnyTerminal], counts: Mapping[str, int], aftermath: Aftermath = Aftermath()
) -> Ledger:
    """`ends`: the stored terminal of each request that has one. `counts`: how many terminals the store has of it."""
    accepted = [record for record in records if is_accepted(record, ends)]
    violations = [violation for record in accepted for violation in violations_of(record, ends.get(record.request_id), counts)]
    kinds = Counter(violation.kind for violation in violations)
    stored = [ends[record.request_id] for record in accepted if record.request_id in ends]
    types = Counter(end.type for end in stored)
    return Ledger(
        accepted=len(accepted),
        finished=types["finished"],
        failed=types["failed"],
        cancelled=types["cancelled"],
        expired=types["expired"],
        refused=sum(record.submission == "refused" for record in records),
        unknown=sum(record.submission == "unknown" and record.request_id not in ends for record in records),
        open=kinds["lost"],
        duplicates=kinds["duplicate"],
        gaps=kinds["gap"],
        foreign_tokens=kinds["foreign"],
        blocks_held=aftermath.blocks_held,
        orphans=len(aftermath.orphans),
        leftovers=list(aftermath.leftovers),
        other_violations=kinds["unheard"] + kinds["disagreement"] + kinds["unasked"],
        failed_by_code=dict(Counter(end.code for end in stored if end.type == "failed")),
        refused_by_code=dict(Counter(record.refusal for record in records if record.submission == "refused")),
        ended_by_attempt={str(attempt): count for attempt, count in sorted(Counter(end.attempt for end in stored).items())},
        violations=violations,
    )


def is_accepted(record: Record, ends: Mapping[str, AnyTerminal]) -> bool:
    """A submission whose outcome its client does not know was accepted if it ended."""
    return record.submission == "accepted" or (record.submission == "unknown" and record.request_id in ends)


def violations_of(record: Record, end: AnyTerminal | None, counts: Mapping[str, int]) -> list[Violation]:
    found: list[tuple[str, str]] = [*record.wire_faults]
    if end is None:
        found.append(("lost", f"accepted and never ended; its client's view: {record.outcome or 'still waiting'}"))
    else:
        if counts.get(record.request_id, 0) > 1:
            found.append(("duplicate", f"{counts[record.request_id]} terminals are stored"))
        found += _about_the_end(record, end)
        found += _about_tokens("stored", unpack_tokens(end.tokens), record.expected, must_be_whole=isinstance(end, Finished))
    found += _about_tokens("heard", record.tokens, record.expected, must_be_whole=record.outcome == "finished")
    return [Violation(kind, record.request_id, text) for kind, text in found]


def _about_the_end(record: Record, end: AnyTerminal) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if record.submission == "accepted" and record.wish != "leave":
        if not record.outcome:
            found.append(("unheard", f"stored as {end.type} and its client still waits"))
        elif record.outcome != end.type and not (record.outcome == "expired" and _is_over(record, end)):
            found.append(("disagreement", f"stored as {end.type}, its client heard {record.outcome}: {record.outcome_text}"))
    if end.type == "cancelled" and not record.has_cancelled:
        found.append(("unasked", "cancelled, and nobody asked for that"))
    if end.type == "expired" and not _is_over(record, end):
        early_s = (record.deadline_ns - end.ended_ns) / 1e9
        found.append(("unasked", f"expired {early_s:.1f} s before its deadline"))
    return found


def _is_over(record: Record, end: AnyTerminal) -> bool:
    """Whether the deadline had passed at the end. A client may give up waiting then, whatever became of its request."""
    return not record.deadline_ns or end.ended_ns >= record.deadline_ns - CLOCK_TOLERANCE_NS or record.wish == "deadline"


def _about_tokens(where: str, tokens: Sequence[int], expected: Sequence[int], must_be_whole: bool) -> list[tuple[str, str]]:
    fault = token_fault(tokens, expected)
    if fault is not None:
        return [(fault[0], f"{where}: {fault[1]}")]
    if must_be_whole and len(tokens) < len(expected):
        return [("gap", f"{where}: finished with {len(tokens)} of {len(expected)} tokens")]
    return []


def token_fault(tokens: Sequence[int], expected: Sequence[int], offset: int = 0) -> tuple[TokenFault, str] | None:
    """What is wrong with `tokens`, which should be those of `expected` from `offset` on. None when nothing is."""
    for place, token in enumerate(tokens):
        right = expected[offset + place] if offset + place < len(expected) else None
        if token == right:
            continue
        at = offset + place
        following = [*tokens[place : place + 2]]
        if _occurs(following, expected[at + 1 : at + LOOK_AHEAD_TOKENS]):
            return "gap", f"token {at} is missing: {token} instead of {right}"
        if _occurs(following, expected[max(0, at - LOOK_AHEAD_TOKENS) : at + 1]):
            return "duplicate", f"at {at} an earlier token comes again: {token} instead of {right}"
        return "foreign", f"token {at} is {token} instead of {right}"
    return None


def _occurs(tokens: Sequence[int], among: Sequence[int]) -> bool:
    return any(list(among[start : start + len(tokens)]) == list(tokens) for start in range(len(among) - len(tokens) + 1))
