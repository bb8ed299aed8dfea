"""The field's benchmarks on a model: official files and rules, images drawn and judged by what the package has.

No file of a benchmark is shipped: they are read from the user's copy of the official repository. `facts` is the table
of all; the modules named like a benchmark, and `general`, read its files and know how its script adds up.
"""
