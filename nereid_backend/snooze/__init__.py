"""Worker directories of SnoozeML: a user's class that loads once and answers many calls, in a process of its own.

``worker.py`` is what that process runs, in the model's own interpreter; ``process.py`` is our end of the protocol.
"""

ENGINE = "snooze"
"""The engine, and what ``backend`` in nereid.yaml may say."""
MODEL_FILE, OPTIONS_FILE = "snooze_model.py", "snooze_model.json"
CLASS = "Model"
"""The class in ``MODEL_FILE`` when ``OPTIONS_FILE`` names no other."""
