"""Fixtures of the tests of growth: those of the op tests."""

from tests.ops.conftest import backend, few_threads, instruction_set

__all__ = ["backend", "few_threads", "instruction_set"]
