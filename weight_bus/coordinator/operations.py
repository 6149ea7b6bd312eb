"""Operator actions of the bus: verify digests, canary generation, pause and resume, publish a snapshot folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.wire import weights_api
from services.wire.errors import RollmeshError, UsageError
from weight_bus.coordinator.coordinator import Coordinator
from weight_bus.coordinator.engine_client import EngineClient
from weight_bus.manifest.manifest import Manifest, encode_manifest, sign

CANARY_PROMPTS: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 3, 9, 3, 9, 3], [5]]
"""Small ids, which every vocabulary has."""


class FleetCalls:
    """Calls to all live engines at once. An engine's failure is part of the answer: nothing here raises for one."""

    def __init__(self, coordinator: Coordinator, client: EngineClient) -> None:
        self._coordinator = coordinator
        self._client = client

    async def verify(self, order: weights_api.VerifyOrder) -> weights_api.VerifyView:
        """Ask every live engine for the digest of what it serves, and for the canary's tokens if so ordered."""
        goal, urls = self._coordinator.goal, self._coordinator.urls
        digests = list(await asyncio.gather(*(self._digest(name, url) for name, url in urls.items())))
        canary = await self._canary(order, urls) if order.canary else None
        found = {(digest.version, digest.root_digest) for digest in digests}
        if goal is None:
            return weights_api.VerifyView(version=None, root_digest=None, engines=digests, match=False, canary=canary)
        version, root_digest = goal
        # For a version from before its start the bus only knows whether all engines serve the same bytes.
        match = found == {goal} if root_digest else len(found) == 1 and digests[0].version == version
        return weights_api.VerifyView(
            version=version, root_digest=root_digest or None, engines=digests, match=match, canary=canary
        )

    async def pause(self, mode: weights_api.PauseMode) -> weights_api.FleetAnswer:
        return await self._everywhere(lambda url: self._client.pause(url, mode))

    async def resume(self) -> weights_api.FleetAnswer:
        return await self._everywhere(self._client.resume)

    async def _everywhere(self, call: Callable[[str], Awaitable[None]]) -> weights_api.FleetAnswer:
        async def one(engine_id: str, url: str) -> weights_api.EngineAnswer:
            try:
                await call(url)
            except RollmeshError as error:
                return weights_api.EngineAnswer(engine_id=engine_id, done=False, why=str(error))
            return weights_api.EngineAnswer(engine_id=engine_id, done=True)

        urls = self._coordinator.urls
        return weights_api.FleetAnswer(
            engines=list(await asyncio.gather(*(one(name, url) for name, url in urls.items())))
        )

    async def _digest(self, engine_id: str, url: str) -> weights_api.EngineDigest:
        try:
            found = await self._client.digest(url, self._coordinator.digested_within)
        except RollmeshError as error:
            return weights_api.EngineDigest(engine_id=engine_id, version=-1, root_digest="", why=str(error))
        return weights_api.EngineDigest(engine_id=engine_id, version=found.version, root_digest=found.root_digest)

    async def _canary(self, order: weights_api.VerifyOrder, urls: dict[str, str]) -> weights_api.CanaryView:
        prompts = order.prompts or CANARY_PROMPTS
        sampled = await asyncio.gather(
            *(self._generate(name, url, prompts, order.max_tokens) for name, url in urls.items())
        )
        agree = bool(sampled) and all(each.why is None and each.tokens == sampled[0].tokens for each in sampled)
        return weights_api.CanaryView(prompts=prompts, engines=list(sampled), agree=agree)

    async def _generate(
        self, engine_id: str, url: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> weights_api.CanaryTokens:
        try:
            tokens = [await self._client.generate(url, prompt, max_tokens) for prompt in prompts]
        except RollmeshError as error:
            return weights_api.CanaryTokens(engine_id=engine_id, tokens=[], why=str(error))
        return weights_api.CanaryTokens(engine_id=engine_id, tokens=tokens)


class Snapshots:
    """Publishes folders of safetensors: the bus makes the manifest, so no trainer is needed. `weights_key` signs it."""

    def __init__(self, coordinator: Coordinator, run_id: str, weights_key: str | None) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._weights_key = weights_key
        self._turn = asyncio.Lock()

    async def push(self, order: weights_api.PushSnapshot) -> tuple[int, bool]:
        """Announce a folder; its version, and whether that is new. Raises UsageError for a folder that holds no model.

        Where no engine takes it, the operator is told that it failed, and it stays failed.

        The bytes are hashed once, on a thread; the engines read them from the folder, which must stay as it is until
        the update has settled.
        """
        folder = Path(order.folder)
        if not folder.is_absolute():
            raise UsageError(f"{order.folder!r} is not an absolute path", "engines read the folder by the same name")
        async with self._turn:
            version = self._coordinator.next_version if order.version is None else order.version
            manifest = sign(await asyncio.to_thread(_manifest, folder, self._run_id, version), self._weights_key)
            payload = encode_manifest(manifest)
            new = self._coordinator.announce(manifest, payload, hold=order.hold, final=True)
        if new:
            await self._coordinator.floor.keep(version, manifest.root_digest)
        return version, new


def _manifest(folder: Path, run_id: str, version: int) -> Manifest:
    # Imported late: only hashing needs blake3.
    from weight_bus.manifest.snapshot import manifest_of_folder

    return manifest_of_folder(folder, run_id, version)
