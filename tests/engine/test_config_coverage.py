"""Every key of the configuration has a test that sees it take effect: see config_coverage.py."""

from __future__ import annotations

from pathlib import Path

import config_coverage

FOLDER = Path(__file__).parent


def test_every_key_has_a_test_that_sees_its_effect() -> None:
    missing = set(config_coverage.keys()) - {key for key, _ in config_coverage.tests(FOLDER)}
    assert not missing, "no test has @alive(...) for:\n" + "\n".join(sorted(missing))


def test_keys_with_such_a_test_exist() -> None:
    known = set(config_coverage.keys())
    unknown = [
        f"{test.__module__}.{test.__name__}: {key}" for key, test in config_coverage.tests(FOLDER) if key not in known
    ]
    assert not unknown, "@alive(...) names keys that the configuration has not:\n" + "\n".join(unknown)


def test_such_tests_run_always() -> None:
    """In `make test`, and on every machine."""
    for _, test in config_coverage.tests(FOLDER):
        assert test.__name__.startswith("test_"), f"{test.__module__}.{test.__name__} is not collected"
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        assert not marks & {"slow", "skip", "skipif", "xfail"}, f"{test.__module__}.{test.__name__}: {marks}"
