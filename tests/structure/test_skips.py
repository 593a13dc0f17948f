"""With --no-missing, a test that lacks a package or a program fails instead of being skipped."""

import pytest

pytest_plugins = ["pytester"]
STRICT = """
from tests.skips import NoMissing

def pytest_configure(config):
    config.pluginmanager.register(NoMissing())
"""
TESTS = """
import pytest

def test_of_a_package():
    pytest.importorskip("no_such_package")

@pytest.mark.skipif(True, reason="the page's tests need chromium")
def test_of_a_program():
    pass

def test_of_a_gpu():
    pytest.skip("no GPU, or no CUDA in this build or in torch")

@pytest.mark.xfail
def test_of_a_known_fault():
    assert False

def test_of_nothing():
    pass
"""
MODULE = "import pytest\npytest.importorskip('no_such_package')\n"


def test_without_the_option_tests_are_skipped(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TESTS, test_module=MODULE)
    pytester.runpytest_inprocess().assert_outcomes(passed=1, skipped=4, xfailed=1)


def test_with_it_tests_without_their_package_or_program_fail_and_others_do_not(pytester: pytest.Pytester):
    pytester.makeconftest(STRICT)
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1, errors=1, skipped=1, xfailed=1)  # skipif is an error of the setup
    said = result.stdout.str()
    assert "No module named 'no_such_package': a failure with --no-missing" in said
    assert "the page's tests need chromium: a failure with --no-missing" in said


def test_with_it_a_module_without_its_package_is_an_error(pytester: pytest.Pytester):
    pytester.makeconftest(STRICT)
    pytester.makepyfile(test_it=TESTS, test_module=MODULE)
    pytester.runpytest_inprocess().assert_outcomes(errors=1)
