"""What is refused without looking further, and how failures are told."""

import json

import pytest

from jetwake.producers.gateway.body import refused_field
from jetwake.producers.gateway.exchange import Exchange, clean_client_id
from jetwake.producers.gateway.failures import Failure, failure_in, failure_of, shape_of
from jetwake.schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    JetwakeError,
    Overloaded,
    PayloadTooLarge,
    RequestFailed,
    UnknownModel,
)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"kv_transfer_params": null}', "kv_transfer_params"),
        ('{"model": "m", "cache_salt": "mine"}', "cache_salt"),
        ('{"bootstrap_room": 3}', "bootstrap_room"),
        ('{"jw_forced": [1]}', "jw_forced"),
        (r'{"kv_transfer_\u0070arams": {}}', "kv_transfer_params"),
        ('{"vllm_xargs": {"jw_forced": "1"}}', "vllm_xargs"),
        ('{"functions": [{"name": "f"}]}', "functions"),
        ('{"modalities": ["text", "audio"]}', "modalities"),
        ('{"best_of": 3}', "best_of"),
    ],
)
def test_a_refused_field_is_named(body: str, param: str) -> None:
    refusal = refused_field(body.encode())
    assert refusal is not None
    assert (refusal.status, refusal.param) == (400, param)
    assert param in refusal.text


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"content": "what is cache_salt, and \\"kv_transfer_params\\"?"}]}',
        '{"messages": [{"content": [{"type": "text", "cache_salt": 1}]}]}',  # only the top level has fields of ours
        '{"functions": null, "best_of": 1, "modalities": ["text"], "vllm_xargs": {"session_id": "s"}}',
        '{"kv_transfer_params": broken',
        '["kv_transfer_params"]',
        "",
    ],
)
def test_everything_else_is_left_to_the_handler(body: str) -> None:
    assert refused_field(body.encode()) is None


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (InvalidRequest("x"), 400, None),
        (UnknownModel("x"), 404, None),
        (PayloadTooLarge("x"), 413, None),
        (Overloaded("x", retry_after_s=2.2), 429, b"3"),
        (BrokerUnavailable("x"), 503, b"1"),
        (DeadlineExceeded("x"), 504, None),
        (RequestFailed("x", "engine_refused"), 400, None),
        (RequestFailed("x", "no_worker"), 503, b"1"),
        (RequestFailed("x", "engine_dead"), 500, None),
    ],
)
def test_each_error_has_its_status(error: JetwakeError, status: int, retry_after: bytes | None) -> None:
    failure = failure_of(error, retry_after_s=1.0)
    assert failure.status == status
    assert dict(failure.headers()).get(b"retry-after") == retry_after


def test_a_failure_speaks_the_language_of_its_api() -> None:
    failure = Failure(429, "overloaded", "full", retry_after_s=1)
    assert json.loads(failure.body(shape_of("/v1/chat/completions"))) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "overloaded"}
    }
    assert json.loads(failure.body(shape_of("/v1/messages"))) == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    kind, data = failure.event(shape_of("/v1/responses")).decode().strip().split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"


def test_vllms_own_errors_are_told_alike() -> None:
    body = b'{"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}'
    assert failure_in(404, body) == Failure(404, "unknown_model", "no such model", param="model")
    assert failure_in(404, b'{"detail": "Not Found"}').text == "Not Found"
    assert failure_in(500, b"<html>").code == "internal"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\nb", "é", 'a"b'])
def test_a_strange_client_id_is_not_echoed(given: str) -> None:
    assert clean_client_id(given) is None


def test_ids_of_one_exchange_differ() -> None:
    exchange = Exchange()
    ids = [exchange.next_request_id() for _ in range(3)]
    assert ids[0] == exchange.request_id
    assert len(set(ids)) == 3
