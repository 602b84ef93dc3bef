"""What each kind of user may say to the broker and hear from it: the narrowest subjects with which the product works. Pure.

Everything is made of the product's own subjects and streams (`schemas.subjects`, `schemas.streams`) and the API's (`jetstream`).
Promises: what is not named here is forbidden. `deploy.nats_users` writes it as a configuration of the broker; `docs/security.md` has it
as a table.

Two rules behind it. Only the last message of a subject can be read under a permission for that subject alone; so who may read only its
own reads that way, and whoever may read by sequence or batch may read the whole stream. And whoever may create a consumer can have
what its stream holds sent to any subject, so nobody may who may also publish there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..schemas import streams, subjects
from ..schemas.openai_endpoints import ENDPOINTS, JOB_ENDPOINTS
from ..schemas.streams import BucketSpec, ConsumerSpec, StreamSpec
from .jetstream import (
    ack_subjects,
    api_subject,
    bucket_stream,
    create_path,
    get_subject,
    key_subject,
    leader_get_path,
    objects_stream,
    pull_subject,
)

Role = Literal["admin", "router", "prefill", "decode", "aggregated", "gateway", "client", "tenant", "operator", "observer"]
ROLES: tuple[Role, ...] = get_args(Role)
NAMED: frozenset[Role] = frozenset({"gateway", "client", "tenant"})
"""Of these there is a user for each name; of the others one."""

TOPOLOGY: Mapping[Role, Literal["declare", "restore", "check"]] = {"admin": "declare", "router": "restore"}
"""What processes of a role may do about streams; the others only look."""

WORKERS, MODELS, KEYS, BATCH_RECORDS = (
    streams.WORKERS_BUCKET, streams.MODELS_BUCKET, streams.KEYS_BUCKET, streams.BATCHES_BUCKET,
)  # fmt: skip
QUEUES = (streams.REQUESTS.name, streams.PREFILL.name, streams.HANDOFF.name)
FILES = objects_stream(streams.FILES.name)


@dataclass(frozen=True)
class Right:
    """One thing that a user may do. `what` completes "may"."""

    what: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()


def inbox_prefix(role: Role, name: str = "") -> str:
    """Where the answers to a user arrive: nobody else may listen there."""
    return f"_INBOX.{role}.{name}" if name else f"_INBOX.{role}"


def inboxes(role: Role) -> str:
    """Of all users of a role: for those who answer them."""
    return f"_INBOX.{role}.>"


def rights(role: Role, name: str = "", result_subjects: Iterable[str] = (), peers: Sequence[str] = ()) -> list[Right]:
    """`name`: of a gateway, client or tenant. `result_subjects`: on which gateways may publish results of jobs, beside the product's own.

    `peers`: of a gateway, others whose streams it may resume, so whose answers it may read.
    """
    own = {
        "admin": _admin,
        "router": _router,
        "prefill": _prefill,
        "decode": _decode,
        "aggregated": _worker,
        "client": lambda: [*_asking("client", name), *_explaining()],
        "tenant": lambda: _tenant(name),
        "operator": _operator,
        "observer": _observer,
    }
    given = _gateway(name, tuple(result_subjects), peers) if role == "gateway" else own[role]()
    return [Right("hear the answers to its own questions", subscribe=(f"{inbox_prefix(role, name)}.>",)), *given]


def published(given: Iterable[Right]) -> list[str]:
    """Each subject once, in the order of the rights."""
    return list(dict.fromkeys(subject for right in given for subject in right.publish))


def subscribed(given: Iterable[Right]) -> list[str]:
    return list(dict.fromkeys(subject for right in given for subject in right.subscribe))


# ---------------------------------------------------------------------------------------------------------- what things are made of


def _api(*paths: str) -> tuple[str, ...]:
    return tuple(api_subject(path) for path in paths)


def _values(bucket: BucketSpec) -> str:
    """By one direct get: all values of a bucket."""
    return get_subject(bucket_stream(bucket.name))


def _value(bucket: BucketSpec, key: str = "*") -> str:
    return get_subject(bucket_stream(bucket.name), key_subject(bucket.name, key))


def _taking(stream: StreamSpec, durable: str = "*") -> tuple[str, ...]:
    """From a consumer that is there, and see how far it is."""
    return (*_api(f"CONSUMER.INFO.{stream.name}.{durable}"), pull_subject(stream.name, durable), ack_subjects(stream.name, durable))


def _making(spec: ConsumerSpec) -> tuple[str, ...]:
    return _api(create_path(spec.stream, spec.durable, spec.filter_subject))


def _leader_get(*names: str) -> tuple[str, ...]:
    """Of any message of these streams."""
    return _api(*(leader_get_path(name) for name in names))


def _declared() -> list[str]:
    """The names of all streams, buckets and stores."""
    named = [spec.name for spec in streams.STREAMS] + [bucket_stream(bucket.name) for bucket in streams.BUCKETS]
    return named + [objects_stream(store.name) for store in streams.OBJECTS]


def _in_memory() -> list[str]:
    named = [spec.name for spec in streams.STREAMS if spec.storage == "memory"]
    return named + [bucket_stream(bucket.name) for bucket in streams.BUCKETS if bucket.storage == "memory"]


# ------------------------------------------------------------------------------------------------- what several roles have in common

_CLOCK = Right("read the broker's time", _api(f"STREAM.INFO.{streams.REQUESTS.name}"))
_LOOKING = Right("see which streams there are", _api("STREAM.NAMES"))
_MODELS = Right("read which models there are", (_values(MODELS), _value(MODELS)))
_CARDS = Right("read the cards of workers", (_values(WORKERS),), (key_subject(WORKERS.name, ">"),))
_ENDING = Right(
    "end requests: store the one ending, and tell it",
    (
        *streams.RESULTS.subjects,
        *streams.REPLIES.subjects,
        *streams.EVENTS.subjects,
        *streams.DEAD.subjects,
        *_leader_get(streams.RESULTS.name),
    ),
)
_HANDING_BACK = Right("hand back a request it held, as its next attempt", (subjects.requests_again("*"), *streams.CANCEL.subjects))
_CANCELS = Right("hear what is cancelled", (get_subject(streams.CANCEL.name),), (subjects.CANCELS,))
_READERS = Right("ask whether somebody still reads", (subjects.presence("*"),))
_DRAINING = Right("be told to drain", (subjects.drained("*"), inboxes("operator")), (subjects.drain("*"),))
_PROBED = Right("be probed for its links", subscribe=(subjects.probe("*"),))
_PIPE = (_CLOCK, _LOOKING, _CARDS, _CANCELS, _READERS, _ENDING, _HANDING_BACK, _DRAINING)
"""What every router and worker needs."""


def _asking(role: Role, name: str) -> list[Right]:
    """Requests of one's own, and their answers."""
    return [_CLOCK, _MODELS, _sending(name), _reading(name)]


