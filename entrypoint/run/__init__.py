"""One attempt on this node, and the sequence of them: ranks are started, stayed with, and ended."""
