from __future__ import annotations

import os

from hypothesis import settings

# A developer's run draws new cases each time, and finds what nobody thought of. Where the result decides about somebody
# else's change, .ci/run sets this, so that the same sources always give the same result.
settings.register_profile("repeatable", derandomize=True)
if os.environ.get("TENGSERVE_REPEATABLE_TESTS") == "1":
    settings.load_profile("repeatable")
