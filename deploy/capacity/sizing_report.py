"""What a sizing says: a recommendation in words, a table, a page."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .grid import described
from .html_charts import Axis, lines
from .html_page import Html, Section, bars, facts, page, table
from .report import configuration_rows
from .sizing import Attempt, Candidate, Limits, Sizing


def recommendation(sizing: Sizing) -> list[str]:
    """Sentences."""
    best, limits = sizing.best, sizing.limits
    goal = f"{limits.share:.0%} of requests within {_limits(limits)}"
    if best.carried is None:
        tried = min(best.attempts, key=lambda attempt: attempt.speed)
        said = [
            f"No fleet of {sizing.gpus} GPUs gives {goal}, even at {tried.rate_per_s:.3g} requests/s: {best.fleet} comes nearest, with "
            f"{tried.share:.0%}. {_what_is_missed(tried)}"
        ]
    else:
        said = [f"{_named(best, sizing)} carries the most: {_carried(best)} requests/s with {goal}{_as_good(sizing)}."]
        own = best.own_speed
        said.append(f"At the trace's own {own.rate_per_s:.3g} requests/s its goodput is {own.goodput_per_s:.3g}/s ({own.share:.1%} good).")
        said += _against_other_kind(sizing)
        if best.failed:
            said.append(f"At {best.failed.rate_per_s:.3g}/s it fails: {_what_is_missed(best.failed)}")
    if sizing.whole is not None:
        holds = "holds" if sizing.whole.share >= limits.share else "does not hold"
        said.append(f"On the whole trace ({sizing.requests:,} requests) at that rate it {holds}: {sizing.whole.share:.1%} are good.")
    if sizing.slice_requests < sizing.requests:
        said.append(f"The search used the first {sizing.slice_requests:,} requests, with empty caches at the start: --slice takes more.")
    return said


def _as_good(sizing: Sizing) -> str:
    """Those that the search cannot tell from the best."""
    first, *others = sizing.candidates
    if first.carried is None:
        return ""
    least = first.carried.speed / (1 + sizing.tolerance)
    near = [str(one.fleet) for one in others if one.carried and one.carried.speed >= least]
    return f"; {' and '.join(near)} about as much" if near else ""


def _named(candidate: Candidate, sizing: Sizing) -> str:
    several = len({one.settings.profile for one in sizing.candidates}) > 1
    text = f"{candidate.fleet} of {candidate.settings.profile}" if several else str(candidate.fleet)
    unused = sizing.gpus - candidate.gpus
    return f"{text} ({unused} of {sizing.gpus} GPUs unused)" if unused else text


def _carried(candidate: Candidate) -> str:
    if candidate.carried is None:
        return f"below {candidate.failed.rate_per_s:.3g}" if candidate.failed else "0"
    return f"{candidate.carried.rate_per_s:.3g}" if candidate.failed else f"at least {candidate.carried.rate_per_s:.3g}"


def _against_other_kind(sizing: Sizing) -> list[str]:
    """The best of the other kind: aggregated against disaggregated."""
    best = sizing.best
    others = [one for one in sizing.candidates if one.settings.disaggregated != best.settings.disaggregated]
    if not others:
        return []
    return [f"The best {'split' if others[0].settings.disaggregated else 'aggregated fleet'}, {others[0].fleet}: {_most(others[0])}."]


def _most(candidate: Candidate) -> str:
    if candidate.failed is None or (candidate.carried is not None and candidate.failed.speed <= candidate.carried.speed * 1.2):
        return f"{_carried(candidate)} requests/s"
    return f"below {candidate.failed.rate_per_s:.3g} requests/s"


def _what_is_missed(attempt: Attempt) -> str:
    if attempt.ttft_share < attempt.itl_share:
        return f"first tokens come too late ({attempt.ttft_share:.0%} in time): prefill is the bottleneck."
    if attempt.itl_share < attempt.ttft_share:
        return f"tokens follow each other too slowly ({attempt.itl_share:.0%} in time): decode is the bottleneck."
    return f"both limits are missed ({attempt.ttft_share:.0%} each)."


def _limits(limits: Limits) -> str:
    return f"TTFT {limits.ttft_s * 1e3:,.0f} ms and ITL {limits.itl_s * 1e3:,.0f} ms"


def _rows(sizing: Sizing) -> list[list[str]]:
    several = len({one.settings.profile for one in sizing.candidates}) > 1
    return [
        [
            f"{one.fleet} {one.settings.profile}" if several else str(one.fleet),
            f"{one.own_speed.goodput_per_s:.3g}/s",
            f"{one.own_speed.share:.1%}",
            f"{one.own_speed.ttft_share:.1%}",
            f"{one.own_speed.itl_share:.1%}",
            _most(one).replace(" requests", ""),
        ]
        for one in sizing.candidates
    ]


def _headers(sizing: Sizing) -> Sequence[str]:
    rate = f"{sizing.best.own_speed.rate_per_s:.3g}/s"
    return ("fleet", f"goodput at {rate}", "good", "TTFT kept", "ITL kept", f"carries with {sizing.limits.share:.0%} good")


def _facts(sizing: Sizing) -> list[tuple[str, str]]:
    best, own = sizing.best, sizing.best.own_speed
    return [
        ("best fleet", str(best.fleet)),
        ("carries", _most(best).replace(" requests", "")),
        (f"goodput at {own.rate_per_s:.3g}/s", f"{own.goodput_per_s:.3g}/s"),
        ("good there", f"{own.share:.1%}"),
    ]


def print_sizing(sizing: Sizing) -> None:
    console = Console()
    console.print(f"{sizing.trace_name} on {sizing.gpus} GPUs, limits {_limits(sizing.limits)}", highlight=False)
    drawn = Table(box=SIMPLE)
    for place, header in enumerate(_headers(sizing)):
        drawn.add_column(header, justify="right" if place else "left")
    for place, row in enumerate(_rows(sizing)):
        drawn.add_row(*row, style="bold green" if not place and sizing.best.carried else "")
    console.print(drawn, highlight=False)
    for sentence in recommendation(sizing):
        console.print(sentence, highlight=False)


def sizing_page(sizing: Sizing) -> Html:
    curves = {
        str(one.fleet): sorted((attempt.rate_per_s, 100 * attempt.share) for attempt in one.attempts) for one in sizing.candidates[:6]
    }
    carried = [
        (str(one.fleet), one.carried.rate_per_s if one.carried else 0.0, _most(one).replace(" requests", "")) for one in sizing.candidates
    ]
    sections = [
        Section("Recommendation", [facts(_facts(sizing))], " ".join(recommendation(sizing))),
        Section("Fleets", [table(_headers(sizing), _rows(sizing))]),
        Section(
            "Rates",
            [
                bars(f"Carried with {sizing.limits.share:.0%} good", carried),
                lines("Good requests", curves, Axis("requests per second", log=True), Axis("good", "%", most=100)),
            ],
            "Where a fleet was not looked at further, because another carries more, its bar is the most that is known to hold.",
        ),
        Section("Configuration of the best", [table(["", ""], configuration_rows([described(sizing.best.settings)]))]),
    ]
    lead = f"{sizing.trace_name} on {sizing.gpus} GPUs, limits {_limits(sizing.limits)}; {sizing.replays} replays."
    return page(f"Sizing for {sizing.trace_name}", lead, sections)
