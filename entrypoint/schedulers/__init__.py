"""What a scheduler granted, read from its variables: one module each, and the value that all of them give."""
