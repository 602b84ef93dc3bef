"""Read by gateways: who may ask, as what tenant, and how much. In the bucket `jw_keys`, under the digest, or in a file."""

import hashlib
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from .codec import Message
from .requests import PriorityClass, TenantName

KeyDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ApiKey(Message):
    """`digest` is the SHA-256 of the key, which itself is kept nowhere. A limit of 0 is none."""

    type: Literal["api_key"] = "api_key"
    digest: KeyDigest
    tenant: TenantName
    priority_class: PriorityClass | None = Field(default=None, description="of all its requests; None: as each request asks")
    requests_per_minute: int = Field(default=0, ge=0)
    tokens_per_minute: int = Field(default=0, ge=0, description="prompt and output tokens together")
    note: str = Field(default="", max_length=200)
    created_ns: int = 0


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
