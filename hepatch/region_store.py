"""The regions of one engine, one for each selection, and the bound on what they record.

A recording cannot be dropped alone: CUDA graph trees keep it in a closure that lives as long as its region. So keys are admitted
up to a limit. Past it a step is padded up to a key that covers it; where none does, every region goes, and compiling starts
over. Both keep tokens right; the report shows the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hepatch.region import Region, RegionKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.backends.static_kv import Capacity
    from hepatch.sampling import Request, Selection

# Distinct selections are distinct programs. A training run has one or two; more than this is a sweep.
MOST_REGIONS = 8


class RegionStore:
    """Admits keys and hands out regions.

    Args:
        build: makes the region for a request.
        bucket: KV positions by which a window grows.
        limit: keys admitted over all regions.
    """

    def __init__(self, build: Callable[[Request], Region], bucket: int, limit: int) -> None:
        self._build = build
        self._bucket = bucket
        self.limit = limit
        self._regions: OrderedDict[Selection, Region] = OrderedDict()

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def any_region(self) -> Region | None:
        """One of the regions, for facts that all share (thread, autocast)."""
        return next(iter(self._regions.values()), None)

    @property
    def admitted(self) -> int:
        """Keys admitted so far."""
        return sum(len(region.visits) for region in self._regions.values())

    def region(self, request: Request) -> Region:
        """The region of a request's selection, with the request's numbers loaded."""
        region = self._regions.get(request.selection)
        if region is None:
            while len(self._regions) >= MOST_REGIONS:
                self._regions.popitem(last=False)
            region = self._regions[request.selection] = self._build(request)
        self._regions.move_to_end(request.selection)
        region.chooser.load(request)
        return region

    def admit(self, region: Region, batch: int, length: int, capacity: Capacity) -> RegionKey | None:
        """The key for a step, or None when the limit is reached and no admitted key covers the step.

        Args:
            region: from `region`.
            batch: rows of the call.
            length: KV positions that the step reads, the one it writes included.
            capacity: of the buffers now.
        """
        wanted = wanted_key(batch, length, self._bucket, capacity)
        if wanted in region.visits or self.admitted < self.limit:
            return wanted
        covering = [
            key
            for key in region.visits
            if key.allocated == wanted.allocated and key.covers(wanted.rows, wanted.window)
        ]
        return min(covering, key=lambda key: key.rows * key.window, default=None)

    def drop(self) -> None:
        """Forgets every region; their graphs go with them."""
        self._regions.clear()


def wanted_key(batch: int, length: int, bucket: int, capacity: Capacity) -> RegionKey:
    """The key of a step before the limit has its say.

    One row is padded to two, because Dynamo compiles a size of one apart. Rows that would equal another symbolic size get one
    more: in a first compilation equal sizes would become one symbol (see `static_kv`).
    """
    allocated = capacity.allocated
    window = min(-(-length // bucket) * bucket, capacity.length)
    rows = max(2, batch)
    while rows in (window, allocated[1]):
        rows += 1
    return RegionKey(rows, window, allocated)
