"""Where each parameter lies in the flat order: arithmetic, without torch and without processes."""
