"""Proof that a config's numbers do not depend on the layout: what `python -m jaxmoe.verify` runs."""
