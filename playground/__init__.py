"""A closed little world where the truth is computable, so that reward hacking can be measured."""
