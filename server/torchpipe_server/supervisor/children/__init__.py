"""Workers and engine processes: forked, watched, replaced."""
