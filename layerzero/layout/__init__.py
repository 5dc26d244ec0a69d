"""Flat layout of parameters over ranks. Uses integers only, without torch and processes."""
