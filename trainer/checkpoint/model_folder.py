"""A Hugging Face folder: read as the policy that is trained, and written of one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.host.files import appearing
from services.host.models import check_code
from services.wire.errors import NoModelError, UsageError
from trainer.model.adapters import Adapters
from trainer.model.forward import freeze_beside_text
from trainer.model.learner import named_weights
from weight_bus.manifest.computed import PublishedTensor, computed

# Tokenizer, processor, chat template, the model's own code, terms of use. Weights and their configuration are written anew;
# other files (curves, summaries, a page about other weights) are not of the model.
_CARRIED_OVER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "normalizer.json",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "chat_template*",
    "*processor_config.json",
    "*.py",
    "licen[cs]e*",
    "notice*",
    "*policy*",
)
"""Names in small letters."""


@dataclass(frozen=True)
class Gathered:
    """A model that is spread over ranks, all of it in the memory of one's host.

    `weights`: by the model's own names, adapters merged into them; `adapters`: by peft's, none where it has none.
    """

    weights: dict[str, Tensor]
    adapters: dict[str, Tensor]


def load_policy(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The policy in float32 (its master weights), on the GPU where there is one. Raises UsageError.

    `trust_remote_code`: whether code in the folder may be run.

    Of a multimodal model only what text goes through is trained; the rest is published as it is.
    """
    transformers_logging.disable_progress_bar()
    check_policy(folder, trust_remote_code=trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise NoModelError(folder, error) from error
    freeze_beside_text(model)
    return model.to(device)


def check_policy(folder: Path, *, trust_remote_code: bool) -> None:
    """Raises UsageError for a folder of which no policy is loaded, whatever its weights are."""
    if (folder / "adapter_config.json").exists():
        # transformers would load it, and weights would have other names than engines know.
        raise UsageError(f"{folder} holds an adapter beside the weights", "merge it into them (peft: merge_and_unload)")
    check_code(folder, trusted=trust_remote_code)


def save_final(
    folder: Path,
    model: PreTrainedModel,
    base: Path,
    adapters: Adapters | None = None,
    gathered: Gathered | None = None,
) -> Path:
    """Write `folder/final`: the model, and what else belongs to it in its original folder `base`; returns its path.

    `gathered`: all of its weights, where the model has only this rank's. `adapters`: those of the model, where they alone
    were trained. They are merged into a copy of its weights in host memory, and `folder/final-adapter` has them alone.
    Raises OSError.
    """
    target = folder / "final"
    shutil.rmtree(target, ignore_errors=True)
    with appearing(target) as making:
        fill_model(making, model, base, adapters, weights=None if gathered is None else gathered.weights)
    if adapters is not None:
        alone = folder / "final-adapter"
        shutil.rmtree(alone, ignore_errors=True)
        with appearing(alone) as making:
            adapters.save(making, base, None if gathered is None else gathered.adapters)
    return target


def save_model(
    target: Path,
    model: PreTrainedModel,
    base: Path,
    adapters: Adapters | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 50_000_000_000,
) -> None:
    """Write the folder `target`, which must not be there, as `fill_model` does. Raises OSError."""
    with appearing(target) as making:
        fill_model(making, model, base, adapters, dtype, shard_bytes)


def fill_model(
    making: Path,
    model: PreTrainedModel,
    base: Path,
    adapters: Adapters | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 50_000_000_000,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write into `making`: the model, adapters merged, and what else belongs to it in its original folder `base`.

    `dtype`: of floating weights, and of `model` from then on; None for their own. `shard_bytes`: of a file, at most.
    `weights`: by the model's names, adapters merged, in place of its own. Raises OSError.
    """
    if weights is None and (adapters is not None or dtype is not None):
        own = named_weights(model)
        named: Mapping[str, PublishedTensor] = own if adapters is None else adapters.merged(own)
        weights = {name: _as(computed(tensor).detach().cpu(), dtype) for name, tensor in named.items()}
    _carry_over(making, base)
    if dtype is not None:
        # What the configuration says is taken from the model itself.
        model.to(dtype)
    model.save_pretrained(making, state_dict=weights, max_shard_size=shard_bytes)


def _carry_over(making: Path, base: Path) -> None:
    for path in base.iterdir():
        if path.is_file() and any(fnmatchcase(path.name.lower(), pattern) for pattern in _CARRIED_OVER):
            shutil.copy2(path, making / path.name)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
