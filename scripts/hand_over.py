#!/usr/bin/env python3
"""Hand a trained model over to another engine: tools/hand_over has the program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training import process, programs

if __name__ == "__main__":
    process.catch_signals()
    from tools.hand_over.main import main

    programs.run_command_line(main)
