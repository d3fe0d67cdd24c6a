"""The same program on several numbers of nodes: `apptrain scaling`.

`measured` reads runs, `finding` judges them, `result` and `picture` show that, `sweep` starts the runs.
`command` is the entry.
"""
