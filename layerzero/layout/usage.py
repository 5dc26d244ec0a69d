"""Which parameters have a gradient."""

from __future__ import annotations

import enum

__all__ = ["GradUsage"]


class GradUsage(enum.IntEnum):
    """What is known of one parameter's gradient since the user last zeroed it.

    This byte is what ranks agree on, the maximum over all of them. NONE -> NEW by a contribution, NEW -> SEEN when a
    final gradient is shown, all -> NONE by zero_grad. MAYBE is this rank's ignorance; an agreement ends it.
    """

    NONE = 0  # nothing from any rank that this one knows of
    MAYBE = 1  # nothing from here, but perhaps something from another rank of the node
    SEEN = 2  # has been contributed to, and shown
    NEW = 3  # has been contributed to since a final gradient was last shown
