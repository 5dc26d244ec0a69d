"""Device memory, streams, buffer pools and storage of gradients."""
