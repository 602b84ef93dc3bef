"""One JSON Schema for each message, for readers in other languages; made from the models, so that they cannot drift apart.

On the wire a message is the msgpack form of the described object: `format: binary` is msgpack's bin, everything else as in JSON.
Pure: `files()` gives names and texts, and whoever wants files writes them.
"""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import BytesSchema

from .batches import BatchJob, BatchRecord, LineResult
from .codec import Message
from .decode import KvHandoff
from .drain import Drained, DrainHeard, DrainOrder
from .events import RequestEnded
from .keys import ApiKey
from .kv_events import KvEvents, KvSnapshotChunk, KvSnapshotWanted
from .link_probe import LinkProbe, LinkProbed
from .prefill import PrefillJob, ReleaseKv
from .replies import Cancelled, CancelRequest, Checkpoint, DeadLetter, Expired, Failed, Fence, Finished, TokenChunk
from .requests import InferenceRequest
from .routing import Explain, Explanation, Routed, RouterHere
from .streamed import StreamedRequest
from .workers import ModelCard, WorkerCard, WorkerLoad

DIALECT = "https://json-schema.org/draft/2020-12/schema"

MESSAGES: tuple[type[Message], ...] = (
    InferenceRequest,
    PrefillJob,
    ReleaseKv,
    KvHandoff,
    TokenChunk,
    Finished,
    Failed,
    Cancelled,
    Expired,
    Fence,
    Checkpoint,
    CancelRequest,
    StreamedRequest,
    DeadLetter,
    ModelCard,
    WorkerCard,
    WorkerLoad,
    KvEvents,
    KvSnapshotWanted,
    KvSnapshotChunk,
    Routed,
    RouterHere,
    Explain,
    Explanation,
    DrainOrder,
    DrainHeard,
    Drained,
    LinkProbe,
    LinkProbed,
    ApiKey,
    BatchJob,
    BatchRecord,
    LineResult,
)
"""Everything that travels by itself; the parts of these are in the definitions of each document."""


class _WireSchema(GenerateJsonSchema):
    def bytes_schema(self, schema: BytesSchema) -> JsonSchemaValue:
        return {"type": "string", "format": "binary", "description": "bytes (msgpack bin)"}


def type_tag(message: type[Message]) -> str:
    """The value of the message's `type` field."""
    return str(message.model_fields["type"].default)


def documents() -> dict[str, dict[str, Any]]:
    """By type tag."""
    return {type_tag(message): _document(message) for message in MESSAGES}


def files() -> dict[str, str]:
    """By file name."""
    made = {f"{tag}.schema.json": json.dumps(document, indent=2) + "\n" for tag, document in documents().items()}
    return made | {"request_ended.schema.json": json.dumps(event_document(), indent=2) + "\n"}


def event_document() -> dict[str, Any]:
    """Of the one message that is JSON on the wire."""
    return {"$schema": DIALECT, "$id": "jetwake:request_ended"} | RequestEnded.model_json_schema()


def _document(message: type[Message]) -> dict[str, Any]:
    schema = message.model_json_schema(schema_generator=_WireSchema)
    return {"$schema": DIALECT, "$id": f"jetwake:{type_tag(message)}"} | schema
