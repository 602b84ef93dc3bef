"""A worker that can exchange KV with nobody is named, with the reason."""

from jetwake.consumers.peers import without_peers
from jetwake.schemas.workers import KvCompatibility, WorkerCard, pool_name


def card(worker: str, role: str, model: str = "m", block_size_tokens: int = 16, **changes: object) -> WorkerCard:
    compatibility = KvCompatibility(
        engine="e", engine_version="1", nixl_version="1", model=model, revision="", dtype="f", kv_dtype="f",
        block_size_tokens=block_size_tokens, tensor_parallel=1,
    )  # fmt: skip
    fields = {
        "worker": worker, "incarnation": "1", "role": role, "model": model, "pool": pool_name(model, compatibility),
        "compatibility": compatibility, "capacity_blocks": 10, "capacity_slots": 4, "max_model_len_tokens": 100,
    }  # fmt: skip
    return WorkerCard.model_validate({**fields, **changes})


def alone(*cards: WorkerCard) -> dict[str, str]:
    return without_peers({each.worker: each for each in cards})


def test_a_pair_that_has_shaken_hands_and_an_aggregated_worker_are_not_named() -> None:
    assert alone(card("p", "prefill"), card("d", "decode", peers=["p-1"]), card("a", "aggregated", model="other")) == {}


def test_what_differs_is_said() -> None:
    found = alone(card("p", "prefill"), card("d", "decode", peers=["p-1"]), card("q", "prefill", block_size_tokens=32))
    assert found == {"q": "d has block_size_tokens 16, not 32"}


def test_that_nobody_is_there_and_that_nobody_has_answered_are_told_apart() -> None:
    found = alone(card("p", "prefill"), card("d", "decode", model="other"), card("q", "prefill", model="other"))
    assert found["p"] == "there is no decode worker for m"
    assert found["d"].startswith("no handshake with q yet")
    assert found["q"].startswith("no handshake with d yet")
