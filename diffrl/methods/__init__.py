"""Methods: an objective, a wrapper or credit over the steps is a folder; none imports another, but for `shared`."""
