"""A workload of agents, made from a seed: many sessions of several turns, which share a few long prefixes (tool definitions).

Pure: no clock, no files. The same settings give the same requests, in order of their times. A request knows what its prompt is made
of; the tokens themselves are made when `prompt` is called, so that a long workload takes little memory. Each turn's prompt
is the one before, a stand-in for its answer (what a model really answers is not known here), and what the user says next.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist

from ...schemas.errors import SetupError

Range = tuple[int, int]
"""Both ends included, each length as likely as another."""


@dataclass(frozen=True)
class Skewed:
    """Lengths as real prompts have them: many short ones and a long tail (log-normal), held between `least` and `most`.

    `median` and `mean` are those before it is held there.
    """

    median: float
    mean: float
    least: int
    most: int

    def __post_init__(self) -> None:
        """Raises SetupError."""
        if not 0 < self.median <= self.mean or not 0 <= self.least <= self.most:
            raise SetupError(f"skewed lengths need 0 < median <= mean and 0 <= least <= most, not {self}")

    @property
    def _sigma(self) -> float:
        return sqrt(2 * log(self.mean / self.median))

    def draw(self, random: Random) -> int:
        return self._held(random.lognormvariate(log(self.median), self._sigma))

    def spread(self, count: int, random: Random) -> list[int]:
        """So many at once, in random order, which together are as near to the distribution as so many can be: no luck in the tail."""
        normal = NormalDist(log(self.median), self._sigma or 1e-9)
        values = [self._held(exp(normal.inv_cdf((place + 0.5) / count))) for place in range(count)]
        random.shuffle(values)
        return values

    def _held(self, value: float) -> int:
        return min(max(round(value), self.least), self.most)


Lengths = Range | Skewed


def parse_lengths(text: str, option: str) -> Lengths:
    """`LOW-HIGH`, or with a long tail `LOW-HIGH:MEDIAN:MEAN`; one number is always that. Raises SetupError."""
    bounds, _, tail = text.partition(":")
    low, _, high = bounds.partition("-")
    try:
        ends = int(low), int(high or low)
        if not tail:
            return ends
        median, mean = map(float, tail.split(":"))
    except ValueError:
        raise SetupError(f"{option} takes LOW-HIGH or LOW-HIGH:MEDIAN:MEAN, such as 50-250 or 4-12000:60:1100, not {text!r}") from None
    return Skewed(median, mean, *ends)


def draw(lengths: Lengths, random: Random) -> int:
    return lengths.draw(random) if isinstance(lengths, Skewed) else random.randint(*lengths)


@dataclass(frozen=True)
class AgentSettings:
    """`open_sessions`: the newest sessions, among which the next turn is drawn; older ones have ended.

    `sharing`: how unlike in use the prefixes are: the k-th is taken in proportion to `k ** -sharing` (Zipf); 0: all alike.
    `first_tokens`: what the user says in a session's first turn; without it as in the others, `user_tokens`. `name`: workloads of
    different names have no tokens in common.

    Arrivals are a Poisson process of single requests and of bursts: `burst_share` of the requests come in bursts of
    `burst_requests`, `burst_gap_s` apart and on one prefix, as agents fan out. `least_gap_s`: between two turns of a session, as long
    as there are sessions left to open instead.
    """

    requests: int = 500
    rate_per_s: float = 12.0
    sessions: int = 200
    open_sessions: int = 40
    prefixes: int = 20
    prefix_tokens: Lengths = (4000, 12_000)
    sharing: float = 0.0
    first_tokens: Lengths | None = None
    user_tokens: Lengths = (50, 250)
    answer_tokens: Lengths = (8, 24)
    burst_share: float = 0.2
    burst_requests: Range = (3, 8)
    burst_gap_s: float = 0.01
    least_gap_s: float = 1.0
    vocabulary_size: int = 32_000
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        """Raises SetupError."""
        for name in ("requests", "rate_per_s", "sessions", "open_sessions", "prefixes", "vocabulary_size"):
            if getattr(self, name) <= 0:
                raise SetupError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("prefix_tokens", "first_tokens", "user_tokens", "answer_tokens", "burst_requests"):
            lengths: Lengths | None = getattr(self, name)
            if lengths is None:
                continue
            low, high = (lengths.least, lengths.most) if isinstance(lengths, Skewed) else lengths
            if not 1 <= low <= high:
                raise SetupError(f"{name} must be a range that starts at 1 or above, not {low} to {high}")
        if self.sharing < 0:
            raise SetupError(f"sharing must be 0 or above, not {self.sharing}")
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
    prefixes = [Segment(f"{settings.name}prefix-{number}", draw(settings.prefix_tokens, random)) for number in range(settings.prefixes)]
    open_sessions = deque[_Session](maxlen=settings.open_sessions)
    unopened, opened = min(settings.sessions, settings.requests), 0
    firsts = settings.first_tokens.spread(unopened, random) if isinstance(settings.first_tokens, Skewed) else None
    popular = _Popularity(settings.prefixes, settings.sharing)
    for place, (at_s, hot_prefix) in enumerate(_arrivals(settings, popular, random)):
        session = None
        if random.random() * (settings.requests - place) >= unopened:
            session = _rested(open_sessions, hot_prefix, at_s - settings.least_gap_s, random)
        if session is None and unopened:
            prefix = popular.draw(random) if hot_prefix is None else hot_prefix
            session = _Session(opened, prefix, [prefixes[prefix]])
            open_sessions.append(session)
            unopened, opened = unopened - 1, opened + 1
        session = session or min(open_sessions, key=lambda one: one.last_at_s)
        yield _turn(session, at_s, _said_tokens(session, firsts, settings, random), settings, random)


class _Popularity:
    def __init__(self, prefixes: int, sharing: float) -> None:
        self._prefixes = range(prefixes)
        self._shares = list(accumulate(rank**-sharing for rank in range(1, prefixes + 1))) if sharing else None

    def draw(self, random: Random) -> int:
        if self._shares is None:
            return random.randrange(len(self._prefixes))
        return random.choices(self._prefixes, cum_weights=self._shares)[0]


def _arrivals(settings: AgentSettings, popular: _Popularity, random: Random) -> list[tuple[float, int | None]]:
    """Times, and for those in a burst its prefix. A burst may still go on when the next single request comes."""
    share, mean_burst = settings.burst_share, sum(settings.burst_requests) / 2
    burst_chance = share / (mean_burst - share * (mean_burst - 1))
    per_event = 1 + burst_chance * (mean_burst - 1)
    arrivals, at_s = list[tuple[float, int | None]](), 0.0
    while len(arrivals) < settings.requests:
        at_s += random.expovariate(settings.rate_per_s / per_event)
        if random.random() < burst_chance:
            prefix = popular.draw(random)
            arrivals += [(at_s + step * settings.burst_gap_s, prefix) for step in range(random.randint(*settings.burst_requests))]
        else:
            arrivals.append((at_s, None))
    arrivals.sort(key=lambda arrival: arrival[0])
    return list(islice(arrivals, settings.requests))


def _rested(open_sessions: Iterable[_Session], prefix: int | None, silent_since_s: float, random: Random) -> _Session | None:
    """One that has been silent long enough, of the burst's prefix where there is a burst."""
    fitting = [one for one in open_sessions if one.last_at_s <= silent_since_s and prefix in (None, one.prefix)]
    return random.choice(fitting) if fitting else None


def _said_tokens(session: _Session, firsts: list[int] | None, settings: AgentSettings, random: Random) -> int:
    if session.turns or settings.first_tokens is None:
        return draw(settings.user_tokens, random)
    return firsts[session.number] if firsts else draw(settings.first_tokens, random)


def _turn(session: _Session, at_s: float, said_tokens: int, settings: AgentSettings, random: Random) -> AgentRequest:
    name = f"{settings.name}session-{session.number}/turn-{session.turns}"
    session.segments.append(Segment(f"{name}/user", said_tokens))
    request = AgentRequest(
        at_s=at_s,
        session=session.number,
        turn=session.turns,
        prefix=session.prefix,
        max_tokens=draw(settings.answer_tokens, random),
        segments=tuple(session.segments),
        vocabulary_size=settings.vocabulary_size,
        seed=settings.seed,
    )
    session.segments.append(Segment(f"{name}/answer", request.max_tokens))
    session.turns, session.last_at_s = session.turns + 1, at_s
    return request
