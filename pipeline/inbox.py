"""One subscription, many waiters: answers of the broker find the future of their question by the last token of their subject.

Reads raw messages handed in by `connection`; writes only futures. Promises: each question is answered, failed or forgotten by
its asker; a lost connection fails all of them at once, and a refused publish fails those that asked on that subject.
"""

import asyncio
from dataclasses import dataclass

from ..schemas.errors import BusError
from .raw import RawMessage


@dataclass(frozen=True, slots=True)
class _Question:
    subject: str
    answer: asyncio.Future[RawMessage]


class AnswerInbox:
    """`prefix` is this connection's own inbox subject; answers arrive on `<prefix>.<token>`."""

    def __init__(self, prefix: str) -> None:
        self.subject = f"{prefix}.*"
        self._prefix = prefix + "."
        self._questions: dict[str, _Question] = {}
        self._asked = 0

    def ask(self, subject: str) -> tuple[str, asyncio.Future[RawMessage]]:
        """The reply subject to send along, and the future of the answer. `forget` it in the end."""
        self._asked += 1
        reply = self._prefix + str(self._asked)
        answer = asyncio.get_running_loop().create_future()
        self._questions[reply] = _Question(subject, answer)
        return reply, answer

    def forget(self, reply: str) -> None:
        self._questions.pop(reply, None)

    def deliver(self, message: RawMessage) -> None:
        question = self._questions.pop(message.subject, None)
        if question is not None and not question.answer.done():
            question.answer.set_result(message)

    def fail_all(self, error: BusError) -> None:
        self._fail(list(self._questions), error)

    def fail_asked_on(self, subject_lowercase: str, error: BusError) -> None:
        self._fail([reply for reply, q in self._questions.items() if q.subject.lower() == subject_lowercase], error)

    def _fail(self, replies: list[str], error: BusError) -> None:
        for reply in replies:
            answer = self._questions.pop(reply).answer
            if not answer.done():
                answer.set_exception(type(error)(*error.args))  # one each: they gather tracebacks
                answer.exception()  # whoever asked may be cancelled already: then nobody reads it, and that is no news
