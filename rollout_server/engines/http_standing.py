"""What is known of the engine behind a URL: does it answer, and which weights does it serve? Pure.

    unseen ── found ──► serving ◄── found, the version that was committed ──┐
                           │ lost                                           │
                           ▼                                                │
                         lost ── found, other weights ──► strange ── committed

An engine that lost its weights (its process began anew) serves nothing until a version is committed to it: what it would
draw with is not what this server's tokens are stamped with.
"""

from __future__ import annotations

from rollout_server.engines.http_errors import EngineLostError
from rollout_server.engines.http_flow import OtherWeightsError
from rollout_server.engines.vllm_outputs import version_number

FIRST_VERSION = 0


class Standing:
    """`url` names the engine in errors."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lost: str | None = "it was not asked yet"
        self._strange: str | None = None
        self._seen = False
        self._committing: int | None = None
        self.version = FIRST_VERSION
        """What tokens are stamped with; after a loss of weights the version that the engine says."""
        self.known: set[int] = set()
        """Versions that tokens may carry: those committed since the engine was found, and one being committed."""
        self.older: set[int] = set()
        """Those among them that the engine went back to."""

    @property
    def failure(self) -> str | None:
        """Why nothing is served; None while something is."""
        if self._lost is not None:
            return f"the engine at {self._url} does not answer: {self._lost}"
        if self._strange is not None:
            return f"the engine at {self._url} serves unknown weights: {self._strange}"
        return None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raise EngineLostError or OtherWeightsError unless requests can be drawn for."""
        failure = self.failure
        if failure is None:
            return
        kind = EngineLostError if self._lost is not None else OtherWeightsError
        raise kind(failure, "send the request to another server")

    def lose(self, why: str) -> None:
        self._lost = why

    def find(self, label: str | None) -> None:
        """It answers. `label`: what it calls its weights; None where it does not say and nobody can change them."""
        self._lost = None
        version = self._number(label)
        if not self._seen and version is not None:
            self._seen, self.version = True, version
        elif version is None:
            self._strange = f"it calls them {label!r}, which is no version"
        elif version != self.version or self._strange is not None:
            self._strange = self._strange or f"it says version {label} where {self.version} was committed"
            self.version = version
        self.known, self.older = {self.version}, set()

    def estrange(self, why: str) -> None:
        """It drew with weights that nobody committed through this server."""
        self._strange = why

    def rolling_back(self, version: int) -> None:
        """From now on tokens of this older version are no surprise, also to requests that were sent under a newer one."""
        self.older.add(version)

    def committing(self, version: int) -> None:
        """From now on tokens may be of `version` too."""
        self._committing = version
        self.known.add(version)

    def committed(self, version: int) -> None:
        self._seen, self._strange, self._committing = True, None, None
        self.version = version

    def commit_failed(self) -> None:
        """The engine said that it still serves what it served."""
        self._committing = None

    def serves(self, label: str | None) -> bool:
        """Does the engine's label say what is expected, now or while a version is being committed?"""
        return self._number(label) in (self.version, self._committing)

    def _number(self, label: str | None) -> int | None:
        if label is None:
            return FIRST_VERSION
        try:
            return version_number(label)
        except ValueError:
            return None
