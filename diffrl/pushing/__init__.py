"""A run on the hub or in an object store: sent while it trains (`checkpoint.push`), fetched to go on elsewhere."""
