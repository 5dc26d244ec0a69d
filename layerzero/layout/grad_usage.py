"""Usage of a parameter: the state of its gradient as one byte."""

from __future__ import annotations

import enum

__all__ = ["GradUsage"]


class GradUsage(enum.IntEnum):
    """Known state of the gradient of one parameter since the user last zeroed it.

    The ranks agree on the maximum of this byte over all ranks. A contribution moves UNUSED to CONTRIBUTED. Publication
    of the final gradient moves CONTRIBUTED to PUBLISHED. zero_grad() moves every state to UNUSED. UNKNOWN means that
    contributions of other ranks are unknown until the next agreement.
    """

    UNUSED = 0  # no contribution from any rank, as far as this rank knows
    UNKNOWN = 1  # none from this rank, but perhaps from another rank of the ZeRO-3 group
    PUBLISHED = 2  # has contributions, all published
    CONTRIBUTED = 3  # has contributions since the final gradient was last published
