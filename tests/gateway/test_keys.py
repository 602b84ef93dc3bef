"""API keys, tenants and quotas: who may ask, what is kept apart, and how much there is in a minute."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from jetwake.pipeline.connection import Bus
from jetwake.pipeline.key_bucket import KeyBucket
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings
from jetwake.producers.gateway import exchange as exchanges
from jetwake.producers.gateway.exposure import refuse_open
from jetwake.producers.gateway.front import Front
from jetwake.producers.gateway.gate import Gate, presented_key
from jetwake.producers.gateway.key_keeper import KeyKeeper
from jetwake.producers.gateway.keyring import KeyRing, cache_salt, read_key_file
from jetwake.producers.gateway.metrics import GatewayMetrics
from jetwake.producers.gateway.quotas import Bucket, Limits, Quota
from jetwake.producers.gateway.settings import GatewaySettings
from jetwake.schemas.errors import InvalidRequest, QuotaExceeded, SetupError
from jetwake.schemas.keys import ApiKey, key_digest

SECRET = b"s" * 32


def key(text: str, tenant: str = "acme", **fields: Any) -> ApiKey:
    return ApiKey(digest=key_digest(text), tenant=tenant, **fields)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --------------------------------------------------------------------------------------------------------------- quotas


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    bucket = Bucket(60, now_s=0)
    bucket.take(60, now_s=0)
    assert bucket.wait_s(1, now_s=0) == pytest.approx(1.0)
    assert bucket.left(now_s=30) == pytest.approx(30)
    assert bucket.left(now_s=10_000) == 60
    assert Bucket(0, now_s=0).wait_s(10**9, now_s=0) == 0, "0 is no limit"


def test_tokens_are_taken_by_estimate_and_corrected() -> None:
    quota = Quota("acme", Limits(0, 1000), now_s=0)
    quota.take_tokens(900, now_s=0)
    with pytest.raises(QuotaExceeded, match=r"1000 tokens in a minute, 100 left and 200 wanted") as refused:
        quota.take_tokens(200, now_s=0)
    assert refused.value.retry_after_s == pytest.approx(6.0)
    quota.correct_tokens(900, 100, now_s=0)
    quota.take_tokens(900, now_s=0)
    assert dict(quota.headers(0))[b"x-ratelimit-remaining-tokens"] == b"0"


def test_what_can_never_be_admitted_is_refused_for_good() -> None:
    with pytest.raises(InvalidRequest, match=r"1001 tokens.*1000 in a minute"):
        Quota("acme", Limits(0, 1000), now_s=0).take_tokens(1001, now_s=0)


# ------------------------------------------------------------------------------------------------------------ keys and salts


def test_a_salt_needs_the_secret_and_differs_for_each_tenant() -> None:
    salts = {cache_salt(secret, tenant) for secret in (SECRET, b"t" * 32) for tenant in ("a", "b", "ab", "a\0b")}
    assert len(salts) == 8
    assert cache_salt(SECRET, "a") == cache_salt(SECRET, "a")


def test_a_key_is_found_whole_or_not_at_all() -> None:
    ring = KeyRing([key("right-key"), key("other-key", "globex")])
    found = ring.find("other-key")
    assert found is not None
    assert found.tenant == "globex"
    assert ring.find("other-ke") is ring.find("") is ring.find(key_digest("other-key")) is None


@pytest.mark.parametrize("header", [(b"authorization", b"Bearer k-1"), (b"authorization", b"bearer  k-1 "), (b"x-api-key", b"k-1")])
def test_a_key_comes_as_either_api_sends_it(header: tuple[bytes, bytes]) -> None:
    assert presented_key([header]) == "k-1"


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"secret: a secret of our own\nkeys:\n- {{key: k-1, tenant: acme, class: batch, requests_per_minute: 5}}\n"
        f"- {{sha256: {key_digest('k-2').upper()}, tenant: globex, tokens_per_minute: 100}}\n"
    )
    read = read_key_file(file)
    assert read.secret == b"a secret of our own"
    assert read.keys == (key("k-1", priority_class="batch", requests_per_minute=5), key("k-2", "globex", tokens_per_minute=100))
    lines = tmp_path / "keys.jsonl"
    lines.write_text(json.dumps({"key": "k-3", "tenant": "acme"}) + "\n\n")
    assert read_key_file(lines).keys == (key("k-3"),)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("k.yaml", "keys: [{key: TOPSECRET, tenant: 'no good!'}]", "key 1: tenant"),
        ("k.yaml", "keys: [{key: TOPSECRET, sha256: TOPSECRET, tenant: a}]", "key 1: give `key`, or"),
        ("k.yaml", "keys: [{key: TOPSECRET, tenant: a, quota: 3}]", "no field 'quota'"),
        ("k.yaml", "keys: [{key: TOPSECRET", "no YAML"),
        ("k.yaml", "keys: []", "no keys"),
        ("k.yaml", "secret: short\nkeys: [{key: TOPSECRET, tenant: a}]", "at least 16"),
        ("k.yaml", "TOPSECRET", "wanted `keys:`"),
        ("k.jsonl", '{"key": "TOPSECRET", "tenant":', "line 1: no JSON"),
        ("absent.yaml", None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_and_never_shown(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SetupError) as refused:
        read_key_file(tmp_path / name)
    assert complaint in str(refused.value)
    assert "TOPSECRET" not in str(refused.value)
    assert refused.value.__cause__ is None or "TOPSECRET" not in str(refused.value.__cause__)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example"])
def test_nothing_listens_beyond_loopback_without_keys(host: str) -> None:
    with pytest.raises(SetupError, match=r"--api-keys.*--allow-open"):
        refuse_open(host, guarded=False, allow_open=False)
    refuse_open(host, guarded=True, allow_open=False)
    refuse_open(host, guarded=False, allow_open=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_may_be_open(host: str) -> None:
    refuse_open(host, guarded=False, allow_open=False)


# ----------------------------------------------------------------------------------------------------------------- over HTTP


async def asked(gate: Gate, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions") -> tuple[httpx.Response, Any]:
    """The response, and the exchange as the handler saw it."""
    seen: list[exchanges.Exchange] = []

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        seen.append(exchanges.current())
        if (grant := exchanges.current().grant) is not None:
            grant.take_tokens(10)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    front = Front(handler, GatewaySettings(name="g"), GatewayMetrics(), frozenset({path}), gate)
    transport = httpx.ASGITransport(app=front)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(path, content=b"{}", headers=headers), seen[0] if seen else None


def gate_of(*keys: ApiKey, clock: Clock | None = None, share: float = 1.0) -> Gate:
    gate = Gate(SECRET, share, clock or Clock())
    gate.use(keys)
    return gate


async def test_without_keys_it_is_open_and_nobody_in_particular() -> None:
    response, exchange = await asked(gate_of())
    assert response.status_code == 200
    assert (exchange.tenant, exchange.cache_salt, exchange.grant) == ("", "", None)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}, {"x-api-key": "right "}])
async def test_a_missing_or_wrong_key_is_401_in_the_words_of_the_api(headers: dict[str, str]) -> None:
    right = headers.get("x-api-key", "").strip() == "right"
    for path in ("/v1/chat/completions", "/v1/messages"):
        response, exchange = await asked(gate_of(key("right")), headers, path)
        assert response.status_code == (200 if right else 401)
        if not right:
            assert exchange is None
            assert response.json()["error"]["type"] == "authentication_error"
            assert "wrong" not in response.text


async def test_the_key_decides_tenant_salt_and_class() -> None:
    _, acme = await asked(gate_of(key("k", priority_class="batch")), {"authorization": "Bearer k"})
    _, globex = await asked(gate_of(key("k", "globex")), {"authorization": "Bearer k"})
    assert (acme.tenant, acme.priority_class) == ("acme", "batch")
    assert (globex.tenant, globex.priority_class) == ("globex", None)
    assert acme.cache_salt == cache_salt(SECRET, "acme") != globex.cache_salt


async def test_a_used_up_quota_is_429_until_it_has_filled_again() -> None:
    clock = Clock()
    gate = gate_of(
        key("k1", requests_per_minute=2, tokens_per_minute=1000), key("k2", requests_per_minute=2, tokens_per_minute=1000), clock=clock
    )
    one, two = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
    first, _ = await asked(gate, one)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-remaining-tokens"] == "990"
    assert (await asked(gate, two))[0].status_code == 200, "keys of one tenant share its quota"
    refused, exchange = await asked(gate, one)
    assert refused.status_code == 429
    assert exchange is None
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now_s += 30
    assert (await asked(gate, one))[0].status_code == 200


async def test_each_of_several_gateways_grants_its_part() -> None:
    gate = gate_of(key("k", requests_per_minute=4), share=0.25)
    statuses = [(await asked(gate, {"authorization": "Bearer k"}))[0].status_code for _ in range(2)]
    assert statuses == [200, 429]


async def test_a_gate_that_had_keys_does_not_open_when_they_are_gone() -> None:
    gate = gate_of(key("k"))
    gate.use([])
    assert (await asked(gate))[0].status_code == 401
    assert (await asked(gate, {"authorization": "Bearer k"}))[0].status_code == 401


# ------------------------------------------------------------------------------------------------------------ in the broker


async def test_keys_in_the_broker_count_at_once_and_are_never_stored_as_such(own_server: Any) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "operator") as bus:
        bucket, keeper = KeyBucket(bus, Publisher(bus)), KeyKeeper(bus, Publisher(bus), None, 1.0)
        stored: list[bytes] = []
        await bus.subscribe("$KV.jw_keys.>", lambda message: stored.append(message.subject.encode() + message.data))
        await keeper.open()
        assert not keeper.gate.closed
        keeping = asyncio.create_task(keeper.run())
        header = [(b"authorization", b"Bearer the-key-itself")]
        try:
            made = key("the-key-itself")
            await bucket.put(made)
            await until(lambda: keeper.gate.closed)
            assert keeper.gate.admit(exchanges.Exchange(), header) is None
            await bucket.remove(made.digest)
            await until(lambda: keeper.gate.admit(exchanges.Exchange(), header) is not None)
        finally:
            keeping.cancel()
        assert stored
        assert not any(b"the-key-itself" in data for data in stored)


async def test_all_gateways_have_one_secret(own_server: Any) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "operator") as bus:
        secrets = await asyncio.gather(*(KeyBucket(bus, Publisher(bus)).secret() for _ in range(10)))
        assert len(set(secrets)) == 1
        assert len(secrets[0]) == 32


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_the_commands(own_server: Any) -> None:
    async def jetwake(*arguments: str) -> tuple[int | None, str]:
        command = (sys.executable, "-m", "jetwake.deploy.cli", "keys", *arguments, "--nats-url", own_server.url)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        output, complaint = await process.communicate()
        return process.returncode, (output or complaint).decode()

    _, shown = await jetwake("add", "acme", "--class", "batch", "--tokens-per-minute", "1000", "--note", "nightly")
    added = shown.strip()
    _, other = await jetwake("add", "globex", "--json")
    _, listed = await jetwake("list", "--json")
    keys = {entry["tenant"]: entry for entry in json.loads(listed)}
    assert (keys["acme"]["priority_class"], keys["acme"]["tokens_per_minute"], keys["acme"]["note"]) == ("batch", 1000, "nightly")
    assert keys["acme"]["id"] == key_digest(added)[:12]
    assert keys["globex"]["id"] == json.loads(other)["id"] == key_digest(json.loads(other)["key"])[:12]
    assert added not in listed
    assert (await jetwake("remove", keys["globex"]["id"]))[0] == 0
    assert (await jetwake("remove", added))[0] == 0
    assert (await jetwake("list", "--json"))[1].strip() == "[]"
    code, complaint = await jetwake("remove", added)
    assert (code, "keys list" in complaint) == (2, True)
    assert (await jetwake("add", "not a tenant"))[0] == 2
