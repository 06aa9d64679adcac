"""Starts the build that the sanitized tests need as soon as it is known that they will run."""

from __future__ import annotations

import pytest

from tests.sanitized import MISSING, SanitizedBuild

_BUILD = pytest.StashKey[SanitizedBuild]()


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any("sanitized_build" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not MISSING and not session.config.option.collectonly:
        session.stash[_BUILD] = SanitizedBuild()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _BUILD in session.stash:
        session.stash[_BUILD].close()


@pytest.fixture
def sanitized_build(request: pytest.FixtureRequest) -> SanitizedBuild:
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}")
    return request.session.stash[_BUILD]
