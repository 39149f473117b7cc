"""What a route says of its own bodies: rules, where those of the whole app do not suit it, and that one is parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

_KEY: Final = "tengserve.body_rules"
_RELEASE: Final = "tengserve.release_body"


@dataclass(frozen=True, slots=True)
class BodyRules:
    """Rules of one route.

    Attributes:
        max_bytes: limit on what is sent.
        encoded: the route sees to the content encoding itself.
        respond: the answer to a body that cannot be taken in.
    """

    max_bytes: int
    encoded: bool
    respond: Callable[[BaseException], Response]


def set_body_rules(scope: Scope, rules: BodyRules) -> None:
    """Apply rules to a request whose body has not been asked for."""
    scope[_KEY] = rules


def body_rules(scope: Scope) -> BodyRules | None:
    """The rules that were set."""
    rules: BodyRules | None = scope.get(_KEY)
    return rules


def set_release(scope: Scope, release: Callable[[], None]) -> None:
    """Say what `release_body` is to call; done by who counts the body."""
    scope[_RELEASE] = release


def release_body(scope: Scope) -> None:
    """The body is parsed, and its bytes are not needed any more."""
    release: Callable[[], None] | None = scope.get(_RELEASE)
    if release is not None:
        release()
