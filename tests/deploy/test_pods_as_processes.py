"""The pods of the chart's trial, run as processes of this machine: their own broker configuration, commands, variables, probes and ends."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from .test_helm_chart import EXAMPLES, Object, container, pods, render
from .test_up import ajetwake

JETWAKE = (sys.executable, "-m", "jetwake.deploy.cli")


def filled_in(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


@asynccontextmanager
async def broker(objects: list[Object], folder: Path) -> AsyncIterator[str]:
    """As its ConfigMap says, on a port that is free, with its data in `folder`."""
    from jetwake.deploy.nats_server import find_binary

    (text,) = [found["data"]["nats.conf"] for found in objects if found["kind"] == "ConfigMap"]
    text = text.replace("port: 4222", 'listen: "127.0.0.1:-1"').replace("http: 8222", "").replace("/data", str(folder / "data"))
    text = text.replace("/run/nats", str(folder))
    (folder / "nats.conf").write_text(text)
    log = folder / "nats.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            find_binary(), "-c", str(folder / "nats.conf"), env={"POD_NAME": "jw-nats-0"}, stdout=out, stderr=out
        )
    try:
        await until(lambda: "Server is ready" in log.read_text() or process.returncode is not None)
        yield "nats://" + re.findall(r"Listening for client connections on (\S+)", log.read_text())[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(fact: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not fact():
            await asyncio.sleep(0.05)


class Pod:
    """`name` is what Kubernetes would call it."""

    def __init__(self, pod: Object, name: str, url: str, folder: Path) -> None:
        self.grace_s = float(pod["spec"]["terminationGracePeriodSeconds"])
        self.name = name
        self.health_file = folder / name / "health.json"
        made = container(pod)
        known = {"POD_NAME": name, "POD_IP": "127.0.0.1"}
        given = {variable["name"]: filled_in(variable["value"], known) for variable in made["env"] if "value" in variable}
        self.environment = os.environ | given | {"JETWAKE_NATS_URL": url, "JETWAKE_HEALTH_FILE": str(self.health_file)}
        self._arguments = [filled_in(word, known) for word in made["args"]]
        self._probe: list[str] = made["readinessProbe"]["exec"]["command"][1:]

    @asynccontextmanager
    async def run(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(*JETWAKE, *self._arguments, env=self.environment, stderr=asyncio.subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def ready(self) -> None:
        """Its own probe says so, once its file does."""
        await until(lambda: self.health_file.exists() and json.loads(self.health_file.read_text())["state"] == "ready")
        asked = await ajetwake(self.environment, *self._probe)
        assert (asked.returncode, asked.stdout) == (0, f"{self.name}: ready\n")


async def test_a_trial_serves_and_ends(tmp_path: Path) -> None:
    objects = render(EXAMPLES["trial-without-gpus"])
    async with broker(objects, tmp_path) as url, AsyncExitStack() as stack:
        there = {
            name: Pod(pod, f"jw-jetwake-{name}-7d9f8c6b5-abcde", url, tmp_path)
            for component, pod in pods(objects)
            if component in ("router", "worker")
            for name in [pod["metadata"]["labels"].get("jetwake-role", component)]
        }
        processes = {name: await stack.enter_async_context(pod.run()) for name, pod in there.items()}
        assert set(processes) == {"router", "prefill", "decode"}
        await asyncio.gather(*(pod.ready() for pod in there.values()))
        answered = await ajetwake(there["router"].environment, "ask", "hello", "--max-tokens", "4", "--json", "--timeout-s", "50")
        assert answered.returncode == 0, answered.stderr
        answer = json.loads(answered.stdout)
        assert (answer["prefill_worker"], answer["decode_worker"]) == (there["prefill"].name, there["decode"].name)
        assert answer["kv_bytes"] > 0
        for name, process in processes.items():
            process.terminate()
            async with asyncio.timeout(there[name].grace_s):
                assert await process.wait() == 0, name
