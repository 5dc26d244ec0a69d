"""Lay out parameters in flat storage over ranks. The code uses only integers, without torch or processes."""
