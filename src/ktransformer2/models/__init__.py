"""Weights: any causal transformers model, untouched, stepped on one flat batch; and how it gets here."""
