"""``python -m fedstat.operator`` is the command ``fedstat``."""

import sys

from fedstat.operator.command_line import main

sys.exit(main())
