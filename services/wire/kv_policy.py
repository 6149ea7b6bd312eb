"""What a new policy version does to the keys and values that an engine holds."""

from __future__ import annotations

from typing import Literal

KvPolicy = Literal["keep", "recompute", "salt"]
"""No policy lets a request read keys and values that another version computed for another request.

`keep`: running requests go on with theirs; nothing is shared. `salt`: running requests go on with theirs; prefixes are
shared within a version. `recompute`: running requests have theirs computed anew; prefixes are shared within a version.
"""
