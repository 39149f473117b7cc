"""What a route says of its own bodies, where the rules of the whole app do not suit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

_KEY: Final = "tengserve.body_rules"


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
