"""Compile the C++ ops that DeepSpeed's strategies need.

main  scripts/build_ops.py
"""
