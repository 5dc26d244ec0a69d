"""Predict memory and traffic from specs that contain no tensors."""
