"""config.json of Hugging Face folders -> the `model` section, and back. Data only; does not import jax."""
