"""Encode the state of a parameter's gradient as one byte."""

from __future__ import annotations

import enum


class GradUsage(enum.IntEnum):
    """Known state of one parameter's gradient since the user last zeroed it.

    The ranks agree on the maximum of this byte over all ranks. A contribution changes any state to CONTRIBUTED. When
    the final gradient is published, CONTRIBUTED changes to PUBLISHED. zero_grad() changes every state to UNUSED.
    UNKNOWN means that this rank does not know the contributions of other ranks until the next agreement.
    """

    UNUSED = 0  # no rank has contributed, as far as this rank knows
    UNKNOWN = 1  # this rank has not contributed, but another rank of the ZeRO-3 group may have
    PUBLISHED = 2  # there are contributions, and all of them have been published
    CONTRIBUTED = 3  # there are contributions since the final gradient was last published
