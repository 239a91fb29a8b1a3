"""Workloads, clocks and result files: how Octavo's speed is measured and reported."""
