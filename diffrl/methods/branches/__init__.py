"""G2RPO and TempFlow-GRPO: single steps from shared ODE paths."""
