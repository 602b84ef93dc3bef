"""Read by gateways that run batches: the job on `jw.batches.<model>`, the batch in the bucket `jw_batches`, its lines' results.

A batch's record is changed only by compare-and-set: by who created or cancels it, and by the one gateway that runs it. A line's result
is stored once (`jw.batchlines.<batch>.<line>`, the first writer wins), so a batch that changes hands has one result for each line.
"""

from typing import Literal

from pydantic import Field

from .codec import Message
from .requests import SafeToken

BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class LineError(Message):
    """Why a line of the input, or all of it (`line` None), is refused. Lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(Message):
    """Times are the broker's; 0: that has not happened. `owner`: the tenant; empty where there are none.

    `begun`: lines, in the order `order` names, that may have been sent already; results of those are looked for before they are sent.
    """

    type: Literal["batch"] = "batch"
    batch_id: SafeToken
    owner: str = ""
    cache_salt: str = ""
    model: str = ""
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] = {}
    output_expires_s: int = Field(default=0, ge=0, description="0: as the gateway keeps files")
    status: BatchStatus = "validating"
    errors: list[LineError] = []
    total_lines: int = Field(default=0, ge=0)
    completed_lines: int = Field(default=0, ge=0)
    failed_lines: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)
    begun: int = Field(default=0, ge=0)
    order: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    created_ns: int = 0
    in_progress_ns: int = 0
    expires_ns: int = 0
    finalizing_ns: int = 0
    completed_ns: int = 0
    failed_ns: int = 0
    expired_ns: int = 0
    cancelling_ns: int = 0
    cancelled_ns: int = 0


class BatchJob(Message):
    """Somebody runs this batch: whoever holds this message, for as long as it does. `record`: as it was created."""

    type: Literal["batch_job"] = "batch_job"
    record: BatchRecord


class LineResult(Message):
    """What the line of a batch got: a response as an HTTP client would have got it. `body` is its JSON."""

    type: Literal["line_result"] = "line_result"
    batch_id: SafeToken
    line: int = Field(ge=1)
    custom_id: str
    request_id: SafeToken
    status: int
    body: bytes
    prompt_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)

    @property
    def succeeded(self) -> bool:
        return self.status < 400
