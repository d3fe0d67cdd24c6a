"""What a job script and a login node know of a scheduler: a package for each.

The job script asks `prepare` before the first attempt and `conclude` after each; `granted()` in `job` of each
scheduler reads what was given to it. `login` is for `apptrain submit`, `survey` for `apptrain site`. What a
task sees is in entrypoint/schedulers.
"""
