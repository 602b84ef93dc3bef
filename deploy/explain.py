"""`jetwake explain`: why a request went where it went, or where a prompt would go now."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..pipeline.settings import BrokerSettings
from ..producers.client import Client
from ..schemas.errors import NoWorker
from ..schemas.routing import Explanation


async def explain(broker: BrokerSettings, subject: str, model: str | None, raw: bool) -> Explanation:
    """`subject`: a request id that a router remembers, else a prompt. Raises what `Client.prepare` raises, and NoWorker."""
    async with Client.connect(broker) as client:
        if " " not in subject:
            try:
                return await client.explain(request_id=subject)
            except NoWorker:
                pass  # no such request: then it is a prompt of one word
        prompt = subject if raw else [{"role": "user", "content": subject}]
        return await client.explain(prompt, model=model)


def print_explanation(explanation: Explanation, as_json: bool) -> None:
    if as_json:
        print(explanation.model_dump_json())
        return
    console = Console()
    where = f"to {explanation.lane}" if explanation.lane else "nowhere"
    console.print(f"{explanation.router}, policy {explanation.policy}: {where}", highlight=False)
    console.print(explanation.reason, highlight=False)
    if explanation.considered:
        table = Table(box=SIMPLE)
        for heading in ("lane", "role", "score", "what is known"):
            table.add_column(heading)
        for lane in explanation.considered:
            table.add_row(lane.lane, lane.role, f"{lane.score:.4f}", lane.words)
        console.print(table)
