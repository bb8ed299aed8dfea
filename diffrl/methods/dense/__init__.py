"""DenseGRPO: each step's own gain."""
