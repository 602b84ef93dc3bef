"""One streamed response that can be gone on with elsewhere: what its two ends in this gateway tell each other. Pure.

The engine client says before each output how many tokens the response has had; the front numbers the events that come of it, and of a
resumed response leaves out those that the client has.
"""

import zlib
from dataclasses import dataclass, field

from ...schemas.errors import NotResumable
from ...schemas.streamed import StreamedRequest
from .exchange import new_request_id
from .positions import START, Point, Position, event_id

SEVERAL = "a stream of several answers (n above 1, or several prompts) cannot be resumed: its answers are interleaved as they come"


@dataclass
class Streaming:
    """`by_token`: events depend on how tokens are cut (parsers of tools and reasoning hold some back), so each token is one output.

    `resumed`: what is known of the response that this one goes on with, after `since`. `reader`: a name for this reader alone.
    """

    path: str
    body: bytes
    by_token: bool
    resumed: StreamedRequest | None = None
    since: Point = START
    reader: str = field(default_factory=new_request_id)
    named: bool = False
    excluded: bool = False
    _tokens: int = 0
    _ended: bool = False
    _event: int = -1
    _digest: int = 0
    _reached: bool = False

    @property
    def arrived(self) -> bool:
        """Whether it is known that this goes on with what the client has."""
        return self._reached or not self.since.position.tokens

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first output makes more events than others, so it is the same in every rendering."""
        return (1, self.since.position.tokens)

    def exclude(self) -> None:
        """It is not of a kind that can be resumed. Raises NotResumable where that was wanted."""
        self.excluded, self.named = True, False
        if self.resumed is not None:
            raise NotResumable(SEVERAL)

    def given(self, tokens: int, ended: bool, new_tokens: bytes) -> None:
        """The next output ends here. Raises NotResumable when this is not what the client has begun to read."""
        self.named = not self.excluded
        if new_tokens:
            self._digest = zlib.crc32(new_tokens, self._digest)
        if (tokens, ended) != (self._tokens, self._ended):
            self._tokens, self._ended, self._event = tokens, ended, -1
        if self.resumed is not None and not self._reached:
            self._arrive()

    def _arrive(self) -> None:
        wanted = self.since.position.tokens
        if self._tokens < wanted:
            if self._ended:
                raise NotResumable(f"the answer has {self._tokens} tokens, and not {wanted}: resume with the id of an event of this stream")
            return
        self._reached = True
        if not wanted:
            return
        if self._tokens > wanted:
            raise NotResumable(f"no event of this stream ends with token {wanted}: resume with the id of an event")
        if self.since.digest not in (None, self._digest):
            raise NotResumable(
                f"the first {wanted} tokens are not those that this stream began with: what was given of it was lost; ask again"
            )

    def next_id(self, request_id: str) -> str | None:
        """For the event that comes now; None when the client has it."""
        self._event += 1
        position = Position(self._tokens, self._ended, self._event)
        if self.resumed is not None and position <= self.since.position:
            return None
        return event_id(request_id, position, self._digest)
