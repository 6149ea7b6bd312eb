"""The reward service's pure parts: when batches are sent, how components make a reward, what settings are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import dump_settings, load_settings
from services.config.rewards import ModelScoring
from services.policies.rewards import (
    BatchQueue,
    BatchRules,
    Composed,
    Failure,
    NotComposed,
    RewardFailure,
    Term,
    compose,
    describe_formula,
)
from services.rewards.model_component import decode_batch, encode_batch, prompt_text
from services.rewards.sandbox.protocol import Sample
from services.wire.errors import UsageError, WireError
from tests.support.examples import examples

ACTIONS = st.lists(
    st.one_of(
        st.sampled_from(["offer", "offer", "take", "take", "done", "wait"]),
        st.tuples(st.just("pass"), st.integers(1, 3)),
    ),
    min_size=30,
    max_size=120,
)


class Item:
    """Told apart by identity, as samples are."""


@given(
    actions=ACTIONS,
    largest=st.integers(1, 5),
    linger=st.integers(0, 8),
    at_once=st.integers(1, 3),
    capacity=st.integers(1, 8),
    gone=st.sets(st.integers(0, 60)),
)
@examples(150)
def test_samples_are_sent_once_in_order_in_full_batches_or_after_their_wait(
    actions: list[Any], largest: int, linger: int, at_once: int, capacity: int, gone: set[int]
) -> None:
    queue: BatchQueue[Item] = BatchQueue(BatchRules(largest, float(linger), at_once, capacity))
    now, out = 0.0, 0
    came: list[tuple[Item, float]] = []
    waiting: list[Item] = []
    sent: list[Item] = []
    for number, action in enumerate(actions):
        if action == "offer":
            item = Item()
            assert queue.offer(item, now) == (len(waiting) < capacity)
            if len(waiting) < capacity:
                came.append((item, now))
                waiting.append(item)
                if number in gone:
                    queue.withdraw(item)
                    waiting.remove(item)
        elif action == "take":
            batch = queue.take(now)
            since = dict(came)
            due = bool(waiting) and out < at_once
            due = due and (len(waiting) >= largest or now - since[waiting[0]] >= linger)
            assert bool(batch) == due
            assert batch == waiting[: len(batch)]
            assert len(batch) == (min(largest, len(waiting)) if due else 0)
            out += due
            sent += batch
            waiting = waiting[len(batch) :]
        elif action == "done" and out:
            queue.done()
            out -= 1
        elif action == "wait" and (due_in := queue.due_in(now)) is not None:
            assert due_in <= linger
            now += due_in
            assert queue.due_in(now) == 0.0, "what it says is when it is"
        elif isinstance(action, tuple):
            now += action[1]
        assert queue.out == out
        assert len(queue) == len(waiting)
        assert queue.due_in(now) is not None or not waiting or out == at_once, "nothing waits for nothing"
    assert len(set(map(id, sent))) == len(sent)
    order = [item for item, _ in came]
    assert [order.index(item) for item in sent] == sorted(order.index(item) for item in sent)


VALUES = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(-100.0, 100.0)


@given(parts=st.lists(st.tuples(WEIGHTS, VALUES), min_size=1, max_size=6))
def test_a_sum_is_the_weighted_sum_and_keeps_its_components(parts: list[tuple[float, float]]) -> None:
    terms = [Term(f"c{index}", weight) for index, (weight, _) in enumerate(parts)]
    values = {f"c{index}": value for index, (_, value) in enumerate(parts)}
    composed = compose("sum", terms, values)
    assert isinstance(composed, Composed)
    assert math.isclose(
        composed.reward, math.fsum(weight * value for weight, value in parts), abs_tol=1e-4, rel_tol=1e-9
    )
    assert composed.components == values
    assert composed.substituted == {}


@given(parts=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.0, 100.0)), min_size=1, max_size=4))
def test_a_product_has_the_weights_as_exponents(parts: list[tuple[float, float]]) -> None:
    terms = [Term(f"c{index}", weight) for index, (weight, _) in enumerate(parts)]
    composed = compose("product", terms, {f"c{index}": value for index, (_, value) in enumerate(parts)})
    assert isinstance(composed, Composed)
    expected = 1.0
    for weight, value in parts:
        expected *= value**weight
    assert math.isclose(composed.reward, expected, rel_tol=1e-12)


@given(
    failing=st.sets(st.integers(0, 4)),
    substituting=st.sets(st.integers(0, 4)),
    cause=st.sampled_from(list(RewardFailure)),
    combine=st.sampled_from(["sum", "product"]),
)
def test_a_component_without_a_value_fails_the_reward_or_is_told_apart_and_is_never_zero(
    failing: set[int], substituting: set[int], cause: RewardFailure, combine: Any
) -> None:
    terms = [Term(f"c{index}", 1.0, 7.0 if index in substituting else None) for index in range(5)]
    values: dict[str, float | Failure] = {
        f"c{index}": Failure(cause, "why") if index in failing else 2.0 for index in range(5)
    }
    result = compose(combine, terms, values)
    if failing - substituting:
        assert result == NotComposed(f"c{min(failing - substituting)}", Failure(cause, "why"))
        return
    assert isinstance(result, Composed)
    assert result.substituted == {f"c{index}": cause for index in failing}
    expected = [7.0 if index in failing else 2.0 for index in range(5)]
    assert list(result.components.values()) == expected
    assert result.reward == (sum(expected) if combine == "sum" else math.prod(expected))


@pytest.mark.parametrize(
    ("combine", "weight", "value", "words"),
    [("product", 0.5, -2.0, "-2^0.5"), ("sum", 1e300, 1e300, "too large"), ("product", 400.0, 10.0, "is no number")],
)
def test_a_value_that_the_formula_cannot_take_is_a_failure_of_its_component(
    combine: Any, weight: float, value: float, words: str
) -> None:
    failed = compose(combine, [Term("a", weight)], {"a": value})
    assert isinstance(failed, NotComposed)
    assert failed.failure.cause == RewardFailure.VALUE
    assert words in failed.failure.what
    assert isinstance(compose(combine, [Term("a", weight, 0.0)], {"a": value}), Composed)


def test_a_reward_that_only_together_is_too_large_names_a_component() -> None:
    failed = compose("sum", [Term("a"), Term("b")], {"a": 1e308, "b": 1.5e308})
    assert isinstance(failed, NotComposed)
    assert (failed.component, failed.failure.cause) == ("b", RewardFailure.VALUE)


def test_formulas_in_words() -> None:
    terms = [Term("exact"), Term("short", 0.2)]
    assert describe_formula("sum", terms) == "reward = 1·exact + 0.2·short"
    assert describe_formula("product", terms) == "reward = exact · short^0.2"


FUNCTION = '[[rewards.components]]\nname = "a"\nfunction = "m:f"\n'
MODEL = '[[rewards.components]]\nname = "b"\nmodel = { url = "http://127.0.0.1:1" }\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FUNCTION + FUNCTION, "two components are named 'a'"),
        (FUNCTION + 'model = { url = "http://x" }\n', "exactly one of verifier, function and model"),
        ('[[rewards.components]]\nname = "a"\n', "exactly one of verifier, function and model"),
        (MODEL + "workers = 3\n", "workers would have no effect"),
        ('[rewards]\ncombine = "product"\n' + FUNCTION + "weight = -1.0\n", "above 0"),
        ("[rewards]\nenabled = true\n", "without a component"),
        (FUNCTION.replace("m:f", "mf"), "function"),
        (FUNCTION + "weight = nan\n", "finite"),
        (FUNCTION + "wieght = 1.0\n", "wieght"),
        (MODEL.replace(" }", ', text = "{prompt}" }'), "leaves {answer} out"),
        (MODEL.replace(" }", ', text = "{answer}{x}" }'), "something else"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        load_settings(file, [])


def test_settings_survive_the_configuration_file_that_a_mesh_is_started_from(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FUNCTION + "substitute = 0.5\n" + MODEL)
    loaded = load_settings(file, ["rewards.enabled=true"])
    file.write_text(dump_settings(loaded))
    assert load_settings(file, []) == loaded


def sample(answer: str, **changes: Any) -> Sample:
    given = {"task": "", "prompt": "p", "messages": None, "answer": answer, "complete": True, "metadata": {}}
    return Sample(**{**given, **changes})


def test_batches_are_spelt_as_vllm_reads_them() -> None:
    reward_batch = ModelScoring(url="http://x", model="m", activation=False)
    body = msgspec.json.decode(encode_batch(reward_batch, [sample("a"), sample("b", prompt="q")]))
    assert body == {"text_1": ["p", "q"], "text_2": ["a", "b"], "use_activation": False, "model": "m"}
    classified = ModelScoring(url="http://x", api="classify", text="{prompt}>{answer}", class_index=1)
    body = msgspec.json.decode(encode_batch(classified, [sample("a")]))
    assert body == {"input": ["p>a"], "use_activation": True}
    answer = b'{"data":[{"index":1,"probs":[0.1,0.9],"label":null},{"index":0,"probs":[0.7,0.3]}],"usage":{}}'
    assert decode_batch(classified, answer, 2) == [0.3, 0.9]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompt_text(sample("a", prompt=None, messages=messages)) == "s\nu"


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"no json",
        b'{"data":[{"index":0,"score":1.0}]}',
        b'{"data":[{"index":0,"score":1.0},{"index":0,"score":2.0}]}',
        b'{"data":[{"index":0,"score":1.0},{"index":1,"score":null}]}',
        b'{"data":[{"index":0,"score":1.0},{"index":1,"score":1e999}]}',
    ],
)
def test_an_answer_that_does_not_fit_its_batch_gives_nobody_a_value(content: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(ModelScoring(url="http://x"), content, 2)
