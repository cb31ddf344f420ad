"""``python -m cogfs.fsd.mount``: a mount worker."""

import sys

from cogfs.fsd.mount.worker import main

if __name__ == "__main__":
    sys.exit(main())
