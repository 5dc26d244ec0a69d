"""Lay out parameters in flat storage over ranks. The code needs neither torch nor processes."""
