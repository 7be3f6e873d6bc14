"""A backend for the relay, for an accelerator that does not exist: copy it, and make it yours."""
