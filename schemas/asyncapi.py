"""The AsyncAPI document of every subject that others may use: made from the models and the subject functions. Pure.

What gateways, routers and workers say to each other only is not here; `files()` of `json_schema` has those messages too.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from . import subjects
from .codec import Message
from .events import RequestEnded
from .json_schema import documents, event_document, type_tag
from .openai_endpoints import ENDPOINTS, JOB_ENDPOINTS
from .replies import Cancelled, CancelRequest, DeadLetter, Expired, Failed, Finished, TokenChunk
from .requests import InferenceRequest

VERSION = "3.0.0"
DRAFT_2020 = "application/schema+json;version=2020-12"
Json = dict[str, Any]

_PARAMETERS = {
    "model": "the model's name as one token: itself when it has only letters, digits, _ and -; else made safe, with a digest behind it",
    "class": "interactive or batch",
    "gateway": "the name of whoever waits for the reply",
    "request": "the id of a request",
    "job": "the id of a job, in the headers of its result",
    "outcome": "finished, failed, cancelled or expired",
    "stage": "where it could not be processed",
    "name": "any tokens of your own",
}


@dataclass(frozen=True)
class Channel:
    """`jetwake`: whether Jetwake receives or sends here. `messages` are names in `components`."""

    key: str
    address: str
    jetwake: Literal["receive", "send"]
    says: str
    messages: tuple[str, ...]
    replies: tuple[str, ...] = ()


def _channels() -> list[Channel]:
    made = [
        Channel(
            f"openai.{endpoint.name}",
            subjects.openai(endpoint.name),
            "receive",
            f"Request and reply: {endpoint.says}. The body is that of {endpoint.method} {endpoint.path}.",
            ("openai_request",),
            ("openai_reply", "openai_stream_event", "openai_stream_end"),
        )
        for endpoint in ENDPOINTS.values()
    ]
    made += [
        Channel(
            f"openai.jobs.{endpoint.name}",
            subjects.openai_job(endpoint.name),
            "receive",
            f"Durable job: {endpoint.says}. Publish through JetStream: its acknowledgement means that the job will have one result.",
            ("openai_job",),
        )
        for endpoint in JOB_ENDPOINTS.values()
    ]
    tags = (TokenChunk, Finished, Failed, Cancelled, Expired)
    return [
        *made,
        Channel("openai.results", subjects.openai_result("{job}"), "send", "The result of a job, kept for a day.", ("openai_result",)),
        Channel(
            "results-out", f"{subjects.RESULTS_OUT}{{name}}", "send", "Results of jobs that named such a subject; kept.", ("openai_result",)
        ),
        Channel(
            "events", _address(subjects.event("{model}", "{outcome}")), "send", "A request has ended. Kept for a day.", ("request_ended",)
        ),
        Channel(
            "cancel",
            subjects.cancel("{request}"),
            "receive",
            "Ends a request, or with `job-` and its sequence a job. An empty message does; Jetwake's own carry more.",
            ("cancel_by_subject", type_tag(CancelRequest)),
        ),
        Channel(
            "requests",
            _address(subjects.requests("{model}", "{class}")),
            "receive",
            "A validated, tokenised request, as gateways and clients send it, through JetStream.",
            (type_tag(InferenceRequest),),
        ),
        Channel(
            "replies", subjects.reply("{gateway}", "{request}"), "send", "Tokens as they come, then one ending.", tuple(map(type_tag, tags))
        ),
        Channel(
            "results",
            _address(subjects.result("{model}", "{gateway}", "{request}")),
            "send",
            "The ending of a request with all its tokens. Kept for a day.",
            tuple(map(type_tag, tags[1:])),
        ),
        Channel("dead", subjects.dead("{stage}"), "send", "What could not be processed. Kept for a week.", (type_tag(DeadLetter),)),
    ]


def _address(subject: str) -> str:
    """A model parameter is no model name, and has come out as one that had to be made safe."""
    token = subjects.model_token("{model}")
    return subject.replace(token, "{model}")


def document() -> Json:
    channels, operations = Json(), Json()
    for channel in _channels():
        key = channel.key.replace(".", "_").replace("-", "_")
        channels[key] = _channel(channel.address, channel.says, channel.messages)
        operation: Json = {"action": channel.jetwake, "channel": {"$ref": f"#/channels/{key}"}, "summary": channel.says}
        if channel.replies:
            channels[f"{key}_reply"] = _channel(None, "The reply subject of the request.", channel.replies)
            operation["reply"] = {
                "address": {"location": "$message.header#/reply", "description": "the reply subject that NATS carries with a message"},
                "channel": {"$ref": f"#/channels/{key}_reply"},
            }
        operations[f"{channel.jetwake}_{key}"] = operation
    return {
        "asyncapi": VERSION,
        "info": {
            "title": "Jetwake",
            "version": "1",
            "description": "Subjects of Jetwake that applications may use. `jetwake schemas FOLDER` writes this document.",
            "license": {"name": "Apache-2.0"},
        },
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "a NATS server with JetStream"}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": _json_messages() | _wire_messages()},
    }


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def _channel(address: str | None, says: str, messages: tuple[str, ...]) -> Json:
    made: Json = {
        "address": address,
        "description": says,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }
    parameters = {name: {"description": says} for name, says in _PARAMETERS.items() if address and f"{{{name}}}" in address}
    if parameters:
        made["parameters"] = parameters
    return made


def _headers(**fields: str) -> Json:
    """`fields`: what each header says; underscores stand for hyphens."""
    return {
        "type": "object",
        "properties": {name.replace("_", "-"): {"type": "string", "description": says} for name, says in fields.items()},
    }


def _json_messages() -> Json:
    asked: dict[str, str] = {
        "Authorization": "Bearer KEY, where the gateway has API keys",
        "X_Request_Id": "your own id, echoed and never used",
        subjects.TIMEOUT_HEADER.replace("-", "_"): "seconds until it is given up",
        subjects.METADATA_HEADER.replace("-", "_"): "a JSON object of texts, given back in the event of its end",
    }
    told: dict[str, str] = {
        subjects.STATUS_HEADER.replace("-", "_"): "the HTTP status",
        subjects.REQUEST_HEADER.replace("-", "_"): "the request's id, for jw.cancel.<id>",
        subjects.END_HEADER.replace("-", "_"): "with the last message of an answer: done or error",
        "Content_Type": "application/json",
        "Retry_After": "seconds, with status 429 and 503",
    }
    body: Json = {"type": "object", "description": "as the OpenAI or Anthropic API has it"}
    return {
        "openai_request": _message("The JSON body of an API request.", body, _headers(**asked)),
        "openai_reply": _message("The JSON body of the response; with an error status, the API's error object.", body, _headers(**told)),
        "openai_stream_event": _message(
            f"With `stream`: one event. An empty payload with {subjects.KEEP_ALIVE_HEADER} is a sign of life.",
            body,
            _headers(**told, **{subjects.EVENT_HEADER.replace("-", "_"): "the event's name, where the API gives events names"}),
        ),
        "openai_stream_end": _message(
            "The last message of a stream that ended well, without a payload.",
            {"type": "null"},
            _headers(**{subjects.END_HEADER.replace("-", "_"): "done"}),
        ),
        "openai_job": _message(
            "The JSON body of an API request, without `stream`.",
            body,
            _headers(**asked, **{subjects.RESULT_SUBJECT_HEADER.replace("-", "_"): "where the result goes, beside the kept copy"}),
        ),
        "openai_result": _message(
            "The JSON body of the response, or the API's error object.",
            body,
            _headers(
                **told,
                Nats_Msg_Id="the same for every delivery of this result",
                **{
                    subjects.JOB_SEQUENCE_HEADER.replace("-", "_"): "the sequence in the acknowledgement of the job's publish",
                    subjects.JOB_MESSAGE_ID_HEADER.replace("-", "_"): "the Nats-Msg-Id of the job",
                },
            ),
        ),
        "cancel_by_subject": _message("An empty message: the subject says all.", {"type": "null"}, None),
        "request_ended": {
            "name": "request_ended",
            "title": RequestEnded.__name__,
            "contentType": "application/json",
            "payload": {"schemaFormat": DRAFT_2020, "schema": _without_address(event_document())},
        },
    }


def _message(says: str, payload: Json, headers: Json | None) -> Json:
    made: Json = {"summary": says, "contentType": "application/json", "payload": payload}
    return made if headers is None else made | {"headers": headers}


def _wire_messages() -> Json:
    kinds: tuple[type[Message], ...] = (InferenceRequest, TokenChunk, Finished, Failed, Cancelled, Expired, CancelRequest, DeadLetter)
    known = documents()
    return {
        (tag := type_tag(kind)): {
            "name": tag,
            "title": kind.__name__,
            "contentType": "application/msgpack",
            "payload": {"schemaFormat": DRAFT_2020, "schema": _without_address(known[tag])},
        }
        for kind in kinds
    }


def _without_address(schema: Json) -> Json:
    """An embedded schema is no document of its own, and its references are to its own definitions: those are written out here."""
    definitions: Json = schema.get("$defs", {})

    def written_out(part: Any) -> Any:
        if isinstance(part, list):
            return [written_out(entry) for entry in part]  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(part, dict):
            return part
        fields: Json = dict(part)  # pyright: ignore[reportUnknownArgumentType]
        reference = fields.pop("$ref", None)
        if isinstance(reference, str):
            return {**written_out(definitions[reference.removeprefix("#/$defs/")]), **written_out(fields)}
        return {name: written_out(value) for name, value in fields.items() if name not in ("$defs", "$schema", "$id")}

    made: Json = written_out(schema)
    return made
