"""Groups as GRPO has them: siblings that ask the same, in random order. How many tokens does the fleet prefill?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollout_server.bench.fleet import Fleet
from rollout_server.bench.http_arm import Opened
from rollout_server.bench.prefilled import Prefilled
from rollout_server.bench.prompt_trie import distinct_prefixes
from rollout_server.bench.rate import in_parallel
from rollout_server.bench.workload import Exchange


async def prefill_groups(
    fleet: Fleet, questions: Sequence[Exchange], siblings: int, concurrency: int, rng: random.Random, *, together: bool
) -> Prefilled:
    """Have `siblings` agents ask each question. Nobody may have asked these questions before.

    Each sibling opens its session and asks, `concurrency` at once. `together`: sessions name their group; without, nobody
    can tell which of them will ask the same.
    """
    group_of = [f"group-{rng.getrandbits(64):016x}" for _ in questions]
    asking = [number for number in range(len(questions)) for _ in range(siblings)]
    rng.shuffle(asking)
    opened: list[Opened] = []

    async def ask(number: int) -> int:
        wishes: dict[str, str | int] = {"group_id": group_of[number], "group_size": siblings} if together else {}
        session = await fleet.gateway.arm.open_one(**wishes)
        opened.append(session)
        return await fleet.gateway.arm.answer(questions[number], session, "plain")

    before = await _prefilled(fleet)
    await in_parallel(asking, concurrency, ask)
    computed = await _prefilled(fleet) - before
    await fleet.gateway.arm.give_up(opened)
    prompts = [question.token_ids for question in questions]
    return Prefilled(computed, distinct_prefixes(prompts), siblings * sum(map(len, prompts)))


async def _prefilled(fleet: Fleet) -> int:
    return sum([(await server.arm.engine()).prefill_tokens for server in fleet.servers.values()])
