"""How the root span of a request ends: with what its terminal says."""

from ..pipeline.tracing import Root, Value
from ..schemas import signals
from ..schemas.errors import DeadlineExceeded, RequestCancelled
from ..schemas.replies import AnyTerminal, Failed, Finished
from ..schemas.signals import Attribute
from ..schemas.tokens import token_count


def end_root(root: Root, terminal: AnyTerminal | None) -> None:
    """`terminal` None: whoever asked went away before the end."""
    if terminal is None:
        root.end(error_code=RequestCancelled.code, error_text="whoever asked went away")
        return
    facts: dict[Attribute, Value] = {
        signals.ATTEMPT: terminal.attempt,
        signals.INPUT_TOKENS: terminal.prompt_length_tokens,
        signals.CACHED_TOKENS: terminal.cached_tokens,
        signals.OUTPUT_TOKENS: token_count(terminal.tokens),
    }
    if isinstance(terminal, Finished):
        root.end({**facts, signals.FINISH_REASONS: [terminal.finish_reason]})
        return
    code, text = error_of(terminal)
    root.end(facts, code, text)


def error_of(terminal: AnyTerminal) -> tuple[str, str]:
    """Code and text of one that did not finish; empty for one that did."""
    if isinstance(terminal, Finished):
        return "", ""
    if isinstance(terminal, Failed):
        return terminal.code, terminal.text
    if terminal.type == "cancelled":
        return RequestCancelled.code, "it was cancelled"
    return DeadlineExceeded.code, terminal.phase or "its deadline passed"
