"""What any plugin's tests can start with: the conformance kit."""

from quire_sjf import ShortestJobFirstScheduler  # type: ignore[import-not-found, unused-ignore]

from plugins.conformance import check_scheduler


def test_conforms() -> None:
    check_scheduler(ShortestJobFirstScheduler)
