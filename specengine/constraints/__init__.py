"""Constraints: which tokens may come next, so that a text stays in the language of a schema, a regex or a grammar."""

from specengine.constraints.base import Constraint
from specengine.constraints.grammars import Grammars

__all__ = ["Constraint", "Grammars"]
