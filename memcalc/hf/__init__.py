"""Models of Hugging Face from their config.json, without torch and without transformers: ``memcalc.hf.reading``."""
