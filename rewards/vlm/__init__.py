"""Vision-language models as judges: one backend, one parser of answers, and a small reward for each way to ask."""
