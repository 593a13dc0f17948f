"""`pytest --no-missing`: a test that is skipped for want of a package or a program fails. `.ci/run` tests so."""

from __future__ import annotations

import re

import pytest

# What a machine or a case may lack. A skip for any other reason fails.
ALLOWED = (
    *("no GPU", "one GPU alone", "needs nvcc"),
    "llama-cpp-python is not installed",  # an installation compiles it for minutes
    "no interpreter has the client",  # clients and what they need are large, and they contradict each other
    *("root may write anywhere", "never samples", "a draft model has them all"),
    *("tensors of this test are the host's", "these tensors are the host's"),
)
_ALLOWED = re.compile("|".join(map(re.escape, ALLOWED)))


class NoMissing:
    """Implements the option."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        return checked((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self):
        return checked((yield))


def checked(report):
    """Makes a skip a failure unless its reason is allowed."""
    if report.skipped and isinstance(report.longrepr, tuple) and not _ALLOWED.search(report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]}: a failure with --no-missing (tests/skips.py)"
    return report
