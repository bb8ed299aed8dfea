"""BranchGRPO: trees of images."""
