"""The folder of a model that is there already, by its path or its name. Nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from services.host.models import PACKAGED, check_code, folder_meant, is_folder, not_there
from services.host.run_folder import is_complete
from services.wire.errors import UsageError
from trainer.fetch import hub


def find_model(model: Path, *, trust_remote_code: bool = False) -> Path:
    """`model` itself where it is a folder, else that of the name that it is (`services.host.models`).

    Raises UsageError for what is no model folder, for one that needs code of its own unless `trust_remote_code`, and,
    with the command that fetches it, for a name that is not there yet.
    """
    if is_folder(model):
        folder = model.expanduser()
        if not is_complete(folder):
            known = f"known names: {', '.join(PACKAGED)}, and owner/name of the Hugging Face Hub"
            raise UsageError(f"{folder} is no Hugging Face model folder", f"it must hold a config.json; {known}")
        check_code(folder, trusted=trust_remote_code)
        return folder
    name = str(model)
    found = hub.cached(name, trust_remote_code=trust_remote_code) if name not in PACKAGED else folder_meant(model)
    if found is None or not is_complete(found):
        raise not_there(name)
    check_code(found, trusted=trust_remote_code)
    return found
