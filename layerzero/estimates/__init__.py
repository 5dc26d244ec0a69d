"""Memory and traffic by formula, from specs without tensors."""
