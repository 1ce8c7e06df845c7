"""Names of the keys that have a meaning in a request's dict."""

TASK_DATA_KEY = "data"
TASK_RESULT_KEY = "result"
TASK_ERROR_KEY = "error"
TASK_BOX_KEY = "box"
TASK_COLOR_KEY = "color"
TASK_CONTEXT_KEY = "context"
TASK_NODE_NAME_KEY = "node_name"
TASK_PRIORITY_KEY = "priority"
TASK_STATE_KEY = "state"
TASK_PARAMETERS_KEY = "parameters"
TASK_IMAGE_SIZE_KEY = "image_size"
TASK_TO_ORIGINAL_KEY = "to_original"
TASK_ORIGINAL_KEY = "original"
TASK_ORIGINAL_COLOR_KEY = "original_color"

BY_CONSTANT: dict[str, str] = {name: value for name, value in dict(vars()).items() if name.startswith("TASK_")}
"""The keys by the names of their constants, which a configuration may use, too."""
