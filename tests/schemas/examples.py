"""One example of every message, with no field at its default where that can be; the golden bytes are made of these."""

from jetwake.schemas.batches import BatchJob, BatchRecord, LineError, LineResult
from jetwake.schemas.codec import Message
from jetwake.schemas.decode import KvHandoff, KvReference
from jetwake.schemas.drain import Drained, DrainHeard, DrainOrder
from jetwake.schemas.json_schema import type_tag
from jetwake.schemas.keys import ApiKey
from jetwake.schemas.kv_events import KvChange, KvEvents, KvSnapshotChunk, KvSnapshotWanted
from jetwake.schemas.prefill import PrefillJob, ReleaseKv
from jetwake.schemas.replies import (
    Cancelled,
    CancelRequest,
    Checkpoint,
    DeadLetter,
    Expired,
    Failed,
    Fence,
    Finished,
    PositionLogprobs,
    TokenChunk,
)
from jetwake.schemas.requests import InferenceRequest, Sampling, StructuredOutput
from jetwake.schemas.routing import ConsideredLane, Explain, Explanation, Routed
from jetwake.schemas.workers import KvCompatibility, ModelCard, PrefillTiming, WorkerCard, WorkerLoad

TOKENS = bytes.fromhex("0100000002000000ff7f0000")
HASHES = bytes.fromhex("0123456789abcdeffedcba9876543210")

SAMPLING = Sampling(
    max_tokens=64,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=7,
    stop=["\n\n", "ende"],
    stop_token_ids=[2],
    ignore_eos=True,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.125,
    logprobs=2,
    logit_bias={"5": 1.5},
    allowed_token_ids=[1, 2, 3],
    bad_words=["bad"],
    structured_output=StructuredOutput(kind="json", value="{}"),
    skip_special_tokens=False,
    include_stop_str_in_output=True,
)

REQUEST = InferenceRequest(
    request_id="req-1",
    gateway="gw-1",
    model="org/model-7b",
    priority_class="batch",
    prompt_tokens=TOKENS,
    sampling=SAMPLING,
    lora="adapter",
    cache_salt="salt",
    tenant="tenant-1",
    metadata={"ticket": "7"},
    session="conversation-1",
    attempt=2,
    failures=1,
    failed_workers=["p-9"],
    submitted_ns=1_700_000_000_000_000_001,
    deadline_ns=1_700_000_060_000_000_001,
    cancel_when_unread=True,
)

LOGPROBS = [PositionLogprobs(token_ids=[1, 9], logprobs=[-0.5, -1.25], ranks=[1, 2])]

KV = KvReference(
    engine_id="engine-1",
    engine_request_id="req-1-2-abc",
    host="10.0.0.7",
    port=5600,
    block_ids=[[4, 5, 300]],
    block_size_tokens=16,
    num_tokens=3,
    cached_tokens=2,
)

RULES = SAMPLING.text_rules

ENDING = {
    "request_id": "req-1",
    "model": "org/model-7b",
    "attempt": 2,
    "tokens": TOKENS,
    "logprobs": LOGPROBS,
    "prompt_length_tokens": 3,
    "cached_tokens": 2,
    "predicted_cached_tokens": 1,
    "prefill_worker": "p-1",
    "decode_worker": "d-1",
    "kv_bytes": 1536,
    "ended_ns": 1_700_000_001_000_000_001,
}

COMPATIBILITY = KvCompatibility(
    engine="vllm",
    engine_version="0.32.0",
    nixl_version="1.5.1",
    model="org/model-7b",
    revision="main",
    dtype="bfloat16",
    kv_dtype="auto",
    block_size_tokens=16,
    tensor_parallel=1,
    kv_layout="HND",
)

BATCH = BatchRecord(
    batch_id="batch_1",
    owner="acme",
    cache_salt="salt",
    model="demo",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    metadata={"a": "b"},
    output_expires_s=3600,
    status="expired",
    errors=[LineError(code="invalid_url", message="no", line=3, param="url")],
    total_lines=10,
    completed_lines=7,
    failed_lines=1,
    prompt_tokens=100,
    cached_tokens=50,
    output_tokens=20,
    begun=9,
    order="shared-prefix-1",
    output_file_id="file-2",
    error_file_id="file-3",
    created_ns=1,
    in_progress_ns=2,
    expires_ns=3,
    finalizing_ns=4,
    completed_ns=5,
    failed_ns=6,
    expired_ns=7,
    cancelling_ns=8,
    cancelled_ns=9,
)

