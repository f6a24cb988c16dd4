"""From a model in memory to a bundle: the low-level writer, and one file per framework, opened when it is used."""

from converters.bundle import read_bundle_weights as read_bundle_weights
from converters.exporters.bundle_writer import write_bundle as write_bundle
from converters.exporters.client_side import ClientSide as ClientSide
from converters.exporters.description import Description as Description
from converters.exporters.description import Exported as Exported
from converters.exporters.jax_functions import JaxModel as JaxModel
from converters.exporters.jax_functions import export_jax as export_jax
from converters.exporters.transformers_models import TransformersModel as TransformersModel
from converters.exporters.transformers_models import export_transformers as export_transformers
from nereid_backend.spec import TensorSpec as TensorSpec