def _sending(*names: str) -> Right:
    announced = tuple(subjects.announcements_of(name) for name in names)
    return Right("send requests, and cancel them by their ids", (*streams.REQUESTS.subjects, *streams.CANCEL.subjects, *announced))


def _reading(*names: str) -> Right:
    kept = [(streams.ANSWERS, subjects.answers_in(name)) for name in names]
    kept += [(streams.RESULTS, subjects.results_of("*", name)) for name in names]
    live = [subject for name in names for subject in (subjects.replies_of(name), subjects.presence(name))]
    return Right(
        f"read the answers to {' and '.join(names)}", tuple(get_subject(spec.name, subject) for spec, subject in kept), tuple(live)
    )


def _explaining() -> list[Right]:
    return [Right("ask routers who they are, and why", (subjects.EXPLAIN, subjects.ROUTERS))]


# ------------------------------------------------------------------------------------------------------------------------- the roles


def _admin() -> list[Right]:
    return [Right("do everything in this account", (">",), (">",))]


def _router() -> list[Right]:
    lanes = streams.PREFILL.name
    own = [spec for spec in streams.SHARED_CONSUMERS if spec.stream == streams.REQUESTS.name]
    return [
        *_PIPE,
        _MODELS,
        Right("take requests", tuple(subject for spec in own for subject in _taking(streams.REQUESTS, spec.durable))),
        Right("send jobs to workers", streams.PREFILL.subjects),
        Right("tell other routers what it decided, and hear them", (subjects.routed("*"),), (subjects.ROUTED,)),
        Right("hear how busy workers are", (), (subjects.LOADS,)),
        Right(
            "see how full queues are, and since when",
            _api(*(f"{question}.{name}" for name in QUEUES for question in ("CONSUMER.LIST", "STREAM.MSG.GET"))),
        ),
        Right("follow what workers have cached", (subjects.snapshot("*"),), (subjects.KV_EVENTS,)),
        Right(
            "say who it is, and why a request went where it went",
            (inboxes("client"), inboxes("operator"), inboxes("observer")),
            (subjects.EXPLAIN, subjects.ROUTERS),
        ),
        Right(
            "take over, take back and remove what waits for a worker",
            (
                *_api(f"STREAM.INFO.{lanes}", f"CONSUMER.DELETE.{lanes}.*"),
                *_making(streams.prefill_consumer("*")),
                *_taking(streams.PREFILL),
                *_leader_get(lanes),
                *_api(f"STREAM.MSG.DELETE.{lanes}"),
            ),
        ),
        Right(
            "make streams and shared consumers that are missing; it cannot change any, and delete only those in memory, which may be without a leader",
            (
                *_api(*(f"STREAM.CREATE.{name}" for name in _declared()), f"STREAM.INFO.{streams.DEAD.name}"),
                *_api(*(f"STREAM.{verb}.{name}" for name in _in_memory() for verb in ("INFO", "DELETE"))),
                *(subject for spec in streams.SHARED_CONSUMERS for subject in _making(spec)),
            ),
        ),
    ]


