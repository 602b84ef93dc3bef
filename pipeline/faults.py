"""Foreign errors to ours: the one place that knows what nats-py raises and what the broker's error codes mean.

Promises: every exception class of nats-py (a test lists them), OSError and the builtin TimeoutError come out as an error of
`schemas.errors`, as specific as can be said, with the cause kept; nothing else is touched.
"""

import ssl
from collections.abc import Generator
from contextlib import contextmanager

import nats.errors as core
import nats.js.errors as jetstream

from ..schemas.errors import (
    BrokerUnavailable,
    BusError,
    BusRejected,
    JetwakeError,
    NotPermitted,
    PayloadTooLarge,
    SequenceConflict,
    SetupError,
    StreamExists,
    StreamFull,
    StreamMissing,
)

FOREIGN_ERRORS = (core.Error, OSError, TimeoutError)

# First match wins, so subclasses stand before their bases.
_BY_CLASS: tuple[tuple[type[BaseException], type[JetwakeError]], ...] = (
    (core.MaxPayloadError, PayloadTooLarge),
    (core.AuthorizationError, NotPermitted),
    (core.InvalidUserCredentialsError, SetupError),
    (core.SecureConnRequiredError, SetupError),
    (core.SecureConnWantedError, SetupError),
    (core.SecureConnFailedError, SetupError),
    (core.InvalidCallbackTypeError, BusRejected),
    (core.NoRespondersError, StreamMissing),
    (core.TimeoutError, BrokerUnavailable),
    (core.StaleConnectionError, BrokerUnavailable),
    (core.OutboundBufferLimitError, BrokerUnavailable),
    (core.ConnectionClosedError, BrokerUnavailable),
    (core.ConnectionDrainingError, BrokerUnavailable),
    (core.ConnectionReconnectingError, BrokerUnavailable),
    (core.NoServersError, BrokerUnavailable),
    (core.ProtocolError, BrokerUnavailable),
    (core.SlowConsumerError, BrokerUnavailable),
    (jetstream.NoStreamResponseError, StreamMissing),
    (jetstream.NotFoundError, StreamMissing),
    (jetstream.KeyWrongLastSequenceError, SequenceConflict),
    (jetstream.TooManyStalledMsgsError, BrokerUnavailable),
    (jetstream.ServiceUnavailableError, BrokerUnavailable),
    (core.Error, BusRejected),
    (ssl.SSLError, SetupError),
    (TimeoutError, BrokerUnavailable),
    (OSError, BrokerUnavailable),
)

_BY_CODE: dict[int, type[BusError | PayloadTooLarge]] = {
    10077: StreamFull,  # maximum messages, bytes or messages per subject
    10047: StreamFull,  # insufficient storage
    10023: StreamFull,  # insufficient resources
    10028: StreamFull,  # memory resources exceeded
    10071: SequenceConflict,  # wrong last sequence: <n>
    10164: SequenceConflict,  # wrong last sequence
    10059: StreamMissing,  # stream not found
    10014: StreamMissing,  # consumer not found
    10058: StreamExists,  # stream name already in use with a different configuration
    10054: PayloadTooLarge,  # over the stream's own limit
    10158: BrokerUnavailable,  # the same message id is being stored at this moment
}


def translated(error: BaseException, doing: str) -> JetwakeError:
    """Our error for `error`, which nats-py, the socket or a timeout raised while `doing`."""
    words = str(error) or type(error).__name__
    if isinstance(error, jetstream.APIError) and error.err_code in _BY_CODE:
        return _BY_CODE[error.err_code](f"{doing}: {words}")
    for foreign, ours in _BY_CLASS:
        if isinstance(error, foreign):
            return ours(f"{doing}: {words}")
    raise TypeError(f"no foreign error: {error!r}") from error


@contextmanager
def translation(doing: str) -> Generator[None]:
    """Foreign errors raised inside leave as ours."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise translated(error, doing) from error


def refusal(code: int, error_code: int, description: str, doing: str) -> JetwakeError:
    """Our error for an `error` field in an answer of the JetStream API."""
    text = f"{doing}: {description} ({error_code})"
    if error_code in _BY_CODE:
        return _BY_CODE[error_code](text)
    return BrokerUnavailable(text) if code == 503 else BusRejected(text)
