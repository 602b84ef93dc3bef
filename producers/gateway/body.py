"""Fields of a request body that are refused before anything else sees them. Pure.

Some are internal: they name our KV blocks, our caches or our engines. Others ask for what is not served here, and vLLM's front end
would drop them in silence.
"""

import json
import re
from typing import Any, cast

from .failures import Failure

INTERNAL = ("kv_transfer_params", "ec_transfer_params", "cache_salt", "kv_hints", "data_parallel_rank")
INTERNAL_PREFIXES = ("bootstrap_", "jw_")
ARGUMENTS = "vllm_xargs"
UNSERVED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "web_search_options": "there is no web search",
    "moderation": "there is no moderation",
    "best_of": "use n",
    "use_beam_search": "there is no beam search",
    "prompt_embeds": "only text and token ids are served",
}

_WORDS = (*INTERNAL, *INTERNAL_PREFIXES, ARGUMENTS, *UNSERVED, "modalities")
_SUSPECT = re.compile(rb'"(?:' + b"|".join(word.encode() for word in _WORDS) + rb")")
"""Bodies are large and nearly all are innocent: only one with such a word (or a disguised one) is parsed a second time.

The pattern begins with one byte, which is searched for ten times as fast as the first byte of a choice.
"""
_DISGUISE = b"\\u"


def refused_field(body: bytes) -> Failure | None:
    """A refusal that names the first field that must not be there. A body that is no JSON is left to the handler."""
    if _DISGUISE not in body and _SUSPECT.search(body) is None:
        return None
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    return _refusal(cast(dict[str, Any], fields))


def _refusal(fields: dict[str, Any]) -> Failure | None:
    for name, value in fields.items():
        if name in INTERNAL or name.startswith(INTERNAL_PREFIXES):
            return Failure(400, "invalid_request", f"{name} is internal to the server: leave it out", param=name)
        if name in UNSERVED and value and not (name == "best_of" and value == 1):
            return Failure(400, "invalid_request", f"{name} is not served here: {UNSERVED[name]}", param=name)
    if "audio" in (fields.get("modalities") or ()):
        return Failure(400, "invalid_request", "modalities can only be text here", param="modalities")
    arguments = fields.get(ARGUMENTS)
    for name in cast(dict[str, Any], arguments) if isinstance(arguments, dict) else ():
        if name != "session_id":
            return Failure(400, "invalid_request", f"{ARGUMENTS} can only carry session_id here, not {name}", param=ARGUMENTS)
    return None
