"""`python -m mtpjax`: the command line."""

import sys

from mtpjax.cli import main

sys.exit(main())
