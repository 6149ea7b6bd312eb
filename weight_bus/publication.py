"""What `publish` hands back at once: a version whose bytes are in place, and whose manifest is being made."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout

from services.wire.errors import DeadlineError, NotReadyError
from weight_bus.manifest import Manifest

MANIFEST_DEADLINE_S = 60.0


class Publication:
    """`future` comes true with the manifest, or fails with what stood against it (ConflictError for a reused version)."""

    def __init__(self, version: int, future: Future[Manifest]) -> None:
        self.version = version
        self.future = future

    def manifest(self, timeout_s: float = MANIFEST_DEADLINE_S) -> Manifest:
        """Wait for the manifest. Raises what making it raised, DeadlineError, or NotReadyError from a closed publisher."""
        try:
            return self.future.result(timeout=timeout_s)
        except CancelledError as error:
            raise NotReadyError(f"the publisher was closed before version {self.version} had a manifest") from error
        except FutureTimeout as error:
            if self.future.done():
                raise
            raise DeadlineError(f"the manifest of version {self.version} took longer than {timeout_s:g} s") from error
