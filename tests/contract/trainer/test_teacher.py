"""The teacher's logprobs: those of each sampled token, asked for once and in time; never zeros where they are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from services.config.training.teacher import TeacherSettings  # noqa: E402
from services.policies.batching import Member  # noqa: E402
from services.wire.errors import UsageError  # noqa: E402
from services.wire.trajectory import Trajectory  # noqa: E402
from tests.support.served_app import served  # noqa: E402
from tests.support.teacher_stand_in import TeacherStandIn, logprobs_of, told_of  # noqa: E402
from tests.support.trajectories import a_rollout, a_segment, grouped, random_trajectories  # noqa: E402
from trainer.algorithms.advantages.rewards import Batch  # noqa: E402
from trainer.data.teacher import Teacher  # noqa: E402
from trainer.data.teacher_client import TeacherClient, TeacherError, TeacherServer  # noqa: E402
from trainer.io_loop import Background  # noqa: E402
from trainer.sft.tiny_model import build_model, build_tokenizer  # noqa: E402

TOKENIZER: Tokenizer = build_tokenizer().backend_tokenizer
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model() -> object:
    return build_model(seed=3, hidden_size=32, layers=1).eval()


@pytest.fixture
async def stand_in(model: object) -> AsyncIterator[tuple[TeacherStandIn, str]]:
    teacher = TeacherStandIn(model, build_tokenizer())  # type: ignore[arg-type]
    async with served(teacher.app()) as url:
        yield teacher, url


@pytest.fixture
def background() -> Iterator[Background]:
    with closing(Background()) as background:
        yield background


async def client(stack: AsyncExitStack, url: str, model: str | None = None, key: str | None = None) -> TeacherClient:
    made = TeacherClient(TeacherServer(url, model, key))
    stack.push_async_callback(made.close)
    return made


async def test_it_tells_the_logprob_of_each_token_behind_those_before_it(
    stand_in: tuple[TeacherStandIn, str], model: object
) -> None:
    teacher, url = stand_in
    async with AsyncExitStack() as stack:
        asking = await client(stack, url)
        await asking.meet(TOKENIZER, 10.0)
        told = await asking.logprobs(PROMPT, 10.0)
    assert told.tolist() == pytest.approx(logprobs_of(model, PROMPT), abs=1e-12)  # type: ignore[arg-type]
    assert asking.max_tokens == 255, "one token is sampled behind a prompt"
    assert [0, 63] in teacher.prompts, "the highest id of the vocabulary was tried"


async def test_it_is_asked_again_while_it_does_not_answer_and_then_never_guessed(
    stand_in: tuple[TeacherStandIn, str],
) -> None:
    teacher, url = stand_in
    async with AsyncExitStack() as stack:
        asking = await client(stack, url, "big")
        await asking.meet(TOKENIZER, 10.0)
        teacher.statuses = [503, 429, 500]
        assert len(await asking.logprobs(PROMPT, 20.0)) == 4
        teacher.down = True
        with pytest.raises(
            TeacherError, match=r"the teacher at http://.* did not answer within 0\.5 s \(.*503"
        ) as dead:
            await asking.logprobs(PROMPT, 0.5)
        assert dead.value.exit_code == 3
        teacher.down = False
        teacher.hold.clear()
        with pytest.raises(TeacherError, match=r"did not answer within 0\.2 s"):
            await asking.logprobs(PROMPT, 0.2)
    gone = TeacherClient(TeacherServer("http://127.0.0.1:9"))
    with pytest.raises(TeacherError, match=r"127\.0\.0\.1:9 did not answer within 0\.3 s .*cannot be reached"):
        await gone.meet(TOKENIZER, 0.3)
    await gone.close()


async def test_another_vocabulary_is_refused_before_anything_is_trained(
    stand_in: tuple[TeacherStandIn, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, url = stand_in
    async with AsyncExitStack() as stack:
        asking = await client(stack, url)
        monkeypatch.setattr(teacher.model.config, "vocab_size", 60)
        with pytest.raises(UsageError, match=r"does not take the token ids 0 and 63 .*same|policy's tokenizer"):
            await asking.meet(TOKENIZER, 10.0)
        monkeypatch.undo()
        shifted = build_tokenizer()
        monkeypatch.setattr(teacher, "tokenizer", shifted)
        encode = shifted.encode
        monkeypatch.setattr(shifted, "encode", lambda text, **more: [63 - each for each in encode(text, **more)])
        with pytest.raises(UsageError, match=r"reads '.*' as \[.*\]…, the policy's tokenizer as"):
            await asking.meet(TOKENIZER, 10.0)
        # Whoever does not say how it reads text is believed.
        teacher.reads_text = False
        await asking.meet(TOKENIZER, 10.0)
        teacher.reads_text, teacher.tells_ids = True, False
        await asking.meet(TOKENIZER, 10.0)


async def test_what_a_server_cannot_do_is_named(stand_in: tuple[TeacherStandIn, str]) -> None:
    teacher, url = stand_in
    async with AsyncExitStack() as stack:
        with pytest.raises(UsageError, match=r"serves no model 'small' \(it lists big, adapter\)"):
            await (await client(stack, url, "small")).meet(TOKENIZER, 10.0)
        teacher.key = "a-key"
        with pytest.raises(UsageError, match=r"answered 401 .*trainer\.teacher\.key_file"):
            await (await client(stack, url)).meet(TOKENIZER, 10.0)
        keyed = await client(stack, f"{url}/v1/", key="a-key")
        await keyed.meet(TOKENIZER, 10.0)
        teacher.tells = False
        with pytest.raises(UsageError, match=r"tells none prompt_logprobs"):
            await keyed.meet(TOKENIZER, 10.0)
        with pytest.raises(UsageError, match=r"no teacher is at http://.*/elsewhere .*404"):
            await (await client(stack, f"{url}/elsewhere")).meet(TOKENIZER, 10.0)


def batch() -> list[Trajectory]:
    """Of one and of two segments, with tokens of the environment between and behind those that were sampled."""
    plain = random_trajectories(4, groups=2, size=2)
    turns = a_segment([5, 6], [7, 8, 9], [-1.0, -2.0, -3.0], [1, 1, 3])
    more = a_segment([5, 6, 7], [10], [-4.0], [2])
    rollouts = [a_rollout([turns, more], 1.0, group="two", ordinal=7, size=2, member=member) for member in range(2)]
    return [*plain, *rollouts]


def members(trajectories: list[Trajectory]) -> list[Member[Trajectory]]:
    return [member for group in grouped(trajectories) for member in group.members]


async def test_a_batch_is_asked_for_once_as_it_arrives_some_calls_at_a_time(
    stand_in: tuple[TeacherStandIn, str], background: Background, model: object
) -> None:
    stand, url = stand_in
    asking = TeacherClient(TeacherServer(url))
    teacher = Teacher(asking, TeacherSettings(url=url, at_once=3, timeout_s=20.0), background)
    trajectories = batch()
    groups = grouped(trajectories)
    await asyncio.wrap_future(background.begin(asking.meet(TOKENIZER, 10.0)))
    before = len(stand.prompts)
    stand.hold.clear()
    background.soon(lambda: teacher.begin(members(trajectories)[:4]))
    asked = teacher.ask(groups)
    await asyncio.sleep(0.1)
    assert (asked.done(), teacher.missing(groups)) == (False, 6)
    stand.hold.set()
    await asyncio.wrap_future(asked)
    assert (stand.most_in_flight, len(stand.prompts) - before) == (3, 8), "a call for each segment"
    of_batch = Batch.of(groups)
    told = await asyncio.to_thread(teacher.of, of_batch)
    expected = [value for one in trajectories for value in told_of(model, one)]  # type: ignore[arg-type]
    assert told.tolist() == pytest.approx(expected, abs=1e-12)
    assert len(told) == int(of_batch.lengths.sum())
    assert len(stand.prompts) - before == 8
    # A batch that is repeated is asked for again, once what was told is forgotten.
    teacher.settled(of_batch.entries)
    assert np.array_equal(await asyncio.to_thread(teacher.of, of_batch), told)
    assert len(stand.prompts) - before == 16
    await asyncio.wrap_future(background.begin(teacher.close()))


async def test_what_failed_as_it_arrived_is_asked_for_once_more_when_it_is_trained(
    stand_in: tuple[TeacherStandIn, str], background: Background
) -> None:
    stand, url = stand_in
    asking = TeacherClient(TeacherServer(url, "big"))
    teacher = Teacher(asking, TeacherSettings(url=url, timeout_s=0.3), background)
    trajectories = batch()
    of_batch = Batch.of(grouped(trajectories))
    await asyncio.wrap_future(background.begin(asking.meet(TOKENIZER, 10.0)))
    stand.down = True
    background.soon(lambda: teacher.begin(members(trajectories)))
    await asyncio.sleep(0.6)
    stand.down = False
    assert len(await asyncio.to_thread(teacher.of, of_batch)) == int(of_batch.lengths.sum())
    teacher.settled(of_batch.entries)
    stand.down = True
    with pytest.raises(TeacherError, match=r"did not answer within 0\.3 s"):
        await asyncio.to_thread(teacher.of, of_batch)
    teacher.settled(of_batch.entries)
    stand.down = False
    stand.statuses = [400] * 20
    with pytest.raises(TeacherError, match=r"refuses a segment of \d+ tokens of trajectory .*answered 400"):
        await asyncio.to_thread(teacher.of, of_batch)
    await asyncio.wrap_future(background.begin(teacher.close()))
