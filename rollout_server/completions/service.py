"""Chat, text and token completions of one model folder, whose chat template is loaded (a second) at the first call."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_server.chat.renderer import ChatRenderer, ToolRules
from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions.chat import ChatCalls
from rollout_server.completions.chunks import TokenTexts
from rollout_server.completions.scoring import ScoringCalls
from rollout_server.completions.text import CompletionCalls
from rollout_server.completions.tokens import GenerateCalls
from rollout_server.engines.base import Engine
from services.config.settings import RolloutSettings
from services.host.process import heavy_imports


class CompletionServices:
    """What answers chat, text and token calls of one engine."""

    def __init__(self, engine: Engine, renderer: Renderer, model: Path, settings: RolloutSettings) -> None:
        self.tokens = GenerateCalls(engine, model.name)
        self._engine = engine
        self._renderer = renderer
        self._model = model
        self._settings = settings
        self._loading: asyncio.Task[ChatRenderer] | None = None
        # One thread for all that is large: each has a heap of its own, and would keep as much as it ever needed.
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large chats")

    async def chat(self) -> ChatCalls:
        """Raises UsageError for a folder or a renderer name that cannot be used."""
        chat = await self._load()
        return ChatCalls(self._engine, chat, TokenTexts(chat.table), self._model.name, self._large)

    async def text(self) -> CompletionCalls:
        """Raises UsageError for a folder or a renderer name that cannot be used."""
        chat = await self._load()
        return CompletionCalls(self._engine, self._renderer, chat, TokenTexts(chat.table), self._model.name)

    async def scoring(self) -> ScoringCalls:
        """Raises UsageError for a folder or a renderer name that cannot be used."""
        chat = await self._load()
        return ScoringCalls(self._engine, self._renderer, chat, TokenTexts(chat.table), self._model.name)

    async def _load(self) -> ChatRenderer:
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.create_task(asyncio.to_thread(self._read))
        # A caller that goes away must not take the renderer from those who wait for it too.
        return await asyncio.shield(self._loading)

    def _read(self) -> ChatRenderer:
        # What it imports would be walked by every later full collection: a tenth of a second, on the event loop.
        with heavy_imports():
            settings = self._settings
            parser = None if settings.tool_parser == "auto" else settings.tool_parser
            tools = ToolRules(parser, refuse=settings.unrendered_tools == "refuse")
            return ChatRenderer.from_folder(
                self._model, settings.renderer, tools=tools, longest=lambda: self._engine.max_model_len
            )
