"""What a gateway needs to know beside vLLM's own front-end flags."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ..batches.settings import BatchSettings


class GatewaySettings(BaseModel):
    """One gateway process serves one model. Nothing listens beyond loopback unless `host` says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="whose replies these are: two gateways must not share one")
    host: str = Field(default="127.0.0.1", description="address to listen on; beyond loopback only with API keys or allow_open")
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free one")
    admin_host: str = Field(default="127.0.0.1", description="address of the admin port")
    admin_port: int = Field(default=0, ge=0, le=65535, description="metrics and health; 0: any free one")
    dashboard_nkey_file: Path | None = Field(
        default=None, description="seed of the observer, for the live page: a gateway's own user may not look at all that happens"
    )
    model: str | None = Field(default=None, description="the name its workers serve it under; None: the only one there is")
    tokenizer: Path | None = Field(
        default=None, description="folder with the tokenizer and the model's configuration; None: the model's own"
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of every request")
    keep_alive_s: float = Field(default=10.0, ge=0, description="a silent stream gets a comment this often; 0: never")
    resume_grace_s: float = Field(
        default=5.0,
        ge=0,
        description="how long a broken stream goes on for whoever resumes it; 0: it is cancelled at once, none can be resumed",
    )
    model_timeout_s: float = Field(default=900.0, gt=0, description="how long a starting gateway waits for a worker to announce the model")
    max_body_bytes: int = Field(default=32 << 20, ge=1024, description="of one request over HTTP")
    retry_after_s: float = Field(default=1.0, gt=0, description="what a refused client is told to wait at least")
    store_patience_s: float = Field(
        default=5.0, gt=0, description="how long the broker may take to store a request before the client hears 503"
    )
    grace_s: float = Field(default=30.0, gt=0, description="how long answers may go on after the gateway was told to stop")
    batches: BatchSettings = BatchSettings()
    ready_file: Path | None = Field(default=None, description="where to write the URLs once it serves")
    over_nats: bool = Field(default=True, description="whether requests and jobs on subjects are served too")
    nats_slots: int = Field(default=1024, ge=1, description="requests from subjects in work at the same time")
    job_slots: int = Field(default=64, ge=1, description="durable jobs in work at the same time")
    job_timeout_s: float = Field(default=86_400.0, gt=0, le=86_400.0, description="of durable jobs that name none, from their publish on")
    api_keys: Path | None = Field(default=None, description="file with API keys, beside those in the broker")
    allow_open: bool = Field(default=False, description="listen beyond loopback without any API key")
    quota_replicas: int = Field(default=1, ge=1, description="gateways that serve the same tenants: each grants its part of a quota")
    flags: tuple[str, ...] = Field(default=(), description="any front-end flag of `vllm serve`")
