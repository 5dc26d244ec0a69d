"""Lay out parameters in flat storage that is sharded across ranks. The code needs neither torch nor processes."""
