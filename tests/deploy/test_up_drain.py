"""`jetwake drain` in a system that `jetwake up` runs: a fresh process takes over, and whoever asks meanwhile is answered."""

import json
from pathlib import Path

from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import drift

from .test_up import ajetwake, descendants, environment, up  # noqa: F401  (a fixture)


async def test_a_drained_process_is_followed_by_a_fresh_one(environment: dict[str, str]) -> None:  # noqa: F811
    async with up(environment, "--prefill", "1", "--decode", "1") as process:
        before = {child.pid for child in descendants(process)}
        for name in ("prefill-1", "decode-1", "router-1"):
            drained = await ajetwake(environment, "drain", name, "--json")
            assert drained.returncode == 0, drained.stderr
            facts = json.loads(drained.stdout)
            assert (facts["name"], facts["in_time"]) == (name, True)
            asked = await ajetwake(environment, "ask", "again", "--max-tokens", "3", "--json", "--timeout-s", "50")
            assert asked.returncode == 0, asked.stderr
            assert json.loads(asked.stdout)["attempts"] == 1
        after = {child.pid for child in descendants(process)}
        assert len(after & before) == len(before) - 3  # three were replaced
        nobody = await ajetwake(environment, "drain", "nobody")
        assert (nobody.returncode, "nobody" in nobody.stderr) == (1, True)


async def test_bounds_are_given_to_all_parts(environment: dict[str, str]) -> None:  # noqa: F811
    alone = ("--prefill", "0", "--decode", "0", "--aggregated", "1")
    async with up(environment, *alone, "--limit", "max_requests=7", "--worker-option", "grace_s=3"):
        state = json.loads((Path(environment["JETWAKE_STATE_DIR"]) / "up.json").read_text())
        async with Bus.connect(BrokerSettings(url=state["nats_url"]), "looker") as bus:
            assert await drift(bus, TopologySettings(max_requests=7)) == []
