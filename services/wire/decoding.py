"""What msgspec's decoders raise for bytes from outside: whoever decodes them makes typed errors of all of it."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Other bytes than the schema's, text that is not UTF-8, and nesting deeper than the interpreter's stack."""
