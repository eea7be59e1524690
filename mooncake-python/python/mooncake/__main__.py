"""`python -m mooncake`: the command-line tool of this installation."""

import sys

from mooncake._tool import main

if __name__ == "__main__":
    sys.exit(main())
