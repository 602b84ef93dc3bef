"""The plan of a chaos run: pure, seeded, and within its bounds."""

from collections import Counter

import pytest

from jetwake.deploy.chaos.load import LoadSettings, drafts
from jetwake.deploy.chaos.plan import KINDS, Targets, kinds_named, plan
from jetwake.schemas.errors import SetupError

TARGETS = Targets(workers=["prefill-1", "decode-1"], routers=["router-1"], clients=["client-1", "client-2"])


def test_the_same_seed_plans_the_same_and_another_seed_another() -> None:
    assert plan(1, 60, 2.0, KINDS, TARGETS) == plan(1, 60, 2.0, KINDS, TARGETS)
    assert plan(1, 60, 2.0, KINDS, TARGETS) != plan(2, 60, 2.0, KINDS, TARGETS)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_early_and_all_is_over_at_the_end(seed: int) -> None:
    faults = plan(seed, 60.0, 2.0, KINDS, TARGETS)
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)
    assert all(fault.at_s > 0 and fault.at_s + fault.duration_s <= 60.0 for fault in faults)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


def test_targets_fit_their_kinds_and_all_of_them_are_hit() -> None:
    faults = plan(0, 3600.0, 2.0, KINDS, TARGETS)
    hit = Counter(fault.target for fault in faults)
    assert all(fault.target.startswith("client") == (fault.kind == "client-cut") for fault in faults)
    assert set(hit) == {*TARGETS.workers, *TARGETS.routers, *TARGETS.clients, ""}
    assert {fault.kind for fault in faults if not fault.target} == {"broker-stop", "broker-kill", "consumer", "stream"}


def test_only_the_kinds_that_were_asked_for() -> None:
    assert {fault.kind for fault in plan(0, 600.0, 2.0, kinds_named("kill, freeze"), TARGETS)} == {"kill", "freeze"}
    with pytest.raises(SetupError, match="earthquake"):
        kinds_named("kill,earthquake")


def test_requests_are_of_all_kinds_and_no_prompt_comes_twice() -> None:
    settings = LoadSettings(rate_per_s=10.0, vocabulary_size=32_000, longest_prompt_tokens=500, longest_answer_tokens=100)
    source = drafts(settings, seed=1, clients=3)
    some = [next(source) for _ in range(1000)]
    assert {draft.wish for draft in some} == {"answer", "cancel", "leave", "deadline"}
    assert {draft.priority_class for draft in some} == {"interactive", "batch"}
    assert {draft.client for draft in some} == {0, 1, 2}
    assert len({draft.prompt for draft in some}) == 1000
    assert all(0 < len(draft.prompt) <= 500 and 1 <= draft.sampling["max_tokens"] <= 100 for draft in some)
    assert 80 < some[-1].at_s < 120
