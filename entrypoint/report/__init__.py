"""One run as one page: `apptrain report`.

`facts` reads the run directory, `charts` draws, `page` writes the HTML, `bundle` packs an archive for a
support desk. `command` is the entry, by hand and at the end of a run.
"""
