"""What became of ranks: how they say that they go on, where they are, which one hangs or has failed first."""
