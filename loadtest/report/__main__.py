"""`python -m loadtest.report`, the same as `quire report`."""

from __future__ import annotations

import sys

from loadtest.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
