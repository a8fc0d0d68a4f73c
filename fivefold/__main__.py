"""``python -m fivefold`` is the ``fivefold`` command; so is ``torchrun ... -m fivefold``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
