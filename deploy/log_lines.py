"""How a process's log lines look: text for people, or one JSON object a line. Both end up on standard error.

What a line is about, as far as whoever wrote it said so: `request_id`, `attempt`, `worker` (`pipeline.about`).
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ABOUT = ("request_id", "attempt", "worker")


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the parent's name for it
        said = " ".join(f"{name}={value}" for name, value in about(record).items())
        return super().formatMessage(record) + (f" [{said}]" if said else "")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.msecs)
        fields: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **about(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def about(record: logging.LogRecord) -> Mapping[str, Any]:
    found = {name: getattr(record, name, None) for name in ABOUT}
    return {name: value for name, value in found.items() if value not in (None, "")}


def start_logging(log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Of this process, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
