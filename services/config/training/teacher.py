"""Settings of the teacher of an on-policy distillation: who tells its logprobs of what the policy sampled."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.config.base import Section


class TeacherSettings(Section):
    """A server of vLLM's text completions with `prompt_logprobs`: any vLLM, or a rollout server."""

    url: str | None = Field(
        default=None, pattern=r"^https?://", description="Where it is; empty: `rollmesh up` serves `model`"
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder, or a name (`rollmesh models`); with `url`: its name there (empty: the first)",
    )
    key_file: Path | None = Field(default=None, description="With `url`: file with the key that it asks for")
    timeout_s: float = Field(
        default=120.0, gt=0.0, description="How long one trajectory is asked for before the run fails"
    )
    at_once: int = Field(default=16, ge=1, description="Calls in flight")

    @property
    def there(self) -> bool:
        """Whether there is one."""
        return self.url is not None or self.model is not None
