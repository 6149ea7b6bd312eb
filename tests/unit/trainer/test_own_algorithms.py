"""Algorithms of the user's own: their settings are checked and told, the columns that they name are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from services.config.base import Section
from services.config.load import dump_settings, load_settings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.wire.errors import UsageError
from services.wire.packed import unpack_tokens
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.algorithms.advantages.batch import RewardBatch, TokenAdvantages
from trainer.algorithms.advantages.registry import AdvantageEntry
from trainer.algorithms.columns import LOSS_COLUMNS
from trainer.algorithms.describe import describe, own_tables
from trainer.algorithms.losses.registry import LossEntry
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss
from trainer.checkpoint.recovery import fingerprint
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import prepare
from trainer.sft.tiny_model import build_model

VERSION = 3
SEEN: dict[str, Tensor] = {}
GIVEN: dict[str, Any] = {}


class Own(Section):
    """`floor` shares its name with nothing; `clip_low` shares it with a built-in setting."""

    floor: float = Field(default=0.25, ge=0.0)
    clip_low: int = 7


def curious(tokens: LossTokens, settings: LossSettings, own: Own) -> TokenLoss:
    SEEN.update({name: tokens.column(name) for name in LOSS_COLUMNS if name != "teacher"})
    SEEN.update(behaviour=tokens.behaviour, logprobs=tokens.logprobs)
    aged = tokens.column("staleness").float()
    return TokenLoss(-tokens.advantages * tokens.logprobs * own.floor, figures={"age": aged, "twice": 2 * aged})


def careless(tokens: LossTokens, settings: LossSettings) -> TokenLoss:
    return TokenLoss(tokens.logprobs * tokens.column("staleness"))


def judging(batch: RewardBatch, settings: AdvantageSettings, own: Own) -> TokenAdvantages:
    GIVEN.update({name: batch.column(name) for name in ("staleness", "group", "behaviour", "reference")}, own=own)
    return TokenAdvantages(batch.spread(batch.outcomes))


def hasty(batch: RewardBatch, settings: AdvantageSettings) -> TokenAdvantages:
    return TokenAdvantages(batch.spread(batch.outcomes), batch.values)


HERE = __name__
_OF_POLICY = ("staleness", "group", "entropy", "reference", "values", "returns")
curious.entry = LossEntry(  # type: ignore[attr-defined]
    f"{HERE}:curious", "{floor:g}·{clip_low}·A·log π", ratio=None, columns=_OF_POLICY, settings=Own
)
careless.entry = LossEntry(f"{HERE}:careless", "d·log π", ratio=None)  # type: ignore[attr-defined]
judging.entry = AdvantageEntry(  # type: ignore[attr-defined]
    f"{HERE}:judging",
    "R, at least {floor}",
    columns=("staleness", "group", "behaviour", "reference"),
    settings=Own,
)
CURIOUS, JUDGING = f"{HERE}:curious", f"{HERE}:judging"


def trainer(**choices: Any) -> TrainerSettings:
    return TrainerSettings.model_validate(choices)


def groups() -> list[Any]:
    """Three groups of two; one trajectory has two segments, of tokens of several versions."""
    rollouts = []
    for group in range(3):
        for member in range(2):
            segments = [a_segment([5, 6], [7 + group, 8, 9 + member], [-1.0, -2.0, -3.0], [1, 1, 3])]
            if member:
                segments.append(a_segment([5, 6, 7], [10 + group], [-4.0], [2]))
            rollouts.append(a_rollout(segments, float(member), group=f"g{group}", ordinal=group, size=2, member=member))
    return grouped(rollouts)


def roles_of(**choices: Any) -> tuple[Roles, RunSettings]:
    settings = RunSettings(k=5, trainer=trainer(**choices))
    return make_roles(lambda: build_model(seed=4, hidden_size=32, layers=1), settings, VERSION), settings


def expected(batch: list[Any], what: str) -> list[float]:
    """By token, in the order of the segments: its logprob, or the entropy there, under the first policy."""
    model, found = build_model(seed=4, hidden_size=32, layers=1), []
    for segment in (each for group in batch for one in group.members for each in one.payload.segments):
        tokens = torch.tensor(unpack_tokens(segment.token_ids).tolist())
        with torch.inference_mode():
            logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        for place in range(len(tokens)):
            if segment.loss_mask[place]:
                row = logprobs[place - 1]
                found.append(float(row[tokens[place]]) if what == "logprob" else -float((row.exp() * row).sum()))
    return found


def test_a_loss_gets_each_column_that_it_names_and_its_figures_are_told() -> None:
    roles, settings = roles_of(loss={"policy": CURIOUS}, advantage={"estimator": "gae", "whiten": False})
    batch = groups()
    prepared = prepare(roles, settings, batch, 1, VERSION)
    (micro,) = prepared.steps[0].packed.micro_batches
    statistics = roles.learner.step(prepared.steps[0].packed)
    # Rows stand in an order of their own; behaviour logprobs and groups say which token is which.
    ages = {-1.0: 2, -2.0: 2, -3.0: 0, -4.0: 1}
    assert SEEN["staleness"].dtype == torch.int64
    assert SEEN["staleness"].tolist() == [ages[value] for value in SEEN["behaviour"].tolist()]
    assert sorted(SEEN["group"].tolist()) == [group for group in range(3) for _ in range(7)]
    first = micro.row.input_ids[0, micro.places][SEEN["behaviour"] == -1.0] - 7
    assert SEEN["group"][SEEN["behaviour"] == -1.0].tolist() == first.tolist()
    assert sorted(SEEN["reference"].tolist()) == pytest.approx(sorted(expected(batch, "logprob")), abs=1e-5)
    assert sorted(SEEN["entropy"].tolist()) == pytest.approx(sorted(expected(batch, "entropy")), abs=1e-5)
    assert SEEN["entropy"].requires_grad and not SEEN["reference"].requires_grad
    assert SEEN["values"].tolist() == [0.0] * 21, "the critic's head begins at 0"
    assert SEEN["returns"].abs().sum() > 0
    assert statistics.figures == {"age": pytest.approx((3 * 4 + 3 * 4 + 3) / 21), "twice": pytest.approx(54 / 21)}


def test_an_estimator_gets_each_column_that_it_names() -> None:
    roles, settings = roles_of(advantage={"estimator": JUDGING, "own": {"floor": 2.0}})
    batch = groups()
    prepare(roles, settings, batch, 1, VERSION)
    assert GIVEN["own"] == Own(floor=2.0)
    assert GIVEN["staleness"].tolist() == [2, 2, 0, 2, 2, 0, 1] * 3
    assert GIVEN["group"].tolist() == [group for group in range(3) for _ in range(7)]
    assert GIVEN["behaviour"].tolist() == [-1, -2, -3, -1, -2, -3, -4] * 3
    assert GIVEN["reference"].tolist() == pytest.approx(expected(batch, "logprob"), abs=1e-5)
    with pytest.raises(ValueError, match="without staleness"):
        roles.advantage_computer.of(batch)


def test_a_column_that_is_not_named_is_not_there() -> None:
    tokens = LossTokens(*(torch.zeros(2) for _ in range(5)), torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(UsageError, match=r"column 'staleness' is read and not declared \(declared: none\)"):
        careless(tokens, LossSettings())
    nothing = np.zeros(0)
    batch = RewardBatch(nothing, nothing, *(np.zeros(0, dtype=np.int64) for _ in range(2)), nothing > 0, nothing > 0)
    with pytest.raises(UsageError, match="'reference' is read and not declared"):
        batch.column("reference")


def entries(**columns: Any) -> dict[str, Any]:
    """Choices of a loss and an estimator that name these columns."""
    hasty.entry = AdvantageEntry(f"{HERE}:hasty", "R", columns=columns.get("estimator", ()))  # type: ignore[attr-defined]
    careless.entry = LossEntry(f"{HERE}:careless", "d", columns=columns.get("loss", ()))  # type: ignore[attr-defined]
    chosen = {"loss": {"policy": f"{HERE}:careless"}, "advantage": {"estimator": f"{HERE}:hasty"}}
    return {section: chosen[section] for section in {"loss": "loss", "estimator": "advantage"}.values()}


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"loss": ("values",)}, "careless reads the column 'values', and .*hasty has no critic: set .*gae"),
        ({"loss": ("staleness", "returns")}, "reads the column 'returns'"),
        ({"estimator": ("values",)}, "estimator=.*hasty reads the column 'values'"),
        ({"estimator": ("entropy",)}, "reads a column 'entropy', which it cannot have: .*known: staleness"),
        ({"loss": ("stalenes",)}, "loss .*careless reads a column 'stalenes'.*did you mean 'staleness'"),
    ],
)
def test_a_column_that_cannot_be_is_refused_by_name(columns: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe(trainer(**entries(**columns)))


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"loss": {"policy": CURIOUS, "own": {"flor": 1.0}}}, r"unknown key 'trainer\.loss\.own\.flor'.*own\.floor'"),
        ({"loss": {"policy": CURIOUS, "own": {"floor": -1.0}}}, r"trainer\.loss\.own\.floor = -1.0 cannot be"),
        ({"advantage": {"estimator": JUDGING, "own": {"flor": 1}}}, r"nearest known key is 'trainer\.advantage\.own"),
        ({"loss": {"own": {"floor": 1.0}}}, r"loss\.own\.floor=1.0 would have no effect under loss\.policy=ppo_clip"),
        ({"advantage": {"own": {"floor": 1}}}, r"no effect under advantage\.estimator=gae, which has no settings"),
    ],
)
def test_settings_that_it_has_not_are_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe(trainer(advantage={"estimator": "gae"} | choices.get("advantage", {}), loss=choices.get("loss", {})))


def test_the_formula_and_the_table_have_its_settings_with_their_defaults() -> None:
    chosen = trainer(loss={"policy": CURIOUS, "own": {"clip_low": 9}}, advantage={"estimator": "gae", "trace": 0.5})
    assert "Σ 0.25·9·A·log π;" in describe(chosen)
    assert "it reads staleness, group, entropy, reference, values, returns of each token" in describe(chosen)
    assert "π_ref = the policy that the run began with" in describe(chosen)
    assert own_tables(chosen) == ({"floor": 0.25, "clip_low": 9}, {})


def test_a_term_that_names_no_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curious, "entry", LossEntry(CURIOUS, "{ceiling:g}·A", ratio=None, settings=Own))
    with pytest.raises(UsageError, match=r"the term '\{ceiling:g\}·A' of .*curious cannot be filled in"):
        describe(trainer(loss={"policy": CURIOUS}))


def test_a_process_that_does_not_know_the_code_hands_its_settings_on(tmp_path: Path) -> None:
    table = {"alpha": 0.5, "names": ["a", "b"], "deep": {"on": True, "n": 3}}
    settings = load_settings(None, ["trainer.loss.policy=nowhere:own", "trainer.loss.own.alpha=0.5"])
    assert settings.trainer.loss.own == {"alpha": 0.5}
    whole = RunSettings(trainer=trainer(loss={"policy": "nowhere:own", "own": table}))
    (tmp_path / "config.toml").write_text(dump_settings(whole))
    assert load_settings(tmp_path / "config.toml", []) == whole
    assert fingerprint(whole) != fingerprint(RunSettings(trainer=trainer(loss={"policy": "nowhere:own"})))


def test_it_may_be_a_file_or_a_module_where_the_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from trainer.algorithms.losses.registry import LossEntry\n"
        "def plain(tokens, settings): ...\n"
        "plain.entry = LossEntry('plain:plain', 'plain·A')\n"
    )
    (tmp_path / "of_a_file.py").write_text(code)
    (tmp_path / "of_this_folder.py").write_text(code)
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    assert "plain·A" in describe(trainer(loss={"policy": f"{tmp_path}/of_a_file.py:plain"}))
    with pytest.raises(UsageError, match=r"of_no_file.py:plain cannot be imported"):
        describe(trainer(loss={"policy": f"{tmp_path}/of_no_file.py:plain"}))
    monkeypatch.chdir(tmp_path)
    assert "plain·A" in describe(trainer(loss={"policy": "of_this_folder:plain"}))
