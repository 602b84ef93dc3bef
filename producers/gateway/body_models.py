"""What vLLM's front end says to a body before it is asked anything: its own request models. Imports vLLM."""

import json

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMClientError

from ...schemas.batches import LineError
from ...schemas.codec import first_complaint

_MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}


def refused_body(endpoint: str, body: bytes) -> LineError | None:
    """The first complaint. What depends on the prompt's length in tokens is found only when it is sent."""
    try:
        _MODELS[endpoint].model_validate(json.loads(body))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors(include_url=False, include_input=False)[0]["loc"])
        return LineError(code="invalid_request", message=first_complaint(error), param=where or None)
    except (VLLMClientError, ValueError, TypeError) as error:  # what its validators raise themselves
        return LineError(code="invalid_request", message=str(error), param=getattr(error, "parameter", None))
    return None
