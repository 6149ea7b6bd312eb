"""What can be wrong with a chat request before any token is drawn."""

from __future__ import annotations

from services.wire.errors import RollmeshError


class TemplateError(RollmeshError):
    """The model's chat template does not take these messages (a role, an order, an image): HTTP 400."""

    status = 400
    code = "template"


class NoChatTemplateError(RollmeshError):
    """The model folder says nothing about chat: HTTP 400."""

    status = 400
    code = "no_chat_template"

    def __init__(self, folder: str) -> None:
        super().__init__(
            f"the model in {folder} has no chat template",
            "use /v1/completions or the token routes, or save a chat template beside the tokenizer",
        )
