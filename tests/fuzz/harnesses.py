"""All of them."""

from tests.fuzz import models, ops, quantised, texts

HARNESSES = (*models.HARNESSES, *quantised.HARNESSES, *ops.HARNESSES, *texts.HARNESSES)
