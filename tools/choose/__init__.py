"""--strategy auto and --batch_size auto: plain values of the flags, which fit all ranks.

candidates  what may be chosen, the simplest first
choose      the first candidate whose memory estimate fits every rank
"""
