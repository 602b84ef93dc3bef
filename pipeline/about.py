"""What a log line is about, said the same way everywhere: `logger.info("...", extra=about(request, worker))`."""

from ..schemas.requests import InferenceRequest


def about(request: InferenceRequest, worker: str = "") -> dict[str, object]:
    return {"request_id": request.request_id, "attempt": request.attempt, "worker": worker}
