"""What a run that lasts needs: numbers that are finite, copies that are equal, and to know who is missing."""
