"""Simulation of layerzero's schedule on other machines; see docs/simulation.md."""
