"""The pods of the chart's trial, run as processes of this machine: their broker with TLS and users, commands, variables, probes and ends."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from jetwake.deploy.certificates import AUTHORITY, CLIENT, SERVER, certificate_file, client_files, key_file, write_certificates
from jetwake.deploy.nats_server import find_binary
from jetwake.deploy.nats_users import ACCOUNTS_FILE, User, common_environment, settings_of, users_of, write_users

from .test_helm_chart import EXAMPLES, Object, container, pods, render
from .test_up import ajetwake

JETWAKE = (sys.executable, "-m", "jetwake.deploy.cli")
CLOSED = EXAMPLES["closed-cluster"]
TRIAL: dict[str, Any] = EXAMPLES["trial-without-gpus"] | {"nats": CLOSED["nats"] | {"own": CLOSED["nats"]["own"] | {"replicas": 1}}}


def filled_in(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def write_secrets(folder: Path) -> Path:
    """As docs/installing.md makes them, where the pods have them mounted, under `folder`. Gives the folder of keys and certificates."""
    made = folder / "made"
    write_certificates(made, ["127.0.0.1"], days=2)
    write_users(made, users_of([], ["ops"], []), [], common_environment("", client_files(made)))
    etc = folder / "etc"
    for mount, name in (("nats-tls", SERVER), ("jetwake/nats-ca", CLIENT), ("jetwake/nats-client", CLIENT)):
        (etc / mount).mkdir(parents=True)
        for file, of in (
            ("ca.crt", certificate_file(made, AUTHORITY)),
            ("tls.crt", certificate_file(made, name)),
            ("tls.key", key_file(made, name)),
        ):
            (etc / mount / file).symlink_to(of)
    (etc / "nats").mkdir()
    (etc / "nats-accounts").mkdir()
    (etc / "nats-accounts" / ACCOUNTS_FILE).symlink_to(made / ACCOUNTS_FILE)
    (etc / "jetwake" / "nats-user").symlink_to(made / "users")
    return made


def environment_of(made: Path, user: User) -> dict[str, str]:
    return os.environ | dict(line.split("=", 1) for line in user.file(made, "env").read_text().splitlines())


@asynccontextmanager
async def broker(objects: list[Object], folder: Path) -> AsyncIterator[str]:
    """As its ConfigMap says, on a port that is free, with its files under `folder`."""
    (text,) = [found["data"]["nats.conf"] for found in objects if found["kind"] == "ConfigMap"]
    text = text.replace("port: 4222", 'listen: "127.0.0.1:-1"').replace("http: 8222", "")
    for path in ("/data", "/run/nats", "/etc/nats-tls"):
        text = text.replace(path, f"{folder}{path}")
    (folder / "run" / "nats").mkdir(parents=True)
    config, log = folder / "etc" / "nats" / "nats.conf", folder / "nats.log"
    config.write_text(text)
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            find_binary(), "-c", str(config), env={"POD_NAME": "jw-nats-0"}, stdout=out, stderr=out
        )
    try:
        await until(lambda: "Server is ready" in log.read_text() or process.returncode is not None)
        yield "nats://" + re.findall(r"Listening for client connections on (\S+)", log.read_text())[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(fact: Callable[[], bool], timeout_s: float = 150.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not fact():
            await asyncio.sleep(0.05)


class Pod:
    """`name` is what Kubernetes would call it."""

    def __init__(self, pod: Object, name: str, url: str, folder: Path) -> None:
        self.grace_s = float(pod["spec"]["terminationGracePeriodSeconds"])
        self.name = name
        self.health_file = folder / "run" / name / "health.json"
        made = container(pod)
        known = {"POD_NAME": name, "POD_IP": "127.0.0.1"}
        given = {one["name"]: filled_in(one["value"], known).replace("/etc/", f"{folder}/etc/") for one in made["env"] if "value" in one}
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


async def test_a_closed_trial_serves_and_ends(tmp_path: Path) -> None:
    objects = render(TRIAL)
    made = write_secrets(tmp_path)
    async with broker(objects, tmp_path) as url, AsyncExitStack() as stack:
        there = {
            name: Pod(pod, f"jw-jetwake-{name}-7d9f8c6b5-abcde", url, tmp_path)
            for component, pod in pods(objects)
            if component in ("router", "worker")
            for name in [pod["metadata"]["labels"].get("jetwake-role", component)]
        }
        declared = await ajetwake(environment_of(made, User("admin")), "nats", "declare", "--nats-url", url)
        assert declared.returncode == 0, declared.stderr
        processes = {name: await stack.enter_async_context(pod.run()) for name, pod in there.items()}
        assert set(processes) == {"router", "prefill", "decode"}
        await asyncio.gather(*(pod.ready() for pod in there.values()))
        arguments = ("ask", "hello", "--max-tokens", "4", "--json", "--timeout-s", "50", "--nats-url", url)
        answered = await ajetwake(environment_of(made, User("client", "ops")), *arguments)
        assert answered.returncode == 0, answered.stderr
        answer = json.loads(answered.stdout)
        assert (answer["prefill_worker"], answer["decode_worker"]) == (there["prefill"].name, there["decode"].name)
        assert answer["kv_bytes"] > 0
        for name, process in processes.items():
            process.terminate()
            async with asyncio.timeout(there[name].grace_s):
                assert await process.wait() == 0, name


def test_each_role_connects_as_its_user() -> None:
    values = CLOSED | {
        "pools": {"aggregated": {"main": {}}},
        "nats": CLOSED["nats"] | {"users": {**CLOSED["nats"]["users"], "aggregated": "a"}},
    }
    seen = set[str]()
    for component, pod in pods(render(values)):
        if component == "nats":
            continue
        command = container(pod)["args"][0]
        given = {one["name"]: one["value"] for one in container(pod)["env"] if one["name"].startswith("JETWAKE_NATS_") and "value" in one}
        user = User(command, "$(POD_NAME)" if command == "gateway" else "")
        expected = settings_of(user, user.file(Path("/etc/jetwake"), "nk"))
        expected["JETWAKE_NATS_NKEY_FILE"] = re.sub(r"users/(gateway/)?", "nats-user/", expected["JETWAKE_NATS_NKEY_FILE"])
        assert expected.items() <= given.items(), command
        seen.add(command)
    assert seen == {"router", "prefill", "decode", "aggregated", "gateway"}
