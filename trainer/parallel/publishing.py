"""Publishing of weights that are spread over ranks: each rank publishes what it has, and rank 0 makes the manifest.

    rank 0    publish(v) ─► an arena is free ─► order `Publish(v)` ─► its part into the arena ─► training goes on
    others                                                           their parts into theirs
              all                                                    hashed in the background, told to rank 0

Rank 0 waits for a free arena (`weight_bus.publisher.publisher`), and gives the order when it has one: then the others'
arena of that turn is free, too, so they hold no leases.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.parallel.orders import Digest, Publish, tell
from trainer.parallel.ranks import Ranks
from weight_bus.manifest.computed import PublishedTensor
from weight_bus.publisher.publisher import Publisher


class LeadingPublisher(Publisher):
    """Rank 0's: the others do the same by its orders. `leads`: the ranks, set before the first call."""

    leads: Ranks

    def begun(self, version: int) -> None:
        tell(self.leads, Publish(version))

    def digest(self, version: int, tensors: Mapping[str, PublishedTensor]) -> str:
        tell(self.leads, Digest(version))
        return super().digest(version, tensors)


def publish_part(publisher: Publisher, order: Publish | Digest, tensors: Mapping[str, PublishedTensor]) -> None:
    """Another rank's part of an order. What fails in the background is told to rank 0, which says so."""
    if isinstance(order, Publish):
        publisher.publish(order.version, tensors)
    else:
        publisher.digest(order.version, tensors)
