"""A simulation of layerzero's schedule on machines that one does not have; see docs/simulation.md."""
