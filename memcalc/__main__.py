"""``python -m memcalc`` is the ``memcalc`` command."""

from __future__ import annotations

from memcalc.cli import main

if __name__ == "__main__":
    main()
