"""--rank_shares auto: measure how fast each rank computes, and choose shares that end together.

timer     seconds that a rank computes in its forward passes, without waits for other ranks
balancer  when the ranks measure, and which shares they choose
"""
