"""All of them."""

from tests.fuzz import models, ops, texts

HARNESSES = (*models.HARNESSES, *ops.HARNESSES, *texts.HARNESSES)
