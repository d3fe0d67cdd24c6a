"""What a machine tells of its site, for a first profile: `apptrain site` (entrypoint/cli/site.py).

`ask.py` asks; `host.py`, and `survey.py` of each scheduler, understand one source of answers each, and
`draft.py` writes them down. An answer keeps where it came from, and what could not be known is a question.
Python 3.9 runs it.
"""