def _worker() -> list[Right]:
    lanes = streams.PREFILL.name
    return [
        *_PIPE,
        Right(
            "keep a queue of its own, and take jobs from it",
            (
                *_making(streams.prefill_consumer("*")),
                *_api(f"CONSUMER.DELETE.{lanes}.*", f"STREAM.INFO.{lanes}"),
                *_taking(streams.PREFILL),
            ),
        ),
        Right("say that it lives, how busy it is, and what it has cached", (key_subject(WORKERS.name, "*"), subjects.load("*"), subjects.kv("*"))),
        Right("tell routers all it has cached, when asked", (inboxes("router"),), (subjects.snapshot("*"),)),
        Right("announce its model", (key_subject(MODELS.name, "*"), _value(MODELS))),
        Right("be told to free blocks", (), (subjects.release("*"),)),
        _PROBED,
        Right("keep what it has answered so far, and go on where another worker ended", (
            *streams.ANSWERS.subjects, get_subject(streams.ANSWERS.name, subjects.answers_in("*")), get_subject(streams.REPLIES.name),
        )),
    ]  # fmt: skip


def _prefill() -> list[Right]:
    return [*_worker(), Right("hand KV caches to decode workers", streams.HANDOFF.subjects)]


def _decode() -> list[Right]:
    handoffs = streams.HANDOFF.name
    return [
        *_worker(),
        Right(
            "keep queues for handoffs, and take KV caches from prefill workers",
            (
                *_api(create_path(handoffs, "*", subjects.handoff("*", "*"))),
                *_api(f"CONSUMER.DELETE.{handoffs}.*", f"STREAM.INFO.{handoffs}"),
                *_taking(streams.HANDOFF),
            ),
        ),
        Right(
            "claim a KV cache", (*streams.CLAIMS.subjects, *_leader_get(streams.CLAIMS.name), *_api(f"STREAM.INFO.{streams.CLAIMS.name}"))
        ),
        Right("tell prefill workers to free blocks", (subjects.release("*"),)),
    ]


