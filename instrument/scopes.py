"""What the schema of a step says of its numbers, by how the job is parallel."""
from __future__ import annotations

from collections.abc import Sequence

from instrument import _compat
from instrument.notices import tell
from instrument.schema import Metric, of_this_rank

_told: set[str] = set()


def scoped(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics with the scope that they have here: as they are, this rank's own, or of the shards that it holds.

    The last is told once a process.
    """
    setting = _compat.sharded_by()
    if setting:
        if setting not in _told:
            _told.add(setting)
            tell(f"allow_unverified=True: with {setting} nothing has been verified. Each number is of what this rank holds; "
                 "instrument.sharding.norms makes whole norms of those of all ranks. Compare with one device before you rely "
                 "on it.", stacklevel=5)
        return of_this_rank(metrics, "shard")
    return of_this_rank(metrics) if _compat.trains_alone() else list(metrics)
