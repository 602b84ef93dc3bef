"""No exception of nats-py leaves the package: every class it has is named here by looking, so an upgrade cannot add one unseen."""

import inspect
import ssl

import nats.aio.errors
import nats.errors
import nats.js.errors
import pytest

from jetwake.pipeline.faults import FOREIGN_ERRORS, refusal, translated, translation
from jetwake.schemas.errors import (
    BrokerUnavailable,
    BusRejected,
    JetwakeError,
    NotPermitted,
    PayloadTooLarge,
    SequenceConflict,
    SetupError,
    StreamFull,
    StreamMissing,
)

MODULES = (nats.errors, nats.js.errors, nats.aio.errors)
NATS_ERRORS = sorted(
    {kind for module in MODULES for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, BaseException)},
    key=lambda kind: (kind.__module__, kind.__name__),
)


def made(kind: type[BaseException]) -> BaseException:
    """Without its constructor: several want a subscription or an answer of the server."""
    error = kind.__new__(kind)
    for attribute in ("description", "code", "err_code", "stream", "seq", "subject", "sid", "sub", "message", "key"):
        if not hasattr(error, attribute) or getattr(type(error), attribute, None) is None:
            error.__dict__[attribute] = None
    error.__dict__.update(_msg=None, stream_resume_sequence=1, consumer_sequence=1, last_consumer_sequence=1)
    return error


@pytest.mark.parametrize("kind", NATS_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_nats_py_becomes_one_of_ours(kind: type[BaseException]) -> None:
    error = made(kind)
    assert isinstance(error, FOREIGN_ERRORS)
    assert isinstance(translated(error, "testing"), JetwakeError)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (nats.errors.MaxPayloadError(), PayloadTooLarge),
        (nats.errors.AuthorizationError(), NotPermitted),
        (nats.errors.NoRespondersError(), StreamMissing),
        (nats.errors.TimeoutError(), BrokerUnavailable),
        (nats.errors.OutboundBufferLimitError(), BrokerUnavailable),
        (nats.js.errors.NoStreamResponseError(), StreamMissing),
        (nats.js.errors.ServiceUnavailableError(code=503, err_code=10077, description="maximum messages exceeded"), StreamFull),
        (nats.js.errors.BadRequestError(code=400, err_code=10071, description="wrong last sequence"), SequenceConflict),
        (TimeoutError(), BrokerUnavailable),
        (ConnectionResetError(), BrokerUnavailable),
        (ssl.SSLError(), SetupError),
        (nats.errors.BadSubjectError(), BusRejected),
    ],
)
def test_the_most_specific_error_is_chosen(error: BaseException, ours: type[JetwakeError]) -> None:
    assert type(translated(error, "testing")) is ours


@pytest.mark.parametrize(
    ("code", "error_code", "ours"),
    [(503, 10077, StreamFull), (404, 10059, StreamMissing), (503, 10008, BrokerUnavailable), (400, 10100, BusRejected)],
)
def test_an_answers_error_code_decides(code: int, error_code: int, ours: type[JetwakeError]) -> None:
    assert type(refusal(code, error_code, "words", "testing")) is ours


def test_translation_keeps_the_cause_and_leaves_other_errors_alone() -> None:
    with pytest.raises(BrokerUnavailable, match="asking") as caught, translation("asking"):
        raise TimeoutError
    assert isinstance(caught.value.__cause__, TimeoutError)
    with pytest.raises(KeyError), translation("asking"):
        raise KeyError
