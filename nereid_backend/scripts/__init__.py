"""Models that are programs: one child process per request, in a folder and an environment of their own.

The contract with a program is nereid-server's. It runs in its folder with the input's bytes on stdin (row-major,
little endian) and finds ``NEREID_INPUT_SHAPE``, ``NEREID_INPUT_DTYPE``, ``NEREID_OUTPUT_DTYPE`` and
``NEREID_OUTPUT_PATH`` in its environment; it leaves its answer in that file (``frame``) and ends with code 0.
"""

PYTHON, CPP = "python", "cpp"
"""The engines, by the names nereid-server gives them."""
SCRIPT_FOLDER = "folder"
"""The user's folder inside a version directory: where the program runs."""
MAIN_FILE, PROGRAM_FILE = "main.py", "model"
