"""Client of the weight bus for operators: status, publish a folder, commit, roll back, verify, watch.

with WeightsClient("http://127.0.0.1:8200") as weights:
    update = weights.push("/models/step-120")
    assert weights.wait(update.version, 60).state == "committed"
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from services.config.model_folder import weight_file_bytes
from services.policies.training.deadlines import SLACK, within
from services.security.tls import PUBLIC, Trust
from services.wire import weights_api
from services.wire.error_answer import typed_error
from services.wire.errors import DeadlineError, RollmeshError, WireError

CALL_TIMEOUT_S = 30.0
SNAPSHOT_LEAST_S = 600.0
"""The bus hashes the whole folder, or has every engine hash what it serves, before it answers: more for more bytes."""
_POLL_S = 20.0
_SILENCE_S = 20.0
"""The bus says something every five seconds, if only that it lives."""
_RECONNECT_S = 0.5
ViewT = TypeVar("ViewT", bound=BaseModel)


class WeightsClient:
    """Calls of one operator. `key`: the bus's admin key, where it has one; `trust`: whose certificate it may show.

    Methods raise the typed error that the bus answered (ConflictError, NotFoundError, UnauthenticatedError …), or
    DeadlineError when it cannot be reached or does not answer in time, UntrustedError where somebody else answers.
    """

    def __init__(
        self, url: str, *, key: str | None = None, timeout_s: float = CALL_TIMEOUT_S, trust: Trust = PUBLIC
    ) -> None:
        self._url, self._trust = trust.address(url), trust
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self._url, headers=headers, timeout=httpx.Timeout(timeout_s), verify=trust.verify
        )

    def __enter__(self) -> WeightsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def engines(self) -> weights_api.EnginesView:
        return self._call(weights_api.EnginesView, "GET", "/v1/engines")

    def versions(self) -> weights_api.VersionsView:
        return self._call(weights_api.VersionsView, "GET", "/v1/versions")

    def update(self, version: int) -> weights_api.UpdateView:
        return self._call(weights_api.UpdateView, "GET", f"/v1/updates/{version}")

    def push(self, folder: str, *, version: int | None = None, hold: bool = False) -> weights_api.UpdateView:
        """Publish a folder of safetensors, an absolute path that bus and engines can read; returns as it begins to stage.

        `hold`: stage only, until `commit`.
        """
        order = weights_api.PushSnapshot(folder=folder, version=version, hold=hold)
        within_s = within(SNAPSHOT_LEAST_S, weight_file_bytes(Path(folder)))
        return self._call(weights_api.UpdateView, "POST", "/v1/snapshots", order, timeout_s=within_s)

    def wait(self, version: int, deadline_s: float) -> weights_api.UpdateView:
        """Wait until an update has settled or is held. Raises DeadlineError when it is neither by then."""
        ends = time.monotonic() + deadline_s
        while True:
            wait_s = max(0.0, min(_POLL_S, ends - time.monotonic()))
            path = f"/v1/updates/{version}?wait_s={wait_s:.3f}"
            view = self._call(weights_api.UpdateView, "GET", path, timeout_s=wait_s + self._timeout_s)
            if view.state in weights_api.SETTLED or view.state == "held":
                return view
            if time.monotonic() >= ends:
                slow = ", ".join(f"{engine.engine_id} is {engine.state}" for engine in view.engines)
                raise DeadlineError(f"weight update {version} has not settled after {deadline_s:g} s ({slow})")

    def commit(self, version: int) -> weights_api.UpdateView:
        """Flip a held version, let a stopped roll go on, or offer a withdrawn version again."""
        return self._call(weights_api.UpdateView, "POST", f"/v1/updates/{version}/commit")

    def cancel(self, version: int) -> weights_api.UpdateView:
        return self._call(weights_api.UpdateView, "POST", f"/v1/updates/{version}/cancel")

    def rollback(self, version: int | None = None) -> weights_api.RollbackView:
        """Go one version back (to `version`, where the bus does not know it); returns as it begins."""
        return self._call(weights_api.RollbackView, "POST", "/v1/rollback", weights_api.RollbackOrder(version=version))

    def verify(self, *, canary: bool = True) -> weights_api.VerifyView:
        """Have every engine hash what it serves, and generate a few tokens greedily."""
        order = weights_api.VerifyOrder(canary=canary)
        nbytes = max((version.nbytes for version in self.versions().versions), default=0)
        # The bus itself waits four times as long as an engine that is slow has taken so far.
        within_s = within(SNAPSHOT_LEAST_S, int(SLACK * nbytes))
        return self._call(weights_api.VerifyView, "POST", "/v1/verify", order, timeout_s=within_s)

    def pause(self, mode: weights_api.PauseMode = "keep") -> weights_api.FleetAnswer:
        return self._call(weights_api.FleetAnswer, "POST", "/v1/pause", weights_api.PauseOrder(mode=mode))

    def resume(self) -> weights_api.FleetAnswer:
        return self._call(weights_api.FleetAnswer, "POST", "/v1/resume")

    def watch(self, last_id: str | None = None, *, patience_s: float = 30.0) -> Iterator[weights_api.WeightEvent]:
        """Events as they come, from the oldest that the bus remembers or after `last_id`; without an end.

        A broken connection is made again where it broke off. Raises DeadlineError when the bus is away for `patience_s`.
        """
        heard = time.monotonic()
        while True:
            try:
                for event in self._stream(last_id):
                    if event is not None:
                        last_id = event.id
                        yield event
                    heard = time.monotonic()
            except httpx.TransportError as error:
                if time.monotonic() - heard > patience_s or self._trust.refusal(self._url, error):
                    raise self._away(f"no events for {patience_s:g} s", error) from error
            if time.monotonic() - heard > patience_s:
                raise DeadlineError(f"{self._url}: no events for {patience_s:g} s")
            time.sleep(_RECONNECT_S)

    def _stream(self, last_id: str | None) -> Iterator[weights_api.WeightEvent | None]:
        """One connection's events; None for each sign of life."""
        headers = {} if last_id is None else {"last-event-id": last_id}
        with self._http.stream("GET", "/v1/events", headers=headers, timeout=_SILENCE_S) as response:
            if not response.is_success:
                response.read()
                self._raise_for(response)
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield _read(weights_api.WeightEvent, self._url, line.removeprefix("data: ").encode())
                elif line.startswith(":"):
                    yield None

    def _call(
        self, answer: type[ViewT], method: str, path: str, body: BaseModel | None = None, *, timeout_s: float = 0.0
    ) -> ViewT:
        content = None if body is None else body.model_dump_json().encode()
        headers = {} if body is None else {"content-type": "application/json"}
        with self._reached(f"{method} {path}"):
            response = self._http.request(
                method, path, content=content, headers=headers, timeout=timeout_s or self._timeout_s
            )
        self._raise_for(response)
        return _read(answer, self._url, response.content)

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise self._away(what, error) from error

    def _away(self, what: str, error: httpx.TransportError) -> RollmeshError:
        return self._trust.refusal(self._url, error) or DeadlineError(
            f"{self._url}: {what}: the weight bus cannot be reached ({error!r})", "does it run there? see --bus-url"
        )

    def _raise_for(self, response: httpx.Response) -> None:
        if not response.is_success:
            call = str(response.request.url)
            raise typed_error(call, response.status_code, response.headers.get("retry-after"), response.content)


def _read(answer: type[ViewT], url: str, content: bytes) -> ViewT:
    try:
        return answer.model_validate_json(content)
    except ValidationError as error:
        raise WireError(f"{url} answered something else than {answer.__name__} ({error})") from error
