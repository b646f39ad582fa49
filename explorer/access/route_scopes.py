"""Which scope each route asks of a key. A route that is not here asks for `admin`."""

from tuneloop.shared.experience import Scope

Scopes = frozenset[Scope]

#: Anybody may ask this, without a key too.
OPEN: Scopes = frozenset()

_INFERENCE, _FEEDBACK = frozenset({Scope.INFERENCE}), frozenset({Scope.FEEDBACK})
_READ, _COMMIT = frozenset({Scope.READ}), frozenset({Scope.COMMIT})
_METRICS, _ADMIN = frozenset({Scope.METRICS}), frozenset({Scope.ADMIN})

#: Any one of the scopes will do. Trinity's prefix is taken off before.
_ROUTES: dict[tuple[str, str], Scopes] = {
    ("POST", "/v1/chat/completions"): _INFERENCE,
    ("POST", "/v1/completions"): _INFERENCE,
    ("POST", "/v1/responses"): _INFERENCE,
    ("POST", "/v1/messages"): _INFERENCE,
    ("POST", "/v1/messages/count_tokens"): _INFERENCE,
    ("POST", "/tokenize"): _INFERENCE,
    ("POST", "/detokenize"): _INFERENCE,
    ("GET", "/tokenizer_info"): _INFERENCE,
    ("GET", "/version"): _INFERENCE,
    ("GET", "/v1/models"): _INFERENCE | _READ,
    ("GET", "/v1/chat/completions"): _READ,
    ("POST", "/feedback"): _FEEDBACK,
    ("POST", "/v1/feedback_tokens"): _FEEDBACK,
    ("POST", "/commit"): _COMMIT,
    ("GET", "/training"): _READ | _COMMIT,
    ("GET", "/training/calls"): _READ | _COMMIT,
    ("GET", "/metrics"): _METRICS,
    ("GET", "/"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/health"): OPEN,
    ("GET", "/health/live"): OPEN,
    ("GET", "/health/ready"): OPEN,
    ("GET", "/ping"): OPEN,
    ("POST", "/ping"): OPEN,
}

_PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ping"})

#: The page decides by its sessions who may see it: a browser sends no key.
PAGE = "/ui"

#: The same for all routes that begin so; the first counts.
_BELOW: tuple[tuple[str, str, Scopes], ...] = (
    ("GET", "/v1/chat/completions/", _READ),
    ("POST", "/v1/chat/completions/", _COMMIT),
    ("DELETE", "/v1/chat/completions/", _COMMIT),
    ("GET", "/v1/responses/", _INFERENCE | _READ),
    ("GET", "/v1/models/", _INFERENCE | _READ),
)

_TRINITY = "/trinity/"

#: What is about all tenants. The administrator of one other than the operator's has no say there.
_OF_ALL_TENANTS = ("/admin/versions", "/metrics")


def is_about_all_tenants(path: str) -> bool:
    """Whether a path is about all tenants at once."""
    path = path[len(_TRINITY) - 1 :] if path.startswith(_TRINITY) else path
    return any(path == each or path.startswith(f"{each}/") for each in _OF_ALL_TENANTS)


def is_probe(path: str) -> bool:
    """Whether a path says only that the service lives: load balancers ask it."""
    return path.removeprefix(_TRINITY[:-1]) in _PROBES


def required_scopes(method: str, path: str) -> Scopes:
    """The scopes of which a request needs one."""
    if path.startswith(_TRINITY):
        path = path[len(_TRINITY) - 1 :]
    found = _ROUTES.get((method, path))
    if found is not None:
        return found
    if path == PAGE or path.startswith(f"{PAGE}/"):
        return OPEN
    return next((scopes for verb, begin, scopes in _BELOW if verb == method and path.startswith(begin)), _ADMIN)
