"""What a job script and a login node know of PBS."""
