"""A workload of agents, made from a seed: many sessions of several turns, which share a few long prefixes (tool definitions).

Pure: no clock, no files. The same settings give the same requests, in order of their times. A request knows what its prompt is made
of; the tokens themselves are made when `prompt` is called, so that a long workload takes little memory. Each turn's prompt
is the one before, a stand-in for its answer (what a model really answers is not known here), and what the user says next.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from ...schemas.errors import SetupError

Range = tuple[int, int]
"""Both ends included."""


@dataclass(frozen=True)
class AgentSettings:
    """`open_sessions`: the newest sessions, among which the next turn is drawn; older ones have ended.

    Arrivals are a Poisson process of single requests and of bursts: `burst_share` of the requests come in bursts of
    `burst_requests`, `burst_gap_s` apart and on one prefix, as agents fan out. `least_gap_s`: between two turns of a session, as long
    as there are sessions left to open instead.
    """

    requests: int = 500
    rate_per_s: float = 12.0
    sessions: int = 200
    open_sessions: int = 40
    prefixes: int = 20
    prefix_tokens: Range = (4000, 12_000)
    user_tokens: Range = (50, 250)
    answer_tokens: Range = (8, 24)
    burst_share: float = 0.2
    burst_requests: Range = (3, 8)
    burst_gap_s: float = 0.01
    least_gap_s: float = 1.0
    vocabulary_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises SetupError."""
        for name in ("requests", "rate_per_s", "sessions", "open_sessions", "prefixes", "vocabulary_size"):
            if getattr(self, name) <= 0:
                raise SetupError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("prefix_tokens", "user_tokens", "answer_tokens", "burst_requests"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise SetupError(f"{name} must be a range that starts at 1 or above, not {low} to {high}")
        if not 0 <= self.burst_share < 1:
            raise SetupError(f"burst_share must be from 0 to below 1, not {self.burst_share}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt. `source` names it in its workload: equal segments have equal tokens and stand on equal ground before them."""

    source: str
    length_tokens: int

    def tokens(self, seed: int, vocabulary_size: int) -> list[int]:
        raw = Random(f"{seed}/{self.source}").randbytes(2 * self.length_tokens)
        return [value % vocabulary_size for value in memoryview(raw).cast("H")]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One turn. `at_s` counts from the start of the workload; `prefix`, `session` and `turn` from 0."""

    at_s: float
    session: int
    turn: int
    prefix: int
    max_tokens: int
    segments: tuple[Segment, ...]
    vocabulary_size: int
    seed: int

    @property
    def prompt_length_tokens(self) -> int:
        return sum(segment.length_tokens for segment in self.segments)

    def prompt(self) -> list[int]:
        """The token ids, made anew at each call."""
        return [token for segment in self.segments for token in segment.tokens(self.seed, self.vocabulary_size)]


@dataclass(slots=True)
class _Session:
    number: int
    prefix: int
    segments: list[Segment]
    turns: int = 0
    last_at_s: float = field(default=float("-inf"))


def agent_requests(settings: AgentSettings) -> Iterator[AgentRequest]:
    """The workload, in order of time: `settings.requests` requests of exactly `settings.sessions` sessions (or one for each request)."""
    random = Random(settings.seed)
    prefixes = [Segment(f"prefix-{number}", random.randint(*settings.prefix_tokens)) for number in range(settings.prefixes)]
    open_sessions = deque[_Session](maxlen=settings.open_sessions)
    unopened, opened = min(settings.sessions, settings.requests), 0
    for place, (at_s, hot_prefix) in enumerate(_arrivals(settings, random)):
        session = None
        if random.random() * (settings.requests - place) >= unopened:
            session = _rested(open_sessions, hot_prefix, at_s - settings.least_gap_s, random)
        if session is None and unopened:
            prefix = random.randrange(len(prefixes)) if hot_prefix is None else hot_prefix
            session = _Session(opened, prefix, [prefixes[prefix]])
            open_sessions.append(session)
            unopened, opened = unopened - 1, opened + 1
        yield _turn(session or min(open_sessions, key=lambda one: one.last_at_s), at_s, settings, random)


def _arrivals(settings: AgentSettings, random: Random) -> list[tuple[float, int | None]]:
    """Times, and for those in a burst its prefix. A burst may still go on when the next single request comes."""
    share, mean_burst = settings.burst_share, sum(settings.burst_requests) / 2
    burst_chance = share / (mean_burst - share * (mean_burst - 1))
    per_event = 1 + burst_chance * (mean_burst - 1)
    arrivals, at_s = list[tuple[float, int | None]](), 0.0
    while len(arrivals) < settings.requests:
        at_s += random.expovariate(settings.rate_per_s / per_event)
        if random.random() < burst_chance:
            prefix = random.randrange(settings.prefixes)
            arrivals += [(at_s + step * settings.burst_gap_s, prefix) for step in range(random.randint(*settings.burst_requests))]
        else:
            arrivals.append((at_s, None))
    arrivals.sort(key=lambda arrival: arrival[0])
    return list(islice(arrivals, settings.requests))


def _rested(open_sessions: Iterable[_Session], prefix: int | None, silent_since_s: float, random: Random) -> _Session | None:
    """One that has been silent long enough, of the burst's prefix where there is a burst."""
    fitting = [one for one in open_sessions if one.last_at_s <= silent_since_s and prefix in (None, one.prefix)]
    return random.choice(fitting) if fitting else None


def _turn(session: _Session, at_s: float, settings: AgentSettings, random: Random) -> AgentRequest:
    name = f"session-{session.number}/turn-{session.turns}"
    session.segments.append(Segment(f"{name}/user", random.randint(*settings.user_tokens)))
    request = AgentRequest(
        at_s=at_s,
        session=session.number,
        turn=session.turns,
        prefix=session.prefix,
        max_tokens=random.randint(*settings.answer_tokens),
        segments=tuple(session.segments),
        vocabulary_size=settings.vocabulary_size,
        seed=settings.seed,
    )
    session.segments.append(Segment(f"{name}/answer", request.max_tokens))
    session.turns, session.last_at_s = session.turns + 1, at_s
    return request


@dataclass(frozen=True)
class AgentStatistics:
    """`ideal_reuse`: the part of all prompt tokens that one endless cache of prompts would have held, in whole blocks."""

    requests: int
    sessions: int
    prefixes: int
    seconds: float
    mean_prompt_tokens: float
    most_prompt_tokens: int
    ideal_reuse: float


def statistics_of(requests: Iterable[AgentRequest], block_size_tokens: int = 1) -> AgentStatistics:
    """Raises ValueError when there are no requests."""
    sessions, prefixes, seen, lengths = set[int](), set[int](), set[Segment](), list[int]()
    reused_tokens, last_at_s = 0, 0.0
    for request in requests:
        sessions.add(request.session)
        prefixes.add(request.prefix)
        lengths.append(request.prompt_length_tokens)
        known = min(_leading_tokens(request.segments, seen), lengths[-1] - 1)
        reused_tokens += known // block_size_tokens * block_size_tokens
        seen.update(request.segments)
        last_at_s = max(last_at_s, request.at_s)
    if not lengths:
        raise ValueError("no requests")
    return AgentStatistics(
        requests=len(lengths),
        sessions=len(sessions),
        prefixes=len(prefixes),
        seconds=last_at_s,
        mean_prompt_tokens=sum(lengths) / len(lengths),
        most_prompt_tokens=max(lengths),
        ideal_reuse=reused_tokens / sum(lengths),
    )


def _leading_tokens(segments: Iterable[Segment], seen: set[Segment]) -> int:
    tokens = 0
    for segment in segments:
        if segment not in seen:
            break
        tokens += segment.length_tokens
    return tokens
