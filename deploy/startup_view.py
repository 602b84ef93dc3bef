"""What a person sees while a system starts: one line a process, live on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .supervisor import Child


class _Console(Console):
    """What runs goes on when nobody reads any more (`2>&1 | head`). rich would end the process amid the starts of others, which hang then."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class StartupView:
    """Everything but the word `ready` goes to standard error, so that a script reads standard output for one line."""

    def __init__(self, say_ready: bool = True, api_url: str = "") -> None:
        """`api_url`: where the OpenAI API will be, if there is one."""
        self._console = _Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._say_ready = say_ready
        self._api_url = api_url
        self._told: dict[str, str] = {}
        self._started_s = time.monotonic()
        self._open = False

    def __enter__(self) -> "StartupView":
        if self._live is not None:
            self._live.start()
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None and self._open:
            self._live.stop()
        self._open = False

    def show(self, children: Sequence[Child]) -> None:
        if self._live is not None and self._open:
            self._live.update(self._table(children), refresh=True)
            return
        for child in children:
            if self._told.get(child.name) != child.state:
                self._told[child.name] = child.state
                self._console.print(f"{child.name}: {child.state}", highlight=False)

    def ready(self, url: str, page_url: str) -> None:
        self.close()
        self._console.print(f"serving on {url} after {time.monotonic() - self._started_s:.0f} s", highlight=False)
        if page_url:
            self._console.print(f"live page on {page_url}", highlight=False)
        if self._say_ready:
            print(f"ready {self._api_url}".rstrip(), file=sys.stdout, flush=True)

    def _table(self, children: Sequence[Child]) -> Table:
        table = Table(title="jetwake is starting (vLLM engines take half a minute)", title_justify="left")
        for heading in ("process", "state", "pid", "restarts", "log"):
            table.add_column(heading)
        for child in children:
            table.add_row(child.name, child.state, str(child.pid or ""), str(child.restarts or ""), str(child.log_file))
        return table
