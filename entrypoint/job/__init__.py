"""What outlives an attempt: the run directory and its files, how attempts ended, and what the job scripts are
told before the first one (`prepare`) and after the last (`conclude`).
"""
