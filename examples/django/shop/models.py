"""The tables of the shop in Django's database."""

from __future__ import annotations

from django.core.validators import MinValueValidator
from django.db import models


class Order(models.Model):
    """An order of a customer."""

    customer = models.CharField(max_length=200)
    amount = models.IntegerField(validators=[MinValueValidator(1)])
    confirmed = models.BooleanField(default=False)
