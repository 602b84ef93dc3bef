"""A service that summarises documents dropped on a subject, with nothing but nats-py.

    python summarise_documents.py --nats nats://127.0.0.1:4222 --model demo

Publish a text to `docs.in.<name>`; its summary appears on `docs.summary.<name>`. Documents become durable jobs: each is summarised
once, whether or not a gateway, a worker or this service runs at that moment. The service also follows the events of its requests,
and prints what each summary cost.
"""

import argparse
import asyncio
import json

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingThere
from nats.js.api import ConsumerConfig, StreamConfig


class Summariser:
    def __init__(self, nc: Client, model: str) -> None:
        self._nc = nc
        self._js = nc.jetstream()
        self._model = model

    async def open(self) -> None:
        """Documents are kept until they are jobs; summaries are kept for whoever comes later."""
        await self._js.add_stream(StreamConfig(name="DOCS", subjects=["docs.in.>", "docs.summary.>"], max_age=7 * 86_400))
        await self._nc.subscribe("jw.events.>", cb=self._count_cost)

    async def run(self) -> None:
        documents = await self._js.pull_subscribe("docs.in.>", "summariser", config=ConsumerConfig(filter_subject="docs.in.>"))
        results = await self._js.pull_subscribe(
            "jw.results-out.summaries.>",
            "summaries",
            stream="JW_OPENAI_RESULTS",
            config=ConsumerConfig(filter_subject="jw.results-out.summaries.>"),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._each(documents, self._ask))
            tasks.create_task(self._each(results, self._tell))

    async def _each(self, subscription, handle) -> None:
        while True:
            try:
                messages = await subscription.fetch(10, timeout=5)
            except NothingThere:
                continue
            for message in messages:
                await handle(message)
                await message.ack()

    async def _ask(self, document: Msg) -> None:
        name = document.subject.removeprefix("docs.in.")
        question = f"Summarise this document in two sentences.\n\n{document.data.decode()}"
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "max_tokens": 128}
        headers = {
            "Jw-Result-Subject": f"jw.results-out.summaries.{name}",
            "Jw-Metadata": json.dumps({"document": name}),
            # A document that is handed to us twice is one job.
            "Nats-Msg-Id": f"summary-of-{name}-{document.metadata.sequence.stream}",
        }
        await self._js.publish("jw.openai.jobs.chat.completions", json.dumps(body).encode(), headers=headers)
        print(f"{name}: asked", flush=True)

    async def _tell(self, result: Msg) -> None:
        name = result.subject.removeprefix("jw.results-out.summaries.")
        answer = json.loads(result.data)
        failed = "error" in answer
        summary = f"no summary: {answer['error']['message']}" if failed else answer["choices"][0]["message"]["content"]
        message_id = (result.headers or {}).get("Nats-Msg-Id", "")
        await self._js.publish(f"docs.summary.{name}", summary.encode(), headers={"Nats-Msg-Id": message_id} if message_id else None)
        print(f"{name}: {'failed' if failed else 'summarised'}", flush=True)

    async def _count_cost(self, message: Msg) -> None:
        event = json.loads(message.data)
        name = event["metadata"].get("document")
        if name:
            words = f"{event['prompt_tokens']} tokens in ({event['cached_tokens']} cached), {event['completion_tokens']} out"
            print(f"{name}: {event['outcome']}, {words}", flush=True)


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--nats", default="nats://127.0.0.1:4222")
    options.add_argument("--model", default="demo")
    given = options.parse_args()
    nc = await nats.connect(given.nats)
    service = Summariser(nc, given.model)
    await service.open()
    print("ready", flush=True)
    await service.run()


if __name__ == "__main__":
    asyncio.run(main())
