"""From logits to a token: adjust, filter, draw; and what the probabilities were."""
