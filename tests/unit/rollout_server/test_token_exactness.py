"""Token exactness: whatever an agent does, every token that it was answered is trained once, as it was really sampled."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import pytest

from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import Renderer
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import Segment, check_trajectory
from tests.support.any_tokens_engine import checksum, logprob_of
from tests.support.chat_policy import build_chat_tokenizer
from tests.support.random_episodes import Episode
from tests.support.trajectories import a_rollout

EPISODES = 10_000
PARTS = 20
FIRST = 5
"""Parts of a plain run: `./dev test --all` plays all."""

Fact = tuple[int, int, float, int]
"""A sampled token: checksum of all tokens before it, the token, its logprob, its policy version."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    build_chat_tokenizer().save_pretrained(folder)
    return folder


def trained(segment: Segment) -> list[Fact]:
    """What a segment trains."""
    tokens = unpack_tokens(segment.token_ids)
    version = np.full(len(tokens), -1)
    for span in segment.version_spans:
        version[span.start : span.start + span.length] = span.version
    mask, logprobs = unpack_mask(segment.loss_mask), unpack_logprobs(segment.logprobs)
    facts, before = [], 0
    for position, token in enumerate(tokens.tolist()):
        if mask[position]:
            facts.append((before, token, float(logprobs[position]), int(version[position])))
        else:
            assert (logprobs[position], version[position]) == (0.0, -1)
        before = crc32(token.to_bytes(4, "little"), before)
    return facts


def answered(episode: Episode) -> list[Fact]:
    """What the agent was answered."""
    facts = []
    for (request_id, index), count in episode.heard.items():
        sampled = episode.engine.sampled[request_id, index]
        before = checksum(sampled.prompt)
        for token, version in list(zip(sampled.tokens, sampled.versions, strict=True))[:count]:
            facts.append((before, token, logprob_of(before, token, version), version))
            before = crc32(token.to_bytes(4, "little"), before)
    return facts


@pytest.mark.parametrize(
    "part", [part if part < FIRST else pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS)]
)
async def test_every_answered_token_is_trained_exactly_once_in_the_context_it_was_sampled_in(
    part: int, folder: Path
) -> None:
    chat, renderer = ChatRenderer.from_folder(folder), Renderer.from_folder(folder)
    seen: Counter[str | None] = Counter()
    tokens = moves = 0
    for number in range(part * EPISODES // PARTS, (part + 1) * EPISODES // PARTS):
        chance = random.Random(number)
        episode = Episode(chance, chat, renderer)
        await episode.live(chance.randint(1, 7))
        live = episode.session.capture.layout()
        await episode.move()
        capture = episode.session.capture
        assert capture.layout().segments == live.segments, f"episode {number}: its journal tells another story"
        moves += episode.moves
        segments = capture.segments()
        check_trajectory(msgspec.structs.replace(a_rollout(segments, 0.0), samplings=capture.samplings))
        facts = [fact for segment in segments for fact in trained(segment)]
        assert Counter(facts) == Counter(answered(episode)), f"episode {number}"
        assert capture.sampled == len(facts)
        seen.update(segment.break_reason for segment in segments)
        tokens += len(facts)
    # The episodes do what they are for.
    assert tokens > 1000
    assert moves > EPISODES // PARTS
    assert {None, "branch", "compaction", "tools_changed", "truncated"} <= set(seen)
