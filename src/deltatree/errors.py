"""Every error that deltatree raises on purpose.

    DeltatreeError
    ├── OptionError         an option's value is out of its range, or two options exclude each other
    ├── PromptError         the prompt is empty, too long for the context, or not text
    ├── CheckpointError     a folder, a config or a weight file cannot be used
    │   └── ArchitectureError   the model's layers have no tree rule here
    ├── MismatchError       target and drafter do not belong together
    ├── TreeError           a node list is not a tree, or a path is not one of its paths
    ├── RecordError         benchmark records or data sets that cannot be read or written
    └── RequestError        a request that the server refuses

Each message says what was asked, what is possible, and the way out. The command line prints it and exits with 2.
"""


class DeltatreeError(ValueError):
    """Base of all errors raised on purpose."""


class OptionError(DeltatreeError):
    """An option's value is out of its range, or two options exclude each other."""


class PromptError(DeltatreeError):
    """The prompt is empty, too long for the context, or not text."""


class CheckpointError(DeltatreeError):
    """A folder, a config or a weight file cannot be used."""


class ArchitectureError(CheckpointError):
    """The model's layers have no tree rule here."""


class MismatchError(DeltatreeError):
    """Target and drafter do not belong together."""


class TreeError(DeltatreeError):
    """A node list is not a tree, or a path is not one of its paths."""


class RecordError(DeltatreeError):
    """Benchmark records or data sets that cannot be read or written."""


class RequestError(DeltatreeError):
    """A request that the server refuses."""
