"""A Hugging Face folder as the policy that is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.host.models import check_code
from services.wire.errors import NoModelError, UsageError
from trainer.model.forward import freeze_beside_text


def load_policy(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The policy in float32 (its master weights), on the GPU where there is one. Raises UsageError.

    `trust_remote_code`: whether code in the folder may be run.

    Of a multimodal model only what text goes through is trained; the rest is published as it is.
    """
    transformers_logging.disable_progress_bar()
    if (folder / "adapter_config.json").exists():
        # transformers would load it, and weights would have other names than engines know.
        raise UsageError(f"{folder} holds an adapter beside the weights", "merge it into them (peft: merge_and_unload)")
    check_code(folder, trusted=trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise NoModelError(folder, error) from error
    freeze_beside_text(model)
    return model.to(device)
