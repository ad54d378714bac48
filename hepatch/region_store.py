"""The regions of one engine, one for each selection, and the bound on what they record.

A recording cannot be dropped alone: CUDA graph trees keep it in a closure that lives as long as its region. So keys are
admitted up to a limit. Past it a step is padded up to a key that covers it; where none does, every region goes, and
compiling starts over. Keys that are exact positions can be padded to nothing: past the limit such a step runs outside
the region. All of it keeps tokens right; the report shows the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.region import Region
    from hepatch.sampling import Request, Selection

# Distinct selections are distinct programs. A training run has one or two; more than this is a sweep.
MOST_REGIONS = 8


class RegionKey(NamedTuple):
    """What a recording is made for: `rows` of the batch, and the `window` of positions, the new token's included."""

    rows: int
    window: int


@dataclass(frozen=True)
class Lease:
    """The keys of one call: fixed rows, and a window that grows with the sequence.

    Args:
        rows: rows of every key.
        bucket: positions by which a window grows.
        windows: where recordings are at their bound, the windows that exist; empty: every multiple of the bucket.
        exact: a window is the length itself.
    """

    rows: int
    bucket: int
    windows: tuple[int, ...] = ()
    exact: bool = False

    def window(self, length: int) -> int:
        """The smallest window that holds `length` positions."""
        if self.exact:
            return length
        if self.windows:
            return next(window for window in self.windows if window >= length)
        window = -(-length // self.bucket) * self.bucket
        # In a first compilation equal sizes become one symbol, and it would compile again when they part.
        return window if window != self.rows else window + self.bucket

    def keys(self, first: int, last: int) -> set[RegionKey]:
        """The keys of all lengths from `first` to `last`."""
        steps = {*range(first, last, self.bucket), last} if first <= last else set()
        return {RegionKey(self.rows, self.window(length)) for length in steps}


@dataclass(frozen=True)
class BucketLeases:
    """Leases of keys that may be padded up: in rows to two, in positions to a multiple of the bucket.

    Args:
        bucket: positions by which a window grows.
    """

    bucket: int

    def lease(self, batch: int) -> Lease:
        """The lease of a call of `batch` rows."""
        # One row is padded to two, because Dynamo compiles a size of one apart.
        return Lease(max(2, batch), self.bucket)


@dataclass(frozen=True)
class ExactLeases:
    """Leases of keys that are a batch and a position, with nothing padded: one recording each."""

    def lease(self, batch: int) -> Lease:
        """The lease of a call of `batch` rows."""
        return Lease(batch, 1, exact=True)


class RegionStore:
    """Admits keys and hands out regions.

    Args:
        build: makes the region for a request.
        leases: makes the lease of a call.
        limit: keys admitted over all regions.
    """

    def __init__(self, build: Callable[[Request], Region], leases: BucketLeases | ExactLeases, limit: int) -> None:
        self._build = build
        self._leases = leases
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
            region.is_full = lambda: self.admitted >= self.limit
        self._regions.move_to_end(request.selection)
        region.chooser.load(request)
        return region

    def lease(self, region: Region, batch: int, prompt: int, length: int) -> Lease | None:
        """The keys that a call will use; None when the limit is reached and what is recorded does not cover the call.

        Args:
            region: from `region`.
            batch: rows of the call.
            prompt: columns of the prompt.
            length: prompt and new tokens.
        """
        wanted = self._leases.lease(batch)
        if wanted.exact or self.admitted + len(wanted.keys(prompt + 2, length) - region.visits.keys()) <= self.limit:
            return wanted
        windows: dict[int, list[int]] = {}
        for rows, window in region.visits:
            if rows >= batch:
                windows.setdefault(rows, []).append(window)
        covering = [Lease(rows, wanted.bucket, tuple(sorted(of))) for rows, of in windows.items() if max(of) >= length]
        return min(covering, key=lambda lease: lease.rows, default=None)

    def one_key(self, batch: int, prompt: int, length: int) -> Lease:
        """A lease of a single key, for a limit smaller than what one call would record."""
        wanted = self._leases.lease(batch)
        return Lease(wanted.rows, wanted.bucket, (wanted.window(length),))

    def drop(self) -> None:
        """Forgets every region; their graphs go with them."""
        self._regions.clear()
