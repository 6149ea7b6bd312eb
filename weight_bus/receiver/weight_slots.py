"""State of an engine's two weight slots: one is served, the other is spare. Pure: versions and digests, no bytes.

    spare      stage begins ──► nothing ──► staged(v+1) ──commit──► kept(v) ──rollback(v)──► withdrawn(v+1)
    served v                                             v+1                     v

`kept`: the version before, until the next stage begins to overwrite it. `withdrawn`: a version that was rolled back; it
must be staged again before it can be committed, which then reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from services.wire.errors import ConflictError

Role = Literal["staged", "kept", "withdrawn"]


@dataclass(frozen=True)
class Whole:
    """A complete version in memory. `root_digest`: None for weights that came without a manifest."""

    version: int
    root_digest: str | None


@dataclass(frozen=True)
class WeightSlots:
    """`spare` is None while it is written, or was written in part."""

    served: Whole
    spare: Whole | None = None
    role: Role = "kept"

    @property
    def staged(self) -> Whole | None:
        """What a commit would serve."""
        return self.spare if self.role == "staged" else None

    @property
    def kept(self) -> Whole | None:
        """What a rollback would serve."""
        return self.spare if self.role == "kept" else None

    def has(self, version: int, root_digest: str) -> bool:
        """Whether exactly these bytes are in the spare slot, so that staging them reads nothing."""
        return self.spare == Whole(version, root_digest) and self.role != "kept"

    def writing(self) -> WeightSlots:
        """A stage begins to write: the spare slot's version is gone."""
        return WeightSlots(self.served)

    def with_staged(self, whole: Whole) -> WeightSlots:
        return WeightSlots(self.served, whole, "staged")

    def committed(self, version: int) -> WeightSlots:
        """Raises ConflictError unless exactly `version` is staged."""
        if self.staged is None or self.staged.version != version:
            found = "nothing" if self.staged is None else f"version {self.staged.version}"
            raise ConflictError(
                f"version {version} cannot be committed: {found} is staged, {self.served.version} served"
            )
        return WeightSlots(self.staged, self.served, "kept")

    def rolled_back(self, version: int) -> WeightSlots:
        """Raises ConflictError unless exactly `version` was served before and has not been written over."""
        if self.kept is None or self.kept.version != version:
            raise ConflictError(
                f"version {version} cannot be served again: {self._found()}",
                "one step back is kept, until the next version begins to be staged; publish the old weights as a new one",
            )
        return WeightSlots(self.kept, self.served, "withdrawn")

    def undone(self) -> WeightSlots:
        """The last commit or rollback undone; unchanged where the spare slot was written since."""
        if self.spare is None or self.role == "staged":
            return self
        back: Role = "withdrawn" if self.role == "kept" else "kept"
        return replace(self, served=self.spare, spare=self.served, role=back)

    def _found(self) -> str:
        if self.kept is not None:
            return f"version {self.kept.version} is kept, {self.served.version} served"
        if self.role == "withdrawn" and self.spare is not None:
            return f"version {self.served.version} is served, back from {self.spare.version}"
        return f"nothing is kept beside {self.served.version}, which is served"
