"""The AsyncAPI document is the one that is committed, obeys its own standard, and speaks of subjects that are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jetwake.schemas import asyncapi, subjects
from jetwake.schemas.openai_endpoints import ENDPOINTS, JOB_ENDPOINTS
from jetwake.schemas.streams import STREAMS

COMMITTED = Path(__file__).parents[2] / "docs" / "asyncapi.json"
DOCUMENT: dict[str, Any] = json.loads(asyncapi.text())


def matches(pattern: str, subject: str) -> bool:
    """As NATS does."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


def test_the_committed_copy_is_current() -> None:
    assert COMMITTED.read_text() == asyncapi.text(), f"write it anew: jetwake schemas, and its asyncapi.json to {COMMITTED.name} in docs"


def test_every_reference_leads_somewhere() -> None:
    for path in set(re.findall(r'"\$ref": "([^"]*)"', asyncapi.text())):
        part: Any = DOCUMENT
        assert path.startswith("#/")
        for name in path.removeprefix("#/").split("/"):
            part = part[name]


def test_every_subject_is_documented_with_its_parameters() -> None:
    channels = [channel for channel in DOCUMENT["channels"].values() if channel["address"]]
    addresses = {channel["address"] for channel in channels}
    assert {subjects.openai(name) for name in ENDPOINTS} | {subjects.openai_job(name) for name in JOB_ENDPOINTS} < addresses
    for channel in channels:
        assert set(re.findall(r"\{([^}]*)\}", channel["address"])) == set(channel.get("parameters", {}))
    operated = {operation["channel"]["$ref"] for operation in DOCUMENT["operations"].values()}
    assert {f"#/channels/{key}" for key, channel in DOCUMENT["channels"].items() if channel["address"]} == operated


def test_what_is_said_to_be_kept_is_in_a_stream_and_requests_are_in_none() -> None:
    def streams_of(address: str) -> list[str]:
        subject = re.sub(r"\{[^}]*\}", "x", address)
        return [spec.name for spec in STREAMS if any(matches(pattern, subject) for pattern in spec.subjects)]

    for name in ENDPOINTS:
        assert streams_of(subjects.openai(name)) == [], "a stream would answer the request with its own acknowledgement"
    for channel in DOCUMENT["channels"].values():
        if channel["address"] and ("kept" in channel["description"].lower() or "JetStream" in channel["description"]):
            assert len(streams_of(channel["address"])) == 1, channel["address"]


def test_it_obeys_the_standard(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if shutil.which("npm") is None or subprocess.run(["npm", "ping"], cwd=tmp_path, capture_output=True, timeout=60).returncode:
        pytest.skip("the standard's schema comes from npm, which is not reached here")
    (tmp_path / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--no-save", "@asyncapi/specs@6"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    [schema] = (tmp_path / "node_modules" / "@asyncapi" / "specs" / "schemas").glob("3.0.0-without-$id.json")
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    assert [f"{'/'.join(map(str, error.path))}: {error.message[:200]}" for error in validator.iter_errors(DOCUMENT)] == []
    broken = json.loads(asyncapi.text())
    broken["operations"]["send_events"]["action"] = "emit"
    assert list(validator.iter_errors(broken)), "a schema that takes anything proves nothing"
