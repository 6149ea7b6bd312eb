"""The formula of a step's memory: what grows, what adds up, what it says of known models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.training.layout import Layout
from services.policies.training.memory import MemoryOptions, estimate, keeps_layers
from services.policies.training.memory_fit import fit, smallest
from services.policies.training.model_shape import ModelShape, shape_of

QWEN3_8B = ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936, head_norms=True)
QWEN3_32B = ModelShape(5120, 64, 64, 8, 128, 25_600, 151_936, head_norms=True)
QWEN3_30B_A3B = ModelShape(2048, 48, 32, 4, 128, 6144, 151_936, False, 128, 8, 768, head_norms=True)
GIB = 1 << 30

shapes = st.builds(
    ModelShape,
    hidden=st.sampled_from([64, 512, 4096]),
    layers=st.integers(1, 80),
    heads=st.sampled_from([4, 8, 32]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 128]),
    feed_forward=st.integers(64, 30_000),
    vocabulary=st.integers(64, 200_000),
    tied=st.booleans(),
    head_norms=st.booleans(),
)
options = st.builds(
    MemoryOptions,
    tokens=st.integers(16, 65_536),
    half=st.booleans(),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    gpu=st.booleans(),
    lora_rank=st.sampled_from([0, 8]),
    state_bits=st.sampled_from([32, 8]),
    reference=st.booleans(),
    critic=st.booleans(),
)


@given(shapes, options)
def test_more_of_anything_is_never_less_memory(shape: ModelShape, asked: MemoryOptions) -> None:
    before = estimate(shape, asked).total
    for larger in (
        replace(shape, layers=shape.layers + 1),
        replace(shape, feed_forward=shape.feed_forward + 64),
        replace(shape, vocabulary=2 * shape.vocabulary),
        replace(shape, kv_heads=shape.heads),
    ):
        assert estimate(larger, asked).total >= before
    # The head's chunk has whole rows: up to one row less of a longer pass, nothing more.
    assert estimate(shape, replace(asked, tokens=2 * asked.tokens)).total >= before
    assert estimate(shape, replace(asked, critic=True)).total >= before


@given(shapes, options, st.sampled_from([2, 4, 8]))
def test_what_saves_memory_never_costs_any(shape: ModelShape, asked: MemoryOptions, ranks: int) -> None:
    plain = replace(asked, checkpointing="none")
    assert estimate(shape, replace(asked, state_bits=8)).total <= estimate(shape, replace(asked, state_bits=32)).total
    state = {"weights", "gradients", "optimizer", "reference"}
    sharded = estimate(shape, replace(plain, layout=Layout(data=ranks)))
    alone = estimate(shape, plain)
    for part in state & sharded.parts.keys():
        assert sharded.parts[part] == pytest.approx(alone.parts[part] / ranks, rel=1e-3, abs=64)


@given(shapes, options)
def test_a_sum_is_of_its_parts_and_weights_are_counted_once(shape: ModelShape, asked: MemoryOptions) -> None:
    found = estimate(shape, asked)
    assert found.total == sum(found.parts.values())
    adapters = shape.layers * shape.adapters(asked.lora_rank)
    assert found.parts["weights"] == pytest.approx(4 * (shape.parameters + adapters), abs=4)
    trained = adapters if asked.lora_rank else shape.parameters
    assert found.parts["gradients"] == pytest.approx(4 * trained, abs=4)


@given(shapes, options, st.integers(1, 40))
def test_layers_add_up(shape: ModelShape, asked: MemoryOptions, more: int) -> None:
    """As many bytes for each further two layers, wherever the fullest moment stays the same: selectively, every second one
    keeps less."""
    one, two, three = (estimate(replace(shape, layers=shape.layers + 2 * step * more), asked) for step in range(3))
    if one.where == two.where == three.where:
        assert three.total - two.total == pytest.approx(two.total - one.total, rel=1e-3, abs=64)


@given(shapes, options, st.sampled_from([2, 4, 8]), st.sampled_from([None, 8 * GIB, 80 * GIB]))
def test_layers_stay_collected_where_there_is_the_memory(
    shape: ModelShape, asked: MemoryOptions, ranks: int, device_bytes: int | None
) -> None:
    several = replace(asked, layout=Layout(data=ranks), device_bytes=device_bytes)
    kept, without = (
        estimate(shape, replace(several, reshard_after_forward=reshard)).total for reshard in (False, True)
    )
    room = kept <= 1.1 * without and (device_bytes is None or kept <= 0.8 * device_bytes)
    assert keeps_layers(shape, several) == room
    assert estimate(shape, several).total == (kept if room else without)
    assert kept >= without and not keeps_layers(shape, replace(several, layout=Layout()))


def test_parameters_of_known_models() -> None:
    assert QWEN3_8B.parameters == pytest.approx(8.19e9, rel=0.005)
    assert QWEN3_32B.parameters == pytest.approx(32.8e9, rel=0.005)
    assert QWEN3_30B_A3B.parameters == pytest.approx(30.5e9, rel=0.005)


def test_a_configuration_is_read() -> None:
    said = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    assert shape_of(said) == ModelShape(1024, 28, 16, 8, 128, 3072, 151_936, tied=True, head_norms=True)
    assert shape_of({"model_type": "gemma3", "text_config": said}).hidden == 1024
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shape_of({name: value for name, value in said.items() if name != "num_hidden_layers"})


def test_the_fit_takes_the_cheapest_way_that_fits() -> None:
    asked = MemoryOptions(tokens=4096, half=True, gpu=True, layout=Layout(data=8))
    roomy, tight = fit(QWEN3_8B, asked, 140 * GIB), fit(QWEN3_8B, asked, 44 * GIB)
    assert roomy is not None and tight is not None
    assert roomy.options.checkpointing == "none" and roomy.options.tokens >= 4096
    assert tight.options.checkpointing != "none" and tight.estimate.total <= 44 * GIB
    assert fit(QWEN3_8B, asked, 2 * GIB) is None
    assert smallest(QWEN3_8B, asked).estimate.total > 2 * GIB


@pytest.mark.parametrize("gib", [30, 40, 60, 140])
def test_a_fit_of_several_ranks_is_one_that_the_trainer_takes(gib: int) -> None:
    """It refuses to offload the optimizer there."""
    found = fit(QWEN3_8B, MemoryOptions(tokens=1024, half=True, gpu=True, layout=Layout(data=4)), gib * GIB)
    assert found is None or (found.estimate.total <= gib * GIB and not found.options.optimizer_offload)
    assert not smallest(
        QWEN3_8B, MemoryOptions(tokens=1024, half=True, layout=Layout(data=4))
    ).options.optimizer_offload


def test_the_sum_is_told_in_words() -> None:
    words = estimate(QWEN3_32B, MemoryOptions(tokens=4096)).words
    assert "optimizer 244." in words and "weights 122." in words


def test_nothing_but_plain_numbers_is_needed() -> None:
    assert json.dumps(dict(estimate(QWEN3_8B, MemoryOptions(tokens=1)).parts))
