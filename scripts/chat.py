#!/usr/bin/env python3
"""Talk to a trained model in the terminal: tools/chat has the program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training import process, programs

if __name__ == "__main__":
    process.catch_signals()
    from tools.chat.main import main

    programs.run_command_line(main)
