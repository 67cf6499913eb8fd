"""Published measurements against estimates: a table of rows becomes plans, errors and statistics."""

from __future__ import annotations
