"""The tables of docs/signals.md, made of `signals`. Run as a program, it writes them there anew."""

import sys
from pathlib import Path

from .signals import ATTRIBUTES, METRICS, SPANS, Label, Metric

BEGIN, END = "<!-- made of schemas/signals.py: begin -->\n", "<!-- end -->\n"


def tables() -> str:
    labels = {label.name: label for metric in METRICS for label in metric.labels}
    lines = ["### Metrics", "", "| metric | in Prometheus | kind | unit | told by | labels | what it is |", "|---|---|---|---|---|---|---|"]
    lines += [_metric(metric) for metric in METRICS]
    lines += ["", "### Labels", "", "| label | values |", "|---|---|"]
    lines += [f"| `{name}` | {_values(label)} |" for name, label in sorted(labels.items())]
    lines += ["", "### Spans", "", "| span | what it is |", "|---|---|"]
    lines += [f"| `{span.name}` | {span.meaning} |" for span in SPANS]
    lines += ["", "### Attributes of spans and events", "", "| attribute | what it is |", "|---|---|"]
    lines += [f"| `{attribute.name}` | {attribute.meaning} |" for attribute in ATTRIBUTES]
    return "\n".join(lines) + "\n"


def _metric(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    return f"| `{metric.name}` | `{metric.prometheus}` | {metric.kind} | {metric.unit} | {metric.role} | {labels} | {metric.meaning} |"


def _values(label: Label) -> str:
    if not label.values:
        return label.meaning
    return f"{label.meaning}: {', '.join(f'`{value}`' if value else 'empty' for value in label.values)}"


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
