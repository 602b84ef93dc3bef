"""Which endpoints of the OpenAI API are also subjects: `jw.openai.<name>` to ask and hear, `jw.openai.jobs.<name>` for durable jobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """`as_job`: it makes something that is worth waiting for."""

    name: str
    method: str
    path: str
    says: str
    as_job: bool = False


ENDPOINTS = {
    endpoint.name: endpoint
    for endpoint in (
        Endpoint("chat.completions", "POST", "/v1/chat/completions", "OpenAI chat completions", as_job=True),
        Endpoint("completions", "POST", "/v1/completions", "OpenAI completions", as_job=True),
        Endpoint("responses", "POST", "/v1/responses", "OpenAI Responses", as_job=True),
        Endpoint("messages", "POST", "/v1/messages", "Anthropic Messages", as_job=True),
        Endpoint("messages.count_tokens", "POST", "/v1/messages/count_tokens", "Anthropic token counts"),
        Endpoint("models", "GET", "/v1/models", "the models of the gateway that answers"),
        Endpoint("tokenize", "POST", "/tokenize", "text or chat messages to token ids"),
        Endpoint("detokenize", "POST", "/detokenize", "token ids to text"),
    )
}
JOB_ENDPOINTS = {name: endpoint for name, endpoint in ENDPOINTS.items() if endpoint.as_job}
