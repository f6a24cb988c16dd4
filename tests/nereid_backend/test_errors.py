from __future__ import annotations

from nereid_backend import errors
from nereid_backend.errors import NereidError

CANONICAL = {
    "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
}  # fmt: skip


def test_every_error_belongs_to_the_tree_and_names_a_canonical_grpc_code() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    assert {c.__name__: c.code for c in classes if not issubclass(c, NereidError) or c.code not in CANONICAL} == {}


def test_what_a_bundle_got_wrong_is_one_family_and_what_a_caller_got_wrong_is_not_in_it() -> None:
    family = {c.__name__ for c in errors.BundleError.__subclasses__()}
    assert family == {
        "ManifestError", "ContractError", "SignatureError", "WeightsError", "RecordError", "SpecError",
        "RepositoryError", "UserCodeError", "ConversionKilled", "ExportError", "ReportError", "TritonConfigError",
    }  # fmt: skip
    assert {c.code for c in errors.BundleError.__subclasses__()} == {"FAILED_PRECONDITION"}
    assert not issubclass(errors.InvalidArgument, errors.BundleError)
    assert errors.InvalidArgument.code == "INVALID_ARGUMENT"
    assert (errors.EngineError.code, errors.OutputError.code) == ("INTERNAL", "INTERNAL")