EXAMPLES: tuple[Message, ...] = (
    REQUEST,
    PrefillJob(request=REQUEST, router="r-1", reason="least loaded", predicted_cached_tokens=2, routed_ns=1_700_000_000_500_000_001),
    ReleaseKv(request_id="req-1", engine_request_id="req-1-2-abc", reason="cancelled"),
    KvHandoff(
        request=REQUEST,
        kv=KV,
        prefill_worker="p-1",
        prefill_incarnation="i-1",
        first_tokens=TOKENS[:4],
        first_logprobs=LOGPROBS,
        predicted_cached_tokens=2,
        hold_until_ns=1_700_000_030_000_000_001,
        prefilled_ns=1_700_000_000_700_000_001,
    ),
    TokenChunk(request_id="req-1", attempt=2, offset=5, tokens=TOKENS, logprobs=LOGPROBS, cached_tokens=2),
    Finished(**ENDING, finish_reason="stop", stop_reason="2", text_rules=RULES),
    Failed(**ENDING, code="pull_failed", text="the KV cache could not be pulled"),
    Cancelled(**ENDING),
    Expired(**ENDING, phase="decode"),
    Fence(request_id="req-1", attempt=2),
    Checkpoint(request_id="req-1", model="org/model-7b", attempt=2, tokens=TOKENS, text_rules=RULES, deadline_ns=1_700_000_060_000_000_001),
    CancelRequest(request_id="req-1", below_attempt=2, reason="client left"),
    DeadLetter(
        stage="prefill",
        subject="jw.prefill.p-1-i-1",
        code="undecodable",
        text="not msgpack",
        payload=b"\x00\xffgarbage",
        request_id="req-1",
        attempts=3,
        deliveries=4,
        worker="p-1",
        dead_ns=1_700_000_002_000_000_001,
    ),
    ModelCard(
        model="org/model-7b",
        source="/models/7b",
        revision="main",
        vocabulary_size=32_000,
        max_model_len_tokens=4096,
        block_size_tokens=16,
        max_logprobs=5,
    ),
    WorkerCard(
        worker="p-1",
        incarnation="i-1",
        role="prefill",
        state="draining",
        model="org/model-7b",
        pool="model-7b-01234567",
        compatibility=COMPATIBILITY,
        capacity_blocks=512,
        capacity_slots=16,
        max_model_len_tokens=4096,
        domain="rack-1",
        engine_id="engine-1",
        side_channel_host="10.0.0.7",
        side_channel_port=5600,
        peers=["d-1-i-9"],
        pid=4711,
        started_ns=1_700_000_000_000_000_001,
    ),
    WorkerLoad(
        worker="p-1",
        incarnation="i-1",
        fetched_requests=10,
        finished_requests=8,
        running_requests=2,
        running_prompt_tokens=700,
        running_new_tokens=500,
        fetched_sequence=77,
        prefill_timing=PrefillTiming(base_s=0.25, per_token_s=0.5),
        used_blocks=60,
        held_blocks=40,
        held_handoffs=2,
        free_slots=14,
        kv_silent_s=0.5,
    ),
    KvEvents(
        worker="p-1",
        incarnation="i-1",
        number=9,
        changes=[KvChange(kind="stored", hashes=HASHES), KvChange(kind="removed", hashes=HASHES[:8]), KvChange(kind="cleared")],
    ),
    KvSnapshotWanted(router="r-1"),
    KvSnapshotChunk(worker="p-1", incarnation="i-1", number=9, index=1, chunks=2, hashes=HASHES),
    Routed(router="r-1", request_id="req-1", lane="p-1-i-1", sequence=78, work_s=0.5, hashes=HASHES),
    Explain(request=REQUEST, request_id="req-0"),
    Explanation(
        router="r-1",
        request_id="req-1",
        policy="kv_aware",
        lane="p-1-i-1",
        reason="soonest",
        predicted_cached_tokens=32,
        considered=[ConsideredLane(lane="p-1-i-1", role="prefill", score=0.5, words="nothing before it")],
    ),
    DrainOrder(reason="new version"),
    DrainHeard(name="p-1", role="prefill", incarnation="i-1"),
    Drained(name="p-1", incarnation="i-1", in_time=False, moved_requests=3, took_s=2.5),
    ApiKey(
        digest="0f" * 32,
        tenant="tenant-1",
        priority_class="batch",
        requests_per_minute=60,
        tokens_per_minute=90_000,
        note="nightly summaries",
        created_ns=1_700_000_000_000_000_001,
    ),
    BATCH,
    BatchJob(record=BATCH),
    LineResult(
        batch_id="batch_1",
        line=7,
        custom_id="a",
        request_id="batch_1-7",
        status=200,
        body=b"{}",
        prompt_tokens=3,
        cached_tokens=2,
        output_tokens=1,
    ),
)

BY_TAG = {type_tag(type(example)): example for example in EXAMPLES}
