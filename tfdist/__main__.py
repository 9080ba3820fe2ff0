"""`python -m tfdist`: the commands of `tfdist/launch/cli.py`."""

import sys

from tfdist.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
