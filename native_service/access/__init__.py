"""Who may call: roles, keys and tokens, certificates."""
