"""What the broker is told of each stream, bucket, store and consumer, as JSON; and what of it is otherwise there. Pure."""

from typing import Any

from ..schemas.streams import DEAD, BucketSpec, ConsumerSpec, ObjectsSpec, StreamSpec
from .jetstream import Json, bucket_stream, chunk_subject, key_subject, meta_subject, objects_stream
from .settings import TopologySettings

_NS = 1_000_000_000
_FIXED = ("max_waiting", "deliver_policy", "ack_policy", "replay_policy")
"""What the broker changes on no live consumer."""


def declared_streams(settings: TopologySettings) -> list[Json]:
    """Dead letters first: the others' beginning is read from that stream."""
    return [
        *(_stream_config(spec) for spec in sorted(settings.streams(), key=lambda spec: spec.name != DEAD.name)),
        *(_bucket_config(spec) for spec in settings.buckets()),
        *(_objects_config(spec) for spec in settings.objects()),
    ]


def _stream_config(spec: StreamSpec) -> Json:
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "storage": spec.storage,
        "discard": spec.discard,
        "max_msgs": spec.max_messages,
        "max_bytes": spec.max_bytes,
        "max_age": round(spec.max_age_s * _NS),
        "max_msgs_per_subject": spec.max_messages_per_subject,
        "discard_new_per_subject": spec.discard_new_per_subject,
        "duplicate_window": round(spec.duplicate_window_s * _NS),
        "allow_direct": spec.allow_direct,
        "no_ack": spec.no_ack,
        "num_replicas": spec.replicas,
    }


def _bucket_config(spec: BucketSpec) -> Json:
    """What every NATS client makes of a key-value bucket with expiry of single keys."""
    config: Json = {
        "name": bucket_stream(spec.name),
        "subjects": [key_subject(spec.name, ">")],
        "retention": "limits",
        "storage": spec.storage,
        "discard": "new",
        "max_bytes": spec.max_bytes,
        "max_msgs_per_subject": 1,
        "duplicate_window": 120 * _NS,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_msg_ttl": True,
        "num_replicas": spec.replicas,
    }
    if spec.marker_ttl_s:
        config["subject_delete_marker_ttl"] = round(spec.marker_ttl_s * _NS)
    return config


def _objects_config(spec: ObjectsSpec) -> Json:
    """What every NATS client makes of an object store, with expiry of single objects."""
    return {
        "name": objects_stream(spec.name),
        "subjects": [chunk_subject(spec.name, ">"), meta_subject(spec.name, ">")],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": spec.max_bytes,
        "duplicate_window": 120 * _NS,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "num_replicas": spec.replicas,
    }


def consumer_config(spec: ConsumerSpec) -> Json:
    config: Json = {
        "name": spec.durable,
        "durable_name": spec.durable,
        "filter_subject": spec.filter_subject,
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": round(spec.ack_wait_s * _NS),
        "max_deliver": -1,  # attempts are counted in code: what the server gives up on would stay in the queue unseen
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": spec.max_waiting,
        "inactive_threshold": round(spec.inactive_threshold_s * _NS),
    }
    if spec.priority_group:
        config |= {"priority_policy": "prioritized", "priority_groups": [spec.priority_group]}
    return config


def difference_of(there: Json | None, declared: Json) -> str:
    """What of the declared configuration the broker has otherwise. Empty: nothing. What we do not declare is not compared."""
    if there is None:
        return "missing"
    config: Json = there["config"]
    changed = [f"{key} is {config.get(key)}, declared {value}" for key, value in declared.items() if not _same(config.get(key), value)]
    return ", ".join(changed)


def _same(there: Any, declared: Any) -> bool:
    """The broker leaves out what is zero, false or empty."""
    return there == declared or (not there and not declared)


def fixed_otherwise(there: Json | None, declared: Json) -> str:
    """What of a consumer that is there can only be changed by making it anew. Empty: nothing."""
    return "" if there is None else difference_of(there, {key: declared[key] for key in _FIXED})
