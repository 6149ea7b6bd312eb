"""The behaviour policy of the staleness table: the policy under training as it was some optimizer steps ago."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel


class LaggedPolicy:
    """Holds the weights of the last `k` + 1 versions, from 0 on: `model`, which is its own from now on."""

    def __init__(self, model: PreTrainedModel, k: int) -> None:
        self._model = model.eval()
        self._k = k
        self._weights: dict[int, dict[str, Tensor]] = {}
        self.keep(0, model)

    def keep(self, version: int, model: PreTrainedModel) -> None:
        """`model` is version `version` now."""
        self._weights[version] = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        self._weights.pop(version - self._k - 1, None)

    def before(self, version: int) -> tuple[int, PreTrainedModel]:
        """The policy `k` steps before `version`, or the first one; its version and itself, until the next call."""
        lagged = max(0, version - self._k)
        self._model.load_state_dict(self._weights[lagged])
        return lagged, self._model
