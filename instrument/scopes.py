"""What the schema of a step says of its numbers, by how the job is parallel."""
from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms

from instrument import _compat
from instrument.notices import tell
from instrument.schema import Metric, of_this_rank

_told: set[str] = set()


def scoped(metrics: Sequence[Metric], allow_unverified: bool = False) -> list[Metric]:
    """The metrics with the scope that they have here: as they are, this rank's own, or of the shards that it holds.

    The last is told once a process. Norms of whole tensors made of shards have their scope already.
    """
    setting = _compat.sharded_here(allow_unverified)
    if setting:
        if setting not in _told:
            _told.add(setting)
            scaled = (" With gradients_mean=True, MindSpore scales gradients of replicated parameters, and those of sharded "
                      "ones not: the norms show it." if ms.get_auto_parallel_context("gradients_mean") else "")
            norms = ("Norms are added up over all ranks" if _compat.pipeline_stage()[1] == 1 else
                     "Norms are of what this rank holds")
            tell(f"allow_unverified=True: with {setting} nothing has been verified on an accelerator. {norms}, and all else "
                 f"is of what this rank holds. Compare with one device before you rely on it.{scaled}", stacklevel=5)
        return [each if each.scope == "unverified" else of_this_rank([each], "shard")[0] for each in metrics]
    return of_this_rank(metrics) if _compat.trains_alone() else list(metrics)
