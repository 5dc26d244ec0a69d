"""Flat layout of parameters over ranks. Integers only; uses neither torch nor processes."""
