"""The doctor tells a process with the wrong user from one with the right one, and leaves nothing at the broker."""

from jetwake.deploy.doctor.broker import broker_findings
from jetwake.deploy.doctor.finding import is_wrong
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.permissions import Role
from jetwake.pipeline.settings import TopologySettings
from jetwake.pipeline.topology import stream_counts

from .conftest import Secured


async def test_a_user_must_be_allowed_what_its_role_does(secured: Secured) -> None:
    async with Bus.connect(secured.settings("admin"), "test") as admin:
        before = await stream_counts(admin)
        roles: list[tuple[Role, str]] = [
            ("router", ""),
            ("prefill", ""),
            ("decode", ""),
            ("aggregated", ""),
            ("gateway", "gateway-1"),
            ("client", "alice"),
        ]
        for role, name in roles:
            found = await broker_findings(secured.settings(role, name), TopologySettings(), role, monitor_port=1)
            assert not is_wrong(found), found
            assert [finding.state for finding in found if finding.what == "permissions"] == ["ok"]
        found = await broker_findings(secured.settings("prefill"), TopologySettings(), "decode", monitor_port=1)
        wrong = next(finding for finding in found if finding.what == "permissions")
        assert wrong.state == "wrong"
        assert "jw.claims" in wrong.found
        assert await stream_counts(admin) == before
