"""The OpenAI API over NATS with nothing but nats-py: one answer, a stream, and a durable job.

    python openai_over_nats.py --nats nats://127.0.0.1:4222 --model demo "What is the capital of France?"

Where gateways have API keys, give one with --key.
"""

import argparse
import asyncio
import json
from typing import Any

import nats
from nats.aio.client import Client


def chat(model: str, question: str, **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 64, **more}).encode()


async def one_answer(nc: Client, model: str, question: str, headers: dict[str, str]) -> str:
    reply = await nc.request("jw.openai.chat.completions", chat(model, question), timeout=60, headers=headers)
    answer = json.loads(reply.data)
    if reply.headers is None or reply.headers["Jw-Status"] != "200":
        raise SystemExit(f"refused: {answer['error']['message']}")
    return answer["choices"][0]["message"]["content"]


async def a_stream(nc: Client, model: str, question: str, headers: dict[str, str]) -> None:
    inbox = nc.new_inbox()
    events = await nc.subscribe(inbox)
    await nc.publish("jw.openai.chat.completions", chat(model, question, stream=True), reply=inbox, headers=headers)
    while True:
        message = await events.next_msg(timeout=60)
        said = message.headers or {}
        if message.data:  # else the end marker, or a sign of life
            event = json.loads(message.data)
            if "error" in event:
                raise SystemExit(f"failed: {event['error']['message']}")
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        if "Jw-End" in said:  # the last message
            break
    print()
    await events.unsubscribe()


async def a_job(nc: Client, model: str, question: str, headers: dict[str, str]) -> str:
    """Stored when `publish` returns: it is done even if no gateway and no worker runs at this moment."""
    js = nc.jetstream()
    subject = f"jw.results-out.{nc.new_inbox().rsplit('.', 1)[-1]}"
    results = await nc.subscribe(subject)  # or later, from the stream JW_OPENAI_RESULTS: results are kept for a day
    stored = await js.publish("jw.openai.jobs.chat.completions", chat(model, question), headers={**headers, "Jw-Result-Subject": subject})
    print(f"(job {stored.seq} is stored)")
    result = await results.next_msg(timeout=600)
    return json.loads(result.data)["choices"][0]["message"]["content"]


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("question")
    options.add_argument("--nats", default="nats://127.0.0.1:4222")
    options.add_argument("--model", default="demo")
    options.add_argument("--key", default="")
    given = options.parse_args()
    headers = {"Authorization": f"Bearer {given.key}"} if given.key else {"X-Request-Id": "an-id-of-your-own"}
    nc = await nats.connect(given.nats)
    try:
        print("answer:", await one_answer(nc, given.model, given.question, headers))
        print("stream: ", end="")
        await a_stream(nc, given.model, given.question, headers)
        print("job:", await a_job(nc, given.model, given.question, headers))
    finally:
        await nc.close()


if __name__ == "__main__":
    asyncio.run(main())
