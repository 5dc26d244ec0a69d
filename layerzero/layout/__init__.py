"""Flat layout of parameters over ranks. Integers only, without torch and without processes."""
