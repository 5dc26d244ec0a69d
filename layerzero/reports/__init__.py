"""What people look at and hold: whole parameters, reports, traces, contexts of a loop."""
