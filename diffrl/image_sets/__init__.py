"""Pictures with prompts and scores, from files: trained on in the place of a rollout's images, or beside them."""

PREFIX = "hub:"
FORM = "a folder with .jsonl or .parquet files, a .jsonl, .parquet or .json file, or hub:OWNER/NAME[:FILES]"
