"""All that talks: ranks and their lanes, exchanges, agreement, the record of what was sent."""