def _gateway(name: str, result_subjects: tuple[str, ...], peers: Sequence[str]) -> list[Right]:
    endpoints, group = [subjects.openai(endpoint) for endpoint in ENDPOINTS], subjects.OPENAI_GROUP
    results = streams.OPENAI_RESULTS.name
    kept = (subjects.openai_result("*"), subjects.openai_accepted("*"))
    return [
        _CLOCK,
        _LOOKING,
        _MODELS,
        _sending(name, subjects.JOBS, subjects.BATCHES),
        _reading(name, *peers, subjects.JOBS, subjects.BATCHES),
        Right("hear what is cancelled", (get_subject(streams.CANCEL.name, subjects.cancel("*")),), (subjects.CANCELS,)),
        Right(
            "read API keys, and the secret of cache salts",
            (_values(KEYS), *_leader_get(bucket_stream(KEYS.name))),
            (key_subject(KEYS.name, "key.*"),),
        ),
        Right(
            "keep its own streams for those who resume them",
            (
                subjects.openai_body(name, "*"),
                subjects.openai_reader("*"),
                *(get_subject(streams.OPENAI_BODIES.name, subjects.openai_body(each, "*")) for each in (name, *peers)),
                get_subject(streams.OPENAI_BODIES.name, subjects.openai_reader("*")),
            ),
        ),
        Right("take requests of tenants, each with one of the gateways only", (), tuple(f"{subject} {group}" for subject in endpoints)),
        Right("pass requests on to gateways of other models", (subjects.OPENAI_OF_ALL,), (subjects.OPENAI_OF_ALL,)),
        Right("answer tenants and other gateways", (inboxes("tenant"), inboxes("gateway"))),
        Right(
            "take durable jobs, give their results, and read all of them",
            (
                *_taking(streams.OPENAI_JOBS),
                subjects.OPENAI_JOBS_OF_ALL,
                *kept,
                f"{subjects.RESULTS_OUT}>",
                *_leader_get(results),
                *streams.DEAD.subjects,
                *result_subjects,
            ),
        ),
        *_batches(),
        Right("run batches", _taking(streams.BATCHES)),
    ]


def _batches() -> list[Right]:
    lines = streams.BATCH_LINES.name
    return [
        Right(
            "read and write all batches and files",
            (
                *streams.BATCHES.subjects,
                *streams.BATCH_LINES.subjects,
                key_subject(BATCH_RECORDS.name, "*"),
                f"$O.{streams.FILES.name}.>",
                _values(BATCH_RECORDS),
                get_subject(lines),
                get_subject(FILES),
                *_leader_get(bucket_stream(BATCH_RECORDS.name), lines, FILES),
                *_api(f"STREAM.PURGE.{lines}", f"STREAM.PURGE.{FILES}"),
            ),
        )
    ]


def _tenant(name: str) -> list[Right]:
    asked = tuple(subjects.openai(endpoint) for endpoint in ENDPOINTS)
    jobs = tuple(subjects.openai_job(endpoint) for endpoint in JOB_ENDPOINTS)
    results = subjects.results_out(name)
    return [
        Right("ask gateways", asked),
        Right("store durable jobs", jobs),
        Right(
            f"read results of jobs that name a subject under {results.removesuffix('>')}",
            (get_subject(streams.OPENAI_RESULTS.name, results),),
            (results,),
        ),
    ]


def _operator() -> list[Right]:
    dead = streams.DEAD.name
    return [
        *_asking("operator", "operator"),
        *(right for right in _observer() if right not in (_MODELS, _CLOCK)),
        Right(
            "read how any request went or goes, with its tokens",
            (
                get_subject(streams.RESULTS.name, subjects.results_of("*")),
                get_subject(streams.ANSWERS.name, subjects.answers_in("*")),
            ),
        ),
        Right("drain workers and routers", (subjects.drain("*"),)),
        Right("measure the links between workers", (subjects.probe("*"),)),
        Right("read, send again and remove dead letters", (get_subject(dead), *_api(f"STREAM.MSG.DELETE.{dead}"))),
        Right("add and remove API keys", (key_subject(KEYS.name, "key.*"), _values(KEYS))),
        *_batches(),
    ]


def _observer() -> list[Right]:
    return [
        _CLOCK,
        _LOOKING,
        _MODELS,
        _CARDS,
        *_explaining(),
        Right("hear loads, decisions, cache changes and drains", (), (subjects.LOADS, subjects.ROUTED, subjects.KV_EVENTS, subjects.drained("*"))),
        Right("hear and read how requests ended, without their text", (get_subject(streams.EVENTS.name),), streams.EVENTS.subjects),
        Right(
            "see how full streams and queues are",
            _api("INFO", "STREAM.LIST", "STREAM.INFO.*", "CONSUMER.LIST.*", "CONSUMER.NAMES.*", "CONSUMER.INFO.*.*"),
        ),
    ]  # fmt: skip
