"""Writes deploy/grafana/pipeline.json: the dashboard as data, made of the names in schemas/signals.py. Run it after a change there or here.

    python -m tests.deploy.write_dashboards

`expressions` gives what its panels ask Prometheus for; a test parses them.
"""

from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DataSourceRef,
    VariableHide,
    VariableRefresh,
    VariableSort,
)

from jetwake.schemas import signals as s
from jetwake.schemas.timeline import ENDS_AT, TTFT_STAGES

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "pipeline.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RATE = "$__rate_interval"

Query = tuple[str, str]
"""An expression, and what its lines are called."""


def label(given: s.Label) -> str:
    return given.name.replace(".", "_")


def per_second(metric: s.Metric, by: Sequence[s.Label] = (), of: str = "") -> str:
    return f"sum{_by(by)} (rate({metric.prometheus}{{{_picked(of)}}}[{RATE}]))"


def quantile(share: float, metric: s.Metric, of: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric.prometheus}_bucket{{{_picked(of)}}}[{RATE}])))"


def quantiles(metric: s.Metric, of: str = "") -> list[Query]:
    return [(quantile(share, metric, of), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def mean(metric: s.Metric, by: Sequence[s.Label] = (), of: str = "") -> str:
    total, count = (f"sum{_by(by)} (rate({metric.prometheus}_{part}{{{_picked(of)}}}[{RATE}]))" for part in ("sum", "count"))
    return f"{total} / {count}"


def told_by_each(metric: s.Metric, by: Sequence[s.Label]) -> str:
    """All routers tell of the same queues: one of them is enough."""
    return f"max{_by(by)} ({metric.prometheus}{{{_picked()}}})"


def _by(labels: Sequence[s.Label]) -> str:
    return f" by ({', '.join(map(label, labels))})" if labels else ""


def _picked(of: str = "") -> str:
    return ", ".join(filter(None, ['job=~"$job"', of]))


def _stage(stages: Sequence[str]) -> str:
    return f'{label(s.STAGE)}=~"{"|".join(stages)}"'


def _legend(*labels: s.Label) -> str:
    return " ".join(f"{{{{{label(given)}}}}}" for given in labels)


AFTER_FIRST = [stage for stage in ENDS_AT if stage not in TTFT_STAGES and stage != "generation"]

ROWS: dict[str, list[tuple[str, str, str, list[Query]]]] = {
    "Answers": [
        (
            "Time to first token",
            "s",
            "As clients see it, from their HTTP request on; without the class batch.",
            quantiles(s.TIME_TO_FIRST_TOKEN),
        ),
        ("Between tokens", "s", "Of answers in progress, at the gateway.", quantiles(s.INTER_TOKEN_LATENCY)),
        ("Whole requests", "s", "From the HTTP request to the end of its answers.", quantiles(s.REQUEST_DURATION)),
        (
            "Requests",
            "reqps",
            "How they ended, and what was refused before it was accepted.",
            [(per_second(s.REQUESTS_ENDED, [s.OUTCOME]), _legend(s.OUTCOME)), (per_second(s.REQUESTS_REFUSED), "refused")],
        ),
        (
            "Tokens",
            "short",
            "Prompt tokens prefilled, and tokens made for answers, each second.",
            [(per_second(s.PREFILL_PROMPT_TOKENS), "prompt"), (per_second(s.ANSWER_TOKENS), "answer")],
        ),
        (
            "Open responses",
            "short",
            "HTTP responses that have not ended.",
            [(f"sum({s.GATEWAY_OPEN_RESPONSES.prometheus}{{{_picked()}}})", "open")],
        ),
    ],
    "Where the time goes": [
        (
            "Parts of the time to first token (mean, stacked)",
            "s",
            "Each part is told by whoever ended it. The largest is what to look at.",
            [(mean(s.STAGE_DURATION, [s.STAGE], _stage([*TTFT_STAGES, s.DELIVERY])), _legend(s.STAGE))],
        ),
        (
            "Between first and second token (mean, stacked)",
            "s",
            "The handoff to a decode worker: no part of the time to first token.",
            [(mean(s.STAGE_DURATION, [s.STAGE], _stage(AFTER_FIRST)), _legend(s.STAGE))],
        ),
    ],
    "Queues": [
        (
            "Waiting",
            "short",
            "In a queue, held by nobody.",
            [(told_by_each(s.QUEUE_WAITING, [s.QUEUE, s.QUEUE_OWNER]), _legend(s.QUEUE, s.QUEUE_OWNER))],
        ),
        (
            "Age of the oldest",
            "s",
            "Requests: no worker has room. Handoffs: that pool is short of decode workers.",
            [(told_by_each(s.QUEUE_OLDEST_AGE, [s.QUEUE, s.QUEUE_OWNER]), _legend(s.QUEUE, s.QUEUE_OWNER))],
        ),
        (
            "In hand",
            "short",
            "Taken from a queue and not done.",
            [(told_by_each(s.QUEUE_IN_HAND, [s.QUEUE, s.QUEUE_OWNER]), _legend(s.QUEUE, s.QUEUE_OWNER))],
        ),
    ],
    "Prefix cache and routing": [
        (
            "Prompt tokens found in a cache",
            "percentunit",
            "What routers expected, and what the workers then found. Far apart: the index is wrong.",
            [
                (f"{per_second(s.PREFILL_CACHED_TOKENS)} / {per_second(s.PREFILL_PROMPT_TOKENS)}", "found"),
                (f"{per_second(s.PREFILL_PREDICTED_TOKENS)} / {per_second(s.PREFILL_PROMPT_TOKENS)}", "expected"),
            ],
        ),
        ("Decisions", "reqps", "Requests given to a worker.", [(per_second(s.ROUTER_DECISIONS, [s.POLICY]), _legend(s.POLICY))]),
        ("Looking up a prompt", "s", "Hashing it, and finding who holds how much.", quantiles(s.ROUTER_LOOKUP_DURATION)),
    ],
    "Transfers": [
        ("KV cache pulled", "Bps", "Through NIXL, all links together.", [(per_second(s.TRANSFER_BYTES), "pulled")]),
        ("Time of a transfer", "s", "As NIXL says.", quantiles(s.TRANSFER_DURATION)),
        (
            "Broken",
            "short",
            "Each second. Leases expire when nobody pulled in time.",
            [(per_second(s.TRANSFER_FAILURES), "failed pulls"), (per_second(s.LEASES_EXPIRED), "expired leases")],
        ),
    ],
    "Workers": [
        (
            "Running",
            "short",
            "Requests in hand.",
            [(f"sum by ({label(s.ROLE)}, {label(s.WORKER)}) ({s.WORKER_RUNNING.prometheus}{{{_picked()}}})", _legend(s.WORKER))],
        ),
        (
            "KV blocks in use",
            "percentunit",
            "A full decode worker takes no more handoffs.",
            [
                (
                    f"{s.WORKER_USED_BLOCKS.prometheus}{{{_picked()}}} / "
                    f"({s.WORKER_USED_BLOCKS.prometheus}{{{_picked()}}} + {s.WORKER_FREE_BLOCKS.prometheus}{{{_picked()}}})",
                    _legend(s.WORKER),
                )
            ],
        ),
        (
            "Blocks that wait to be pulled",
            "short",
            "A prefill worker that keeps too many fetches nothing.",
            [(f"{s.WORKER_HELD_BLOCKS.prometheus}{{{_picked()}}}", _legend(s.WORKER))],
        ),
        (
            "Since the engine made progress",
            "s",
            "0 while it has nothing to do. At the stall limit the worker ends.",
            [(f"{s.WORKER_STEP_AGE.prometheus}{{{_picked()}}}", _legend(s.WORKER))],
        ),
    ],
    "Failures and the broker": [
        (
            "Attempts after the first",
            "reqps",
            "By the code of the error; a fault counts, a drain does not.",
            [(per_second(s.REQUESTS_RETRIED, [s.CODE, s.FAULT]), _legend(s.CODE, s.FAULT))],
        ),
        (
            "Requests that failed",
            "reqps",
            "By the code of the error.",
            [(per_second(s.REQUESTS_ENDED, [s.CODE], f'{label(s.OUTCOME)}="failed"'), _legend(s.CODE))],
        ),
        (
            "Dead letters",
            "short",
            "Kept for an operator: jetwake dead list.",
            [(f"sum by ({label(s.LETTER_STAGE)}) (increase({s.DEAD_LETTERS.prometheus}{{{_picked()}}}[{RATE}]))", _legend(s.LETTER_STAGE))],
        ),
        (
            "Broker",
            "s",
            "A question and its answer; a message until it is stored.",
            [(quantile(0.99, s.BUS_ROUND_TRIP), "round trip p99"), (quantile(0.99, s.BUS_STORE_DURATION), "stored p99")],
        ),
    ],
}


def expressions() -> list[str]:
    return [expression for panels in ROWS.values() for *_, queries in panels for expression, _ in queries]


def panel(title: str, unit: str, about: str, queries: list[Query], width: int) -> timeseries.Panel:
    stacked = "stacked" in title
    made = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(60 if stacked else 5)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL if stacked else StackingMode.NONE))
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .min(0)
    )
    for number, (expression, legend) in enumerate(queries):
        made = made.with_target(
            prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expression).legend_format(legend).datasource(SOURCE)
        )
    return made


def build() -> Dashboard:
    made = (
        dashboard.Dashboard("Jetwake: the pipeline")
        .uid("jetwake-pipeline")
        .tags(["jetwake"])
        .description("From the request to its last token: what clients see, where the time goes, which pool is short.")
        .editable()
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus").hide(VariableHide.DONT_HIDE))
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .datasource(SOURCE)
            .query(f"label_values({s.BUS_ROUND_TRIP.prometheus}_count, job)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
        )
    )
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for name, unit, about, queries in panels:
            columns = 3 if len(panels) in (3, 6) else 2
            made = made.with_panel(panel(name, unit, about, queries, 24 // columns))
    return made.build()


def text() -> str:
    board = build()
    for number, made in enumerate(board.panels or [], start=1):
        made.id_val = number  # pyright: ignore[reportAttributeAccessIssue]
    return JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
