"""The ranks' processes of one node: how they start, what they print, where they stand."""
