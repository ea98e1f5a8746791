"""The error tree: one branch per party who has to act."""


class ExpediterError(Exception):
    """Root of all errors that Expediter raises on purpose."""


class ConfigurationError(ExpediterError):
    """The operator's input (flag, preset, trace, model folder) cannot be used."""


class RequestError(ExpediterError):
    """A client's request is invalid (HTTP 400).

    Attributes:
        param: name of the offending field, if one can be named.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(ExpediterError):
    """No room now; the client may retry (HTTP 503).

    Attributes:
        retry_after_s: when it is likely to be worth it.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaError(ExpediterError):
    """A replica died, stalled or answered nonsense."""


class InvariantError(ExpediterError):
    """A bug of ours: an internal contract does not hold."""
