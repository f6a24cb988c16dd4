"""The native service: ``inference.Nereid`` and the calls of programs."""
