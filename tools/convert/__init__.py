"""Convert checkpoints from and to the formats of other programs.

main  scripts/convert_checkpoint.py
"""
