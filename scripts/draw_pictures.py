#!/usr/bin/env python3
"""Draw the pictures of docs/images: tools/docs has the program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.docs.pictures import main

if __name__ == "__main__":
    main()
