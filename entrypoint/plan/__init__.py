"""What a launch will run, decided before anything runs.

Options and where they come from, a site's profile, the rendezvous, and the rules that make a plan of them.
"""
