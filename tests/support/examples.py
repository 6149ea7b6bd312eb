"""How many examples hypothesis tries: three profiles, and `@examples(200)` in place of a number of a test's own.

dev        a plain run                      a quarter of the examples   the same ones every time
ci         ./dev test --all                 all of them                 the same ones every time
nightly    --hypothesis-profile=nightly     twenty times as many        others every time; a failure says how to repeat it
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SHARES = {"dev": 0.25, "ci": 1.0, "nightly": 20.0}
_MANY = 100
"""Examples of a test that names no number of its own."""


def register_profiles() -> None:
    """Examples take as long as the machine's other work lets them: none has a deadline."""
    for name, share in _SHARES.items():
        settings.register_profile(
            name,
            deadline=None,
            derandomize=name != "nightly",
            print_blob=True,
            max_examples=round(_MANY * share),
            suppress_health_check=[HealthCheck.too_slow],
        )


def examples(count: int) -> settings:
    """A decorator: `count` examples under the profile `ci`, in proportion under the others."""
    share = _SHARES.get(settings.get_current_profile_name(), 1.0)
    return settings(max_examples=max(10, round(count * share)))
