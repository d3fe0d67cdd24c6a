"""How the nodes of a job prove who they are, agree, and stay in touch."""
