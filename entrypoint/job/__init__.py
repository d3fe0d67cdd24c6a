"""What outlives an attempt: the run directory and its files, and how attempts ended."""
