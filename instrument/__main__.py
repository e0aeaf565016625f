"""`python -m instrument` is `instrument`."""
import sys

from instrument.cli import main

if __name__ == "__main__":
    sys.exit(main())
