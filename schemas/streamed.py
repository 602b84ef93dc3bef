"""Read by whichever gateway goes on with a streamed response that another one began, from `jw.openai-bodies.<gateway>.<request>`."""

from typing import Literal

from .codec import Message
from .requests import SafeToken


class StreamedRequest(Message):
    """What a streamed response was made of, beside its tokens. Kept in memory, for minutes, and only as long as there is room.

    `gateway`: where its replies go. `rendering`: how its gateway makes events of tokens; one that does it otherwise cannot go on.
    """

    type: Literal["streamed_request"] = "streamed_request"
    request_id: SafeToken
    gateway: SafeToken
    model: str
    tenant: str = ""
    deadline_ns: int = 0
    path: str
    body: bytes
    rendering: str
