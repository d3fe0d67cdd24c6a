"""What a run was: its manifest, and what two of them say of each other.

`manifest` writes it while the job runs, from what `source` and `hardware` find; `reading` reads it, on a
login node too; `tokens` knows what must not stand in it. `compare` and `rerun` are commands: `traces` has the
numbers, `causes` the rules, `picture` draws.
"""
