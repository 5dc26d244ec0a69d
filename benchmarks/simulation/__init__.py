"""Simulation of training on 4,096 nodes; see README.md."""
