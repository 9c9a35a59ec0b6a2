"""The conformance kit: run it in your plugin's tests, and the engine will get along with your policy.

    from plugins.conformance import check_scheduler
    def test_conforms() -> None:
        check_scheduler(MyScheduler)

Each check is a seeded random workout against a simple reference model. It raises AssertionError (or the
IntegrityError that the policy itself raised) with the seed and the operation at which the two disagreed.
"""

from plugins.conformance.drafter import check_drafter
from plugins.conformance.kv_manager import KVManagerWorkout, check_kv_manager
from plugins.conformance.prefix_cache import PrefixCacheWorkout, check_prefix_cache
from plugins.conformance.scheduler import check_scheduler

__all__ = [
    "KVManagerWorkout",
    "PrefixCacheWorkout",
    "check_drafter",
    "check_kv_manager",
    "check_prefix_cache",
    "check_scheduler",
]
