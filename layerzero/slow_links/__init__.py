"""Encode messages for slow links: gradients and refreshed weights between nodes, and packets of weights."""
