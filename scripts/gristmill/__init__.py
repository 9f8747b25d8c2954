"""gristmill: run open-weights language models over datasets on every GPU there is, and judge the answers.

The scripts beside this package are thin; all logic lives here. Nothing runs at import, and torch and
transformers are imported only in the functions that use them, so that planning, merging, metrics and the report
start in a fraction of a second on a machine without a GPU.
"""

__version__ = "0.1.0"

#: Part of every request's key: raise it when the same request would now get another answer (chat templating, stopping,
#: sampling). Answers made under an older number are then computed again; a refactoring does not touch it.
GENERATION_VERSION = 1
