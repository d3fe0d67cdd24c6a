"""Small changes to the code, and whether the tests notice: `make mutants`.

`change` knows which changes there are and draws some, `trial` runs the tests on each in a private copy of the checkout,
`table.yaml` says which tests are to notice. A library would do for Python alone: none reads bash too, draws a seeded
sample, and looks at programs that the tests start as processes of their own.
"""
