"""SnoozeML's surface: ``snoozeml.v1.InferenceService``, driven by the unmodified ``snoozeml`` package."""
