"""`/v1/files` and `/v1/batches` over HTTP, as OpenAI has them: routes to be joined to the gateway's application.

An upload goes to disk, then to the broker, and is never in memory as a whole; so does what is downloaded.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...schemas.errors import InvalidRequest, JetwakeError, StreamFull
from ..batches.desk import BatchDesk, InvalidField, NotNow, NotThere
from ..batches.records import as_openai
from .exchange import current
from .failures import Failure, failure_of
from .front import Message

FILES_PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
PATHS = frozenset({FILES_PATH, BATCHES_PATH})
_PART_BYTES = 1 << 20
_FORM_EXTRA_BYTES = 1 << 20
_FILES_LISTED, _BATCHES_LISTED = 10_000, 20
_STATUS: dict[type[JetwakeError], int] = {NotThere: 404, NotNow: 409, StreamFull: 507}

Handler = Callable[[Request], Awaitable[Response]]


class _TooLarge(JetwakeError):
    code = "payload_too_large"


def routes(desk: BatchDesk, retry_after_s: float) -> list[Route]:
    """For the router of the gateway's application."""
    api = _Api(desk)
    table: tuple[tuple[str, str, Handler], ...] = (
        ("POST", FILES_PATH, api.upload),
        ("GET", FILES_PATH, api.list_files),
        ("GET", f"{FILES_PATH}/{{file_id}}", api.file),
        ("DELETE", f"{FILES_PATH}/{{file_id}}", api.delete_file),
        ("GET", f"{FILES_PATH}/{{file_id}}/content", api.content),
        ("POST", BATCHES_PATH, api.create),
        ("GET", BATCHES_PATH, api.list_batches),
        ("GET", f"{BATCHES_PATH}/{{batch_id}}", api.batch),
        ("POST", f"{BATCHES_PATH}/{{batch_id}}/cancel", api.cancel),
    )
    return [Route(path, _told(handler, retry_after_s), methods=[method]) for method, path, handler in table]


def _told(handler: Handler, retry_after_s: float) -> Handler:
    """Errors as the front tells all of them."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except JetwakeError as error:
            failure = _failure(error, retry_after_s)
        except (MultipartParseError, HTTPException) as error:
            failure = Failure(400, "invalid_request", f"the form cannot be read: {getattr(error, 'detail', error)}")
        current().failure = failure
        return Response(failure.body("openai"), failure.status, media_type="application/json")

    return handle


def _failure(error: JetwakeError, retry_after_s: float) -> Failure:
    for kind, status in _STATUS.items():
        if isinstance(error, kind):
            return Failure(status, error.code, str(error))
    if isinstance(error, _TooLarge):
        return Failure(413, error.code, str(error), param="file")
    return failure_of(error, retry_after_s)


class _Api:
    def __init__(self, desk: BatchDesk) -> None:
        self._desk = desk

    async def upload(self, request: Request) -> Response:
        limit = self._desk.settings.max_file_bytes
        limited = Request(request.scope, _limited(request, limit + _FORM_EXTRA_BYTES, limit))
        try:
            async with limited.form(max_files=1, max_fields=16) as form:
                given = form.get("file")
                if not isinstance(given, UploadFile):
                    raise InvalidField("the form needs a file", "file")
                if (given.size or 0) > limit:
                    raise _too_large(limit)
                name = given.filename or "file"
                stored = await self._desk.upload(current().tenant, name[:256], _text(form, "purpose"), _parts(given), _life_s(form))
        except ClientDisconnect as error:
            raise InvalidRequest("the connection was closed before the file was complete") from error
        return JSONResponse(stored.as_openai())

    async def list_files(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidField(f"order is asc or desc, not {order!r}", "order")
        limit = _limit(request, _FILES_LISTED, _FILES_LISTED)
        page = await self._desk.list_files(current().tenant, query.get("purpose"), query.get("after"), limit, order == "asc")
        return JSONResponse(page.as_openai())

    async def file(self, request: Request) -> Response:
        return JSONResponse((await self._desk.file(current().tenant, request.path_params["file_id"])).as_openai())

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self._desk.delete_file(current().tenant, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._desk.file(current().tenant, request.path_params["file_id"])
        headers = {"content-length": str(file.size_bytes)}
        return StreamingResponse(self._desk.content(file), media_type="application/octet-stream", headers=headers)

    async def create(self, request: Request) -> Response:
        try:
            fields: Any = json.loads(await request.body())
        except ValueError as error:
            raise InvalidRequest(f"the body is no JSON: {error}") from error
        return JSONResponse(as_openai(await self._desk.create(current().tenant, fields, current().cache_salt)))

    async def list_batches(self, request: Request) -> Response:
        limit = _limit(request, _BATCHES_LISTED, 100)
        records, has_more = await self._desk.list_batches(current().tenant, request.query_params.get("after"), limit)
        first, last = (records[0].batch_id, records[-1].batch_id) if records else (None, None)
        data = [as_openai(record) for record in records]
        return JSONResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})

    async def batch(self, request: Request) -> Response:
        return JSONResponse(as_openai(await self._desk.batch(current().tenant, request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(as_openai(await self._desk.cancel(current().tenant, request.path_params["batch_id"])))


def _too_large(limit: int) -> _TooLarge:
    return _TooLarge(f"the file has more than {limit} bytes, the most that is taken: split it")


def _limited(request: Request, most_bytes: int, limit: int) -> Callable[[], Awaitable[Message]]:
    """Its body, until it is over what can hold a file of the limit."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > most_bytes:
            raise _too_large(limit)
        return message

    return receive


async def _parts(file: UploadFile) -> AsyncGenerator[bytes]:
    while part := await file.read(_PART_BYTES):
        yield part


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    return value if isinstance(value, str) else ""


def _life_s(form: FormData) -> int | None:
    """`expires_after` as the official clients send it: `expires_after[seconds]`."""
    text = _text(form, "expires_after[seconds]")
    if not text:
        return None
    if not text.isdigit():
        raise InvalidField(f"expires_after[seconds] is a number, not {text!r}", "expires_after")
    return int(text)


def _limit(request: Request, usual: int, most: int) -> int:
    text = request.query_params.get("limit")
    if text is None:
        return usual
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise InvalidField(f"limit is a number from 1 to {most}, not {text!r}", "limit")
    return int(text)
