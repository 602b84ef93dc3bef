"""What each user of a secured broker may not do, tried for real; and that whoever tries hears of it at once, with the subject."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_users import as_table
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.declarations import declared_streams
from jetwake.pipeline.jetstream import api, last_message, last_messages, stored_messages
from jetwake.pipeline.permissions import Role
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import (
    delete_consumer,
    delete_stream_in_memory,
    drift,
    ensure_consumer,
    leaderless_in_memory,
    restore_missing,
)
from jetwake.producers.client import Client
from jetwake.schemas import subjects
from jetwake.schemas.errors import BusRejected, JetwakeError, NotPermitted, SetupError
from jetwake.schemas.streams import ANSWERS, OPENAI_BODIES, REPLIES, RESULTS, router_consumer

from .conftest import Secured

WORKERS: tuple[tuple[Role, str], ...] = (("prefill", ""), ("decode", ""), ("aggregated", ""))
GATEWAY: tuple[Role, str] = ("gateway", "gateway-1")
CLIENT: tuple[Role, str] = ("client", "alice")
TENANT: tuple[Role, str] = ("tenant", "acme")
OUTSIDE: tuple[tuple[Role, str], ...] = (GATEWAY, CLIENT, TENANT, ("observer", ""))
ALL_BUT_ROUTERS: tuple[tuple[Role, str], ...] = (*WORKERS, *OUTSIDE, ("operator", ""))
ALL: tuple[tuple[Role, str], ...] = (("router", ""), *ALL_BUT_ROUTERS)
DECLARED = declared_streams(TopologySettings())

SAID: list[tuple[str, tuple[tuple[Role, str], ...]]] = [
    # new requests, and jobs for workers
    ("jw.requests.m.interactive", (*WORKERS, TENANT, ("observer", ""))),
    ("jw.requests.again.batch", (TENANT, ("observer", ""))),
    ("jw.prefill.prefill-1-0011aabb", (*WORKERS, *OUTSIDE, ("operator", ""))),
    # KV caches
    ("jw.handoff.pool.none", (("router", ""), ("decode", ""), ("aggregated", ""), *OUTSIDE, ("operator", ""))),
    ("jw.claims.r1.1", (("router", ""), ("prefill", ""), ("aggregated", ""), *OUTSIDE, ("operator", ""))),
    ("jw.release.prefill-1-0011aabb", (("router", ""), ("prefill", ""), ("aggregated", ""), *OUTSIDE, ("operator", ""))),
    # answers, and how requests ended
    ("jw.replies.gateway-1.r1", (*OUTSIDE, ("operator", ""))),
    ("jw.answers.gateway-1.r1.1", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("jw.results.m.gateway-1.r1", (*OUTSIDE, ("operator", ""))),
    ("jw.events.m.finished", (*OUTSIDE, ("operator", ""))),
    # who is alive
    ("$KV.jw_workers.prefill-1", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("jw.load.prefill-1", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("jw.kv.prefill-1", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("$KV.jw_models.m", (("router", ""), *OUTSIDE, ("operator", ""))),
    # keys
    ("$KV.jw_keys.key.abc", (("router", ""), *WORKERS, *OUTSIDE)),
    ("$KV.jw_keys.secret", (*ALL,)),
    ("$JS.API.DIRECT.GET.KV_jw_keys", (("router", ""), *WORKERS, CLIENT, TENANT, ("observer", ""))),
    # orders
    ("jw.drain.prefill-1", (("router", ""), *WORKERS, *OUTSIDE)),
    ("jw.probe.prefill-1", (("router", ""), *WORKERS, *OUTSIDE)),
    ("jw.cancel.r1", (TENANT, ("observer", ""))),
    # the answers to others
    ("_INBOX.operator.x", OUTSIDE),
    ("_INBOX.observer.x", (*WORKERS, *OUTSIDE, ("operator", ""))),
    ("_INBOX.client.bob.x", (*WORKERS, *OUTSIDE)),
    ("_INBOX.router.x", OUTSIDE),
    ("_INBOX.tenant.acme.x", (("router", ""), *WORKERS, CLIENT, TENANT, ("operator", ""), ("observer", ""))),
    # what others were given, by every way of reading
    ("$JS.API.DIRECT.GET.JW_REPLIES", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("$JS.API.DIRECT.GET.JW_RESULTS", ALL),
    ("$JS.API.DIRECT.GET.JW_ANSWERS", ALL),
    ("$JS.API.DIRECT.GET.JW_OPENAI_BODIES", ALL),
    ("$JS.API.DIRECT.GET.JW_OPENAI_RESULTS", ALL),
    ("$JS.API.DIRECT.GET.JW_RESULTS.jw.results.m.gateway-2.r1", OUTSIDE),
    ("$JS.API.DIRECT.GET.JW_RESULTS.jw.results.*.*.*", OUTSIDE),
    ("$JS.API.DIRECT.GET.JW_RESULTS.jw.results.>", (*OUTSIDE, ("operator", ""))),
    ("$JS.API.DIRECT.GET.JW_ANSWERS.jw.answers.gateway-2.r1.1", (("router", ""), *OUTSIDE)),
    ("$JS.API.DIRECT.GET.JW_ANSWERS.jw.answers.>", (("router", ""), *OUTSIDE)),
    ("$JS.API.DIRECT.GET.JW_OPENAI_BODIES.jw.openai-bodies.gateway-2.r1", ALL),
    ("$JS.API.DIRECT.GET.JW_OPENAI_BODIES.jw.openai-bodies.*.r1", ALL),
    ("$JS.API.DIRECT.GET.JW_OPENAI_RESULTS.jw.results-out.globex.>", ALL),
    ("$JS.API.DIRECT.GET.JW_OPENAI_RESULTS.jw.openai.results.job-1", (("router", ""), *WORKERS, CLIENT, TENANT, ("operator", ""))),
    *((f"$JS.API.STREAM.MSG.GET.{name}", (*WORKERS, *OUTSIDE)) for name in ("JW_REQUESTS", "JW_REPLIES", "JW_OPENAI_JOBS")),
    # consumers would read a stream, or have it sent somewhere
    ("$JS.API.CONSUMER.CREATE.JW_REPLIES.x.jw.replies.gateway-2.>", ALL),
    ("$JS.API.CONSUMER.CREATE.JW_REPLIES.x.jw.replies.gateway-1.>", ALL),
    ("$JS.API.CONSUMER.CREATE.JW_REQUESTS.x", ALL),
    ("$JS.API.CONSUMER.DURABLE.CREATE.JW_PREFILL.x", ALL),
    ("$JS.API.CONSUMER.CREATE.JW_PREFILL.x.jw.prefill.x", (*OUTSIDE, ("operator", ""))),
    ("$JS.API.CONSUMER.CREATE.JW_OPENAI_JOBS.x.jw.openai.jobs.>", (*WORKERS, *OUTSIDE, ("operator", ""))),
    ("$JS.API.CONSUMER.CREATE.JW_HANDOFF.pool.jw.handoff.pool.none", (("router", ""), ("prefill", ""), ("aggregated", ""), *OUTSIDE)),
    ("$JS.API.CONSUMER.MSG.NEXT.JW_HANDOFF.pool", (("router", ""), ("prefill", ""), ("aggregated", ""), *OUTSIDE, ("operator", ""))),
    ("$JS.API.CONSUMER.MSG.NEXT.JW_REQUESTS.router-interactive", (*WORKERS, *OUTSIDE, ("operator", ""))),
    ("$JS.API.CONSUMER.MSG.NEXT.JW_OPENAI_JOBS.openai-jobs", (("router", ""), *WORKERS, CLIENT, TENANT, ("operator", ""))),
    ("$JS.ACK.JW_REQUESTS.router-interactive.1.1.1.1.0", (*WORKERS, *OUTSIDE, ("operator", ""))),
    # streams are an admin's
    *((f"$JS.API.STREAM.DELETE.{config['name']}", ALL if config["storage"] == "file" else ALL_BUT_ROUTERS) for config in DECLARED),
    ("$JS.API.STREAM.UPDATE.JW_REQUESTS", ALL),
    ("$JS.API.STREAM.PURGE.JW_RESULTS", ALL),
    ("$JS.API.STREAM.CREATE.MINE", ALL),
    ("$JS.API.STREAM.CREATE.JW_REQUESTS", (*WORKERS, *OUTSIDE, ("operator", ""))),
    # gateways speak for tenants only where gateways do
    ("jw.openai.jobs-of.m.chat.completions", (("router", ""), *WORKERS, CLIENT, TENANT, ("operator", ""))),
    ("jw.openai-of.m.chat.completions", (CLIENT, TENANT, ("operator", ""))),
    ("jw.openai.results.job-1", (("router", ""), *WORKERS, CLIENT, TENANT)),
    ("jw.results-out.globex.x", (("router", ""), *WORKERS, CLIENT, TENANT)),
    ("docs.x", (("router", ""), *WORKERS, CLIENT, TENANT)),
    ("elsewhere", ALL),
]  # fmt: skip

HEARD: list[tuple[str, tuple[tuple[Role, str], ...]]] = [
    (">", ALL),
    ("_INBOX.>", ALL),
    ("_INBOX.gateway.gateway-2.>", ALL),
    ("_INBOX.tenant.globex.>", ALL),
    ("jw.replies.>", ALL),
    ("jw.replies.gateway-2.>", ALL),
    ("jw.replies.gateway-1.>", (("router", ""), *WORKERS, CLIENT, TENANT, ("observer", ""), ("operator", ""))),
    ("jw.requests.>", ALL),
    ("jw.prefill.*", ALL),
    ("jw.handoff.*", ALL),
    ("jw.results.>", ALL),
    ("jw.answers.>", ALL),
    ("jw.openai.chat.completions", ALL),  # a gateway hears it as one of the group, and not all of it
    ("jw.openai.jobs.>", ALL),
    ("jw.openai.results.>", ALL),
    ("jw.results-out.globex.>", ALL),
    ("$KV.jw_keys.>", ALL),
    ("$JS.>", ALL),
    ("jw.snapshot.*", (("router", ""), *OUTSIDE, ("operator", ""))),
    ("jw.events.>", (("router", ""), *WORKERS, GATEWAY, CLIENT, TENANT)),
]


@pytest.mark.parametrize("who", ALL, ids=lambda who: "-".join(word for word in who if word))
async def test_what_a_user_may_not_do_is_refused_at_once_with_the_subject(secured: Secured, who: tuple[Role, str]) -> None:
    async with Bus.connect(secured.settings(*who), "-".join(who)) as bus, asyncio.timeout(30):
        for subject in [subject for subject, refused in SAID if who in refused]:
            with pytest.raises(NotPermitted) as caught:
                await bus.request(subject, b"", timeout_s=20)
            assert subject in str(caught.value)
            with pytest.raises(NotPermitted, match="forbid publish"):  # remembered, where nobody waits for an answer
                await bus.publish(subject, b"")
        for subject in [subject for subject, refused in HEARD if who in refused]:
            listening = await bus.subscribe(subject, lambda _: None)
            with pytest.raises(NotPermitted) as caught:
                await bus.flush()
            assert f"subscription to {subject}" in str(caught.value)
            await listening.unsubscribe()
        await bus.flush()
        assert bus.connected


async def test_a_reader_finds_its_own_answers_and_not_those_of_others(secured: Secured, unique: str) -> None:
    async with (
        Bus.connect(secured.settings("aggregated"), "worker") as worker,
        Bus.connect(secured.settings("gateway", "gateway-1"), "one") as one,
        Bus.connect(secured.settings("gateway", "gateway-2"), "two") as two,
    ):
        heard: list[str] = []
        await one.subscribe(subjects.replies_of("gateway-1"), lambda message: heard.append(message.subject))
        await one.flush()
        for gateway in ("gateway-1", "gateway-2"):
            await worker.publish(subjects.reply(gateway, unique), b"")
            await Publisher(worker).store_bytes(subjects.result("m", gateway, unique), gateway.encode())
        await worker.flush()
        await one.flush()
        assert heard == [subjects.reply("gateway-1", unique)]
        found = await last_message(one, RESULTS.name, subjects.results_of(unique, "gateway-1"))
        assert found is not None
        assert found.data == b"gateway-1"
        for read in (last_message(two, RESULTS.name, subjects.results_of(unique, "gateway-1")), *_whole_streams(two)):
            with pytest.raises(NotPermitted):
                await read
        with pytest.raises(NotPermitted, match=r"subscription to jw\.replies\.gateway-1\.r1"):
            await ReplyInbox(two, "gateway-2", WallClock()).resume("gateway-1", "r1", "m")


def _whole_streams(bus: Bus):
    for spec in (REPLIES, ANSWERS, RESULTS, OPENAI_BODIES):
        yield stored_messages(bus, spec.name, ">")
        yield last_messages(bus, spec.name, ">")


async def test_a_consumer_made_under_one_filter_has_no_other(secured: Secured, unique: str) -> None:
    async with Bus.connect(secured.settings("decode"), "worker") as bus:
        path = f"CONSUMER.CREATE.JW_PREFILL.{unique}.jw.prefill.{unique}"
        for config in ({"filter_subject": "jw.prefill.other"}, {"filter_subjects": ["jw.prefill.*"]}, {}):
            whole = {"name": unique, "durable_name": unique, "ack_policy": "explicit", **config}
            with pytest.raises(BusRejected):
                await api(bus, path, {"stream_name": "JW_PREFILL", "config": whole, "action": ""})
        with pytest.raises(JetwakeError):
            await api(bus, path, {"stream_name": "JW_REQUESTS", "config": {"name": unique, "filter_subject": f"jw.prefill.{unique}"}})


async def test_a_consumer_of_an_earlier_version_is_for_the_admin_to_make_anew(secured: Secured) -> None:
    spec = router_consumer("batch")
    async with (
        Bus.connect(secured.settings("admin"), "admin") as admin,
        Bus.connect(secured.settings("router"), "router") as router,
    ):
        await delete_consumer(admin, spec.stream, spec.durable)
        await ensure_consumer(admin, replace(spec, max_waiting=64))
        with pytest.raises(NotPermitted, match="jetwake nats declare"):
            await ensure_consumer(router, spec)
        assert await declare_all(admin, TopologySettings(), []) == [
            f"consumer {spec.stream}/{spec.durable}: max_waiting is 64, declared {spec.max_waiting}"
        ]
        await ensure_consumer(router, spec)


async def test_a_router_makes_streams_in_memory_anew_and_takes_away_no_other(secured: Secured) -> None:
    settings, in_memory = TopologySettings(), [config["name"] for config in DECLARED if config["storage"] == "memory"]
    async with Bus.connect(secured.settings("admin"), "admin") as admin, Bus.connect(secured.settings("router"), "router") as router:
        assert await leaderless_in_memory(router, settings) == {}
        for name in in_memory:
            assert await delete_stream_in_memory(router, settings, name)
        assert sorted(await restore_missing(router, settings)) == sorted(f"stream {name}" for name in in_memory)
        assert await drift(admin, settings) == []
        with pytest.raises(ValueError, match="no stream in memory"):
            await delete_stream_in_memory(router, settings, RESULTS.name)


async def test_results_of_jobs_reach_their_tenant_and_no_other(secured: Secured, unique: str) -> None:
    async with (
        Bus.connect(secured.settings("tenant", "acme"), "acme") as acme,
        Bus.connect(secured.settings("tenant", "globex"), "globex") as globex,
        Bus.connect(secured.settings("gateway", "gateway-1"), "gateway") as gateway,
    ):
        stored = await Publisher(acme).store_bytes(subjects.openai_job("chat.completions"), b"{}")
        assert stored.sequence > 0
        subject = f"{subjects.RESULTS_OUT}acme.{unique}"
        await Publisher(gateway).store_bytes(subject, b"done")
        found = await last_message(acme, "JW_OPENAI_RESULTS", subject)
        assert found is not None
        assert found.data == b"done"
        with pytest.raises(NotPermitted):
            await last_message(globex, "JW_OPENAI_RESULTS", subject)


async def test_a_wrong_inbox_prefix_is_said_and_not_waited_for(secured: Secured) -> None:
    settings = secured.settings("observer").model_copy(update={"inbox_prefix": "_INBOX"})
    async with Bus.connect(settings, "observer") as bus, asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(NotPermitted, match=r"subscription to _INBOX\."):
                await bus.request("$JS.API.STREAM.NAMES", b"", timeout_s=60)


async def test_strangers_are_turned_away(secured: Secured, tmp_path: Path) -> None:
    folder, known = secured.folder, secured.settings("observer")
    nobody = known.model_copy(update={"nkey_file": None, "connect_timeout_s": 3.0})
    with pytest.raises(NotPermitted, match="refused us"):
        await Bus.open(nobody, "stranger")
    without_tls = BrokerSettings(url=known.url, nkey_file=known.nkey_file, connect_timeout_s=3.0)
    with pytest.raises(SetupError, match="--nats-tls-ca"):
        await Bus.open(without_tls, "stranger")
    without_certificate = known.model_copy(update={"tls_cert": None, "tls_key": None, "connect_timeout_s": 3.0})
    with pytest.raises(SetupError, match="--nats-tls-ca"):
        await Bus.open(without_certificate, "stranger")
    other = tmp_path / "ca.pem"
    other.write_text(_other_authority(tmp_path))
    with pytest.raises(SetupError, match="--nats-tls-ca"):
        await Bus.open(known.model_copy(update={"tls_ca": other, "connect_timeout_s": 3.0}), "stranger")
    open_to_all = tmp_path / "open.nk"
    open_to_all.write_bytes((folder / "users" / "observer.nk").read_bytes())
    open_to_all.chmod(0o644)
    with pytest.raises(SetupError, match="chmod 600") as caught:
        await Bus.open(known.model_copy(update={"nkey_file": open_to_all}), "stranger")
    assert open_to_all.read_text().strip() not in str(caught.value)


def _other_authority(folder: Path) -> str:
    from jetwake.deploy.certificates import write_certificates

    write_certificates(folder / "other", ["127.0.0.1"], days=1)
    return (folder / "other" / "ca.pem").read_text()


async def test_a_client_goes_without_what_it_may_not_have(secured: Secured) -> None:
    async with Client.connect(secured.settings("client", "alice")) as client:
        assert client.name == "alice"
        with pytest.raises(NotPermitted, match=r"jw\.replies\.bob"):
            async with Client.connect(secured.settings("client", "alice"), name="bob"):
                pass


def test_the_documented_table_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert as_table() in text, "docs/security.md: put the output of `jetwake nats permissions --table` there"
