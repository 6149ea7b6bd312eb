"""What can go wrong inside an engine."""

from __future__ import annotations

from services.wire.errors import RollmeshError


class EngineCrashedError(RollmeshError):
    """The engine's decode thread ended with an error; the engine serves nothing more and must be started anew."""

    status = 503
    code = "engine_crashed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine stopped decoding ({type(cause).__name__}: {cause})", "restart the rollout server")


class NonFiniteLogitsError(RollmeshError):
    """The weights being served give logits that are not numbers; requests decoded with them end, the engine goes on."""

    status = 503
    code = "non_finite_logits"

    def __init__(self, version: int) -> None:
        super().__init__(f"policy version {version} gives logits that are not finite", "publish weights that are")
