"""One subscription, many waiters: answers of the broker find the future of their question by the last token of their subject.

Reads raw messages handed in by `connection`; writes only futures. Promises: each question is answered, failed or forgotten by
its asker; a lost connection fails all of them at once, and a refused publish fails those that asked on that subject. A question
may have many answers: each is handed on, and the last one is its answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..schemas.errors import BusError
from .raw import RawMessage


@dataclass(frozen=True, slots=True)
class _Question:
    """`take` says of each message whether more come after it."""

    subject: str
    answer: asyncio.Future[RawMessage]
    take: Callable[[RawMessage], bool]


class AnswerInbox:
    """`prefix` is this connection's own inbox subject; answers arrive on `<prefix>.<token>`."""

    def __init__(self, prefix: str) -> None:
        self.subject = f"{prefix}.*"
        self._prefix = prefix + "."
        self._questions: dict[str, _Question] = {}
        self._asked = 0

    def ask(self, subject: str, take: Callable[[RawMessage], bool] = lambda _: False) -> tuple[str, asyncio.Future[RawMessage]]:
        """The reply subject to send along, and the future of the answer. `forget` it in the end."""
        self._asked += 1
        reply = self._prefix + str(self._asked)
        answer = asyncio.get_running_loop().create_future()
        self._questions[reply] = _Question(subject, answer, take)
        return reply, answer

    def forget(self, reply: str) -> None:
        self._questions.pop(reply, None)

    def deliver(self, message: RawMessage) -> None:
        question = self._questions.get(message.subject)
        if question is None or question.take(message):
            return
        del self._questions[message.subject]
        if not question.answer.done():
            question.answer.set_result(message)

    def fail_all(self, error: BusError) -> None:
        self._fail(list(self._questions), error)

    def fail_asked_on(self, subject_lowercase: str, error: Callable[[str], BusError]) -> None:
        """`error` of the subject as it was asked."""
        for reply, question in list(self._questions.items()):
            if question.subject.lower() == subject_lowercase:
                self._fail([reply], error(question.subject))

    def _fail(self, replies: list[str], error: BusError) -> None:
        for reply in replies:
            answer = self._questions.pop(reply).answer
            if not answer.done():
                answer.set_exception(type(error)(*error.args))  # one each: they gather tracebacks
                answer.exception()  # whoever asked may be cancelled already: then nobody reads it, and that is no news
